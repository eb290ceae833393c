"""What merging by LSE has to be beside right: in the order of the sources, and for any cut of the keys.

Results are compared by `tests/kernels/test_suite.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.merge_states import merge_states
from kernels.attention.reference import flash_decode
from kernels.attention.reference import merge_states as reference
from tests.kernels.oracle import make_case


def test_order_is_the_sources(device: torch.device) -> None:
    """Terms whose sum depends on the order: large, -large, small is small; small, large, -large is not."""
    lse = torch.zeros(3, 1, 1, device=device)
    values = torch.tensor([3e8, -3e8, 1.0], device=device)[:, None, None, None].expand(3, 1, 1, 16).contiguous()
    kept = merge_states(values, lse)
    lost = merge_states(values.flip(0).contiguous(), lse)
    assert (kept * 3 == 1).all() and (lost == 0).all()


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 10_000))
def test_any_cut_of_the_keys_combines_to_the_whole(parts: int, length: int, seed: int) -> None:
    """Attending to shards and combining is attending to all: the property that Helix stands on."""
    whole = make_case([1], [length], seed=seed)
    cuts = sorted(torch.randint(0, length + 1, (parts - 1,), generator=torch.Generator().manual_seed(seed)).tolist())
    bounds = list(zip([0, *cuts], [*cuts, length], strict=True))
    shards = [
        flash_decode(whole.q[:, None], replace(whole.paged(), lo=torch.tensor([[lo]]), hi=torch.tensor([[hi]])))
        for lo, hi in bounds
    ]
    out, lse = reference(torch.stack([o[:, 0] for o, _ in shards]), torch.stack([s[:, 0] for _, s in shards]))
    whole.check(out, lse)
