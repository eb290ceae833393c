"""What only one algorithm of the routed experts shows; results are compared by `tests/kernels/test_suite.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from comm.dual_batch_overlap import MIN_MICRO_BATCH_TOKENS
from kernels.dense import linear_fp8_sm90, linear_packed_sm90, linear_sm90, split_k_reduce_sm90
from kernels.moe import experts as moe_module
from kernels.moe import experts_many_sm90, experts_packed_sm90, experts_scaled_sm90, experts_sm90
from kernels.moe.experts import RoutedExperts
from kernels.moe.router import route
from kernels.scaled import ScaledMatrix
from tests.kernels.cases_experts import Case, make_experts, poisoned
from tests.kernels.cases_experts_sm90 import NARROW, fits_either, fits_few, fits_many, fits_scaled, make_wide
from tests.kernels.suite import check_in_a_graph

E4M3, E2M1 = ("e4m3", 128, (0, 0)), ("e2m1", 32, (0, 0))
CUDA = torch.device("cuda")


def result(case: Case) -> torch.Tensor:
    return case.run(RoutedExperts.compute)[0]


@pytest.mark.parametrize("clamped", [False, True])
def test_the_oracle_is_transformers(clamped: bool, device: torch.device) -> None:
    case = make_experts(N=9, k=3, E=6, H=32, F=24, clamped=clamped, poison=False, device=device)
    if clamped:
        case.clamp_at = 7.0
        case.x *= 4  # so that some gates reach it
        experts: Any = GptOssExperts(GptOssConfig(num_local_experts=6, hidden_size=32, intermediate_size=24))
        gate, up = case.gate_up.chunk(2, 1)
        assert case.gate_up_bias is not None
        experts.gate_up_proj.data = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
        experts.gate_up_proj_bias.data = torch.stack(case.gate_up_bias.chunk(2, 1), 2).flatten(1)
        experts.down_proj.data, experts.down_proj_bias.data = case.down.transpose(1, 2), case.down_bias
    else:
        experts = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=6, hidden_size=32, moe_intermediate_size=24))
        experts.gate_up_proj.data, experts.down_proj.data = case.gate_up, case.down
    with torch.no_grad():
        wanted = experts(case.x, case.ids.long(), case.weights)
    # Sums of 32 and 24 terms in another order: a few units of 2^-24 of terms up to 30.
    for found in (case.wanted.to(wanted), result(case)):
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)


@pytest.mark.gpu(gb=24)
@pytest.mark.parametrize(
    "shape",
    [
        dict(N=4096, k=9, experts=257, E=257, H=6144, F=256),
        dict(N=2048, k=8, experts=256, E=64, H=7168, F=1024),
        dict(N=8192, k=10, experts=512, E=512, H=4096, F=128),
    ],
    ids=str,
)
def test_many_pairs_as_any_other_algorithm(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_wide(**shape, form=E4M3, device=CUDA)
    assert fits_many(case)
    ours = result(case)
    monkeypatch.setattr(experts_many_sm90, "fits", lambda *args: False)
    # Both round weights or sums, activations and outputs: see `Case.check`.
    torch.testing.assert_close(ours.float(), result(case).float(), atol=60 * 2**-9, rtol=0)


@pytest.mark.gpu(gb=24)
@pytest.mark.parametrize("N", [1, 2, 3, 8])
@pytest.mark.parametrize("choices", ["any", "same", "first-nobody", "nobody"])
@pytest.mark.parametrize(
    "shape",
    [
        dict(k=9, experts=257, E=257, H=6144, F=256, form=E4M3),
        dict(k=8, experts=256, E=32, H=7168, F=2048, form=E4M3),
        dict(k=1, experts=64, E=16, H=2048, F=384, form=E4M3),
        dict(k=4, experts=32, E=32, H=2880, F=2880, form=E2M1),
        dict(k=1, experts=128, E=16, H=2880, F=2880, form=E2M1),
    ],
    ids=str,
)
def test_few_are_found_as_many_are(
    shape: dict[str, Any], choices: str, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pairs looked up in registers, or listed in memory, bits are the same: programs have the same shares."""
    case = make_wide(N=N, choices=choices, device=CUDA, **shape)
    monkeypatch.setattr(torch, "empty", poisoned)
    assert fits_either(case)
    found = result(case)
    case.check(found)
    for _ in range(5):
        assert torch.equal(result(case), found)
    for kernel in (experts_scaled_sm90, experts_packed_sm90):
        monkeypatch.setattr(kernel, "are_few", lambda *sizes: False)
    assert torch.equal(result(case), found)


