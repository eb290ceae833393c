"""fold_blocks: kernel and reference against each other and against the tokens that each rank owns."""

from __future__ import annotations

import pytest
import torch

from helix.layout import HelixLayout
from helix.worker.blocks import BlockLayout
from helix.worker.kv_cache_spec import keys_and_values
from kernels.sparse.block_bounds import fold_blocks
from kernels.sparse.reference import fold_blocks as reference

CASES = {
    "one-rank": dict(kvp=1, block=16, page=16, heads=2, dim=64),
    "three-ranks": dict(kvp=3, block=16, page=16, heads=1, dim=80),
    "page-of-several-blocks": dict(kvp=2, block=8, page=48, heads=3, dim=16),
    "block-of-several-pages": dict(kvp=2, block=96, page=32, heads=1, dim=128),
}
BEFORE, AFTER = [0, 17, 90, 200, 64, 31], [0, 64, 96, 300, 64, 32]


@pytest.mark.parametrize("op", [fold_blocks, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("part", [None, 8, 4])
@pytest.mark.parametrize("name", CASES)
def test_pages_that_were_filled(name: str, part: int | None, op: object, device: torch.device) -> None:
    """Pages that were filled, and no others, in every layer, and their parts; what nobody may read is NaN."""
    c = CASES[name]
    gen = torch.Generator().manual_seed(7)
    layout = HelixLayout.create("helix", c["kvp"])
    n, page, columns, layers = len(BEFORE), c["page"], 30, 2
    parts = page // (part or page)
    tables = torch.randperm(n * columns, generator=gen).view(n, columns).int()
    starts = torch.arange(n) % c["kvp"]
    for rank in range(c["kvp"]):
        keys = torch.full((layers, n * columns, page, c["heads"], c["dim"]), torch.nan)
        wanted = torch.full((layers, n * columns, c["heads"], 2, c["dim"]), torch.nan)
        part_bounds = torch.full((layers, n * columns, c["heads"], parts, 2, c["dim"]), torch.nan)
        for i in range(n):
            held = int(layout.local_length(AFTER[i], rank, c["block"], int(starts[i])))
            old = int(layout.local_length(BEFORE[i], rank, c["block"], int(starts[i]))) // page
            for j in range(-(-held // page)):
                used = min(page, held - j * page)
                k = torch.randn(layers, used, c["heads"], c["dim"], generator=gen)
                keys[:, tables[i, j], :used] = k
                if j >= old and used == page:
                    wanted[:, tables[i, j]] = torch.stack((k.amax(1), k.amin(1)), 2)
                    for number, x in enumerate(k.split(page // parts, 1)):
                        part_bounds[:, tables[i, j], :, number] = torch.stack((x.amax(1), x.amin(1)), 2)
        bounds = torch.full_like(wanted, torch.nan).to(device)
        args = [x.to(device) for x in (tables, starts, torch.tensor(BEFORE), torch.tensor(AFTER))]
        most = [300 // page + 1] if op is fold_blocks else []
        found = torch.full_like(part_bounds, torch.nan).to(device) if parts > 1 else None
        grid = dict(kvp=c["kvp"], kvp_rank=rank, append_block=c["block"])
        op(keys.to(device), None, bounds, *args, *most, **grid, part_bounds=found)  # type: ignore[operator]
        if found is not None:
            torch.testing.assert_close(found.cpu(), part_bounds, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(bounds.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def test_a_key_that_is_no_number_surfaces(device: torch.device) -> None:
    keys = torch.zeros(1, 1, 16, 1, 16, device=device)
    keys[0, 0, 3, 0, 5] = torch.nan
    bounds = torch.zeros(1, 1, 1, 2, 16, device=device)
    parts = torch.zeros(1, 1, 1, 2, 2, 16, device=device)
    lengths = (torch.tensor([n], device=device) for n in (0, 0, 16))
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    grid = dict(kvp=1, kvp_rank=0, append_block=16)
    fold_blocks(keys, None, bounds, table, *lengths, 1, **grid, part_bounds=parts)
    assert bounds.isnan().nonzero()[:, -1].tolist() == [5, 5]
    assert parts.isnan().nonzero()[:, -3:].tolist() == [[0, 0, 5], [0, 1, 5]]


@pytest.mark.parametrize("kv", ["auto", "k16v8", "fp8"])
def test_bounds_of_keys_in_blocks(kv: str, device: torch.device) -> None:
    """Those of the numbers that e4m3 stands for, with scales of its own for each token."""
    block = BlockLayout.of([keys_and_values(2, 40, "float32", kv, None)], 16)
    kept = block.pages(torch.full((2, 3 * 2, block.words), -1, dtype=torch.int32, device=device))
    kept["keys"].copy_(torch.randn(2, 3, 16, 2, 40, generator=torch.Generator().manual_seed(0)).to(device))
    scales, plain = kept.get("key_scales"), kept["keys"].float()
    if scales is not None:
        each = torch.tensor([0.25, 2.0, 8.0], device=device)[torch.arange(192, device=device) % 3]
        scales.copy_(each.view(2, 3, 2, 16))
        plain = plain * scales.transpose(2, 3)[..., None]
    table, start = torch.tensor([[2, 0, 1]], device=device).int(), torch.zeros(1, dtype=torch.int64, device=device)
    wanted = torch.stack([plain.amax(2), plain.amin(2)], 3)
    bounds = torch.full_like(wanted, torch.nan)
    where = dict(kvp=1, kvp_rank=0, append_block=16)
    fold_blocks(kept["keys"], scales, bounds, table, start, start, start + 48, 3, **where)
    torch.testing.assert_close(bounds, wanted, rtol=0, atol=0)