@pytest.mark.gpu(gb=8)
@pytest.mark.parametrize("form", [E2M1, ("e2m1", 16, (0, 0)), ("int4", 32, (0, 0)), ("int4", 128, (0, 0))], ids=str)
@pytest.mark.parametrize("N", [3, 24, 130])
def test_packed_edges(N: int, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 8, 16 and 32 pairs, with rows of the last tile that no expert has."""
    case = make_wide(N=N, k=4, experts=20, E=16, H=2880, F=352, form=form, device=CUDA)
    monkeypatch.setattr(torch, "empty", poisoned)
    assert fits_scaled(case)
    found = result(case)
    case.check(found)
    assert torch.equal(result(case), found)


@pytest.mark.gpu
def test_what_hopper_does_not_take() -> None:
    case = make_wide(**NARROW, device=CUDA)
    assert fits_few(case)
    x, gate_up, down = case.x, case.gate_up, case.down
    assert not experts_sm90.fits(torch.cat([x, x[:1]]), gate_up, down)
    assert not experts_sm90.fits(x.half(), gate_up.half(), down.half())
    assert not experts_sm90.fits(x[:, 1:], gate_up, down)
    assert not experts_sm90.fits(x, gate_up, down[..., :312])  # a view, for its shape alone
    assert not experts_sm90.fits(x, gate_up.flatten()[1:], down)
    quantized = (336, "e4m3", 16), (336, "e4m3", 8), (328, "e4m3", 0), (336, "e4m3", 4), (352, "e2m1", 0)
    for F, kind, begin in quantized:  # copies begin at multiples of 16 bytes
        form = kind, 32 if kind == "e2m1" else 128, (0, begin)
        case = make_wide(**NARROW | dict(F=F), form=form, device=CUDA)
        assert fits_few(case) == ((F, kind, begin) == quantized[0])


def test_micro_batches_share_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a chunk of 4,096 tokens, 8 of Kimi-K2's 384 experts each, is 16,384 pairs; the other half may overlap."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def matrix(rows: int, columns: int) -> ScaledMatrix:
        data = torch.empty(48, rows, columns // 8, dtype=torch.int32, device="meta")
        scales = torch.empty(48, columns // 32, rows, dtype=torch.bfloat16, device="meta")
        return ScaledMatrix(data, scales, 32, kind="int4")

    gate_up, down = matrix(4096, 7168), matrix(7168, 2048)
    for tokens in (1024, 2047, MIN_MICRO_BATCH_TOKENS):
        x = torch.empty(tokens, 7168, dtype=torch.bfloat16, device="meta")
        shared = experts_packed_sm90.fits(x, 8 * tokens, 384, gate_up, down)
        assert shared == (tokens < MIN_MICRO_BATCH_TOKENS)
    assert experts_many_sm90.fits(x, 8 * tokens, 384, gate_up, down)
    for sizes in (experts_sm90, experts_scaled_sm90, experts_packed_sm90):
        assert sizes.MAX_TOKENS < MIN_MICRO_BATCH_TOKENS
    for rows in (linear_sm90, linear_fp8_sm90, linear_packed_sm90):
        assert rows.MAX_ROWS < MIN_MICRO_BATCH_TOKENS


def layers_in_a_graph(case: Case, experts: int, k: int) -> None:
    logits = torch.randn(12, len(case.x), experts, device="cuda")
    ys = torch.empty(12, *case.x.shape, device="cuda", dtype=torch.bfloat16)

    def layers(between: Callable[[], None]) -> None:
        x = case.x
        for scores, y in zip(logits, ys, strict=True):
            ids, weights = route(scores, k, normalize=True)
            x = result(replace(case, x=x, ids=ids, weights=weights))
            between()
            y.copy_(x)
            between()

    check_in_a_graph(layers, ys)


@pytest.mark.gpu
@pytest.mark.parametrize("N, way", [(2, "few"), (16, "some"), (64, "some")])
def test_layers_in_a_graph_that_start_early(N: int, way: str) -> None:
    E, k, H, F = 64, 8, 2048, 96
    few, _ = moe_module.few_tiles(N, F)
    some, _ = moe_module.tiles_of("some", N * k, E, F, H, torch.bfloat16, num_active=50 / 132)
    assert moe_module.choose_strategy(N, k, E) == way and (few if way == "few" else some)["EARLY"]
    layers_in_a_graph(make_experts(N=N, k=k, E=E, H=H, F=F, dtype=torch.bfloat16, poison=False, device=CUDA), E, k)


@pytest.mark.gpu
@pytest.mark.parametrize("N, form", [(8, None), (2, E2M1), (40, E2M1), (40, E4M3)])
def test_layers_in_a_graph_on_hopper(N: int, form: Any) -> None:
    case = make_wide(N=N, k=4, experts=16, E=8, H=2048, F=768, form=form, poison=False, device=CUDA)
    assert form is None or fits_scaled(case)
    layers_in_a_graph(case, 16, 4)


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has one program, no tile more programs than a tree has leaves, no program two tiles that it joins."""
    monkeypatch.setattr(split_k_reduce_sm90, "gl", SimpleNamespace(minimum=min, maximum=max))
    monkeypatch.setattr(split_k_reduce_sm90, "LEVELS", levels := split_k_reduce_sm90.LEVELS.value)
    for programs in (2, 156, 264):
        for tiles in (0, 1, 2, 3, 16, 45, 112, 131, 132, 133, 264, 265, 2048):
            for steps in (1, 3, 16, 23, 57, 100):
                shares = [split_k_reduce_sm90.share_of.fn(tiles, steps, p, programs) for p in range(programs)]
                active, total = shares[0][2:]
                assert total == tiles * steps and {share[2:] for share in shares} == {(active, total)}
                owners = [p for p, (begin, end, *_) in enumerate(shares) for _ in range(begin, end)]
                assert len(owners) == total and [begin for begin, *_ in shares] == sorted(s[0] for s in shares)
                joined = []
                for tile in range(tiles):
                    mine = sorted(set(owners[tile * steps : (tile + 1) * steps]))
                    begin, count = split_k_reduce_sm90.sharers.fn(tile, steps, active, total)
                    assert mine == [*range(begin, begin + count)] and count <= 1 << levels
                    joined += mine[1:]
                assert len(joined) == len(set(joined))
