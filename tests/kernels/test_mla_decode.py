"""mla_decode: kernel and reference against float64, over heads, pages, bounds and splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.mla import decode_common_sm90
from kernels.mla.decode import mla_decode
from kernels.mla.reference import mla_decode as reference
from tests.kernels.mla_oracle import LatentCase, make_latent_case
from tests.kernels.oracle import check, low_precision
from tests.kernels.test_flash_decode import run

SHAPES = {
    "plain": dict(counts=[1, 1, 1], lengths=[40, 1, 17]),
    "empty-shards": dict(counts=[1, 1, 1], lengths=[0, 33, 0]),
    "all-empty": dict(counts=[1, 1], lengths=[0, 0]),
    "one-head": dict(counts=[1, 1], lengths=[70, 5], heads=1, page_size=48),
    "three-heads-verify-2": dict(counts=[2, 2], lengths=[37, 2], heads=3, page_size=1),
    "sixteen-heads-page-64": dict(counts=[1, 1], lengths=[130, 64], heads=16, page_size=64),
    "twenty-heads-verify-4": dict(counts=[4, 4], lengths=[66, 5], heads=20, page_size=64),
    "80-heads": dict(counts=[1, 1], lengths=[50, 9], heads=80, latent=16),
    "odd-dims": dict(counts=[3], lengths=[45], heads=5, latent=40, rope=24),
    "rope-as-wide": dict(counts=[1], lengths=[33], heads=2, latent=8, rope=8),
    "window": dict(counts=[1, 1, 1], lengths=[90, 20, 7], window=19),
    "window-verify": dict(counts=[4, 4], lengths=[90, 21], window=10, page_size=48),
    "verify-16": dict(counts=[16], lengths=[50], heads=6),
    "verify-32": dict(counts=[32, 32], lengths=[70, 33], heads=3),
    "fewer-keys-than-queries": dict(counts=[4, 4], lengths=[2, 40]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: str) -> None:
    case = make_latent_case(**SHAPES[shape])
    check(*run(reference, case), case)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: str, device: torch.device) -> None:
    case = make_latent_case(**SHAPES[shape], device=device)
    check(*run(mla_decode, case), case)


@pytest.mark.parametrize("sms", [1, 2, 7, 50])
@pytest.mark.parametrize("shape", ["plain", "twenty-heads-verify-4", "window-verify", "empty-shards"])
def test_sms(shape: str, sms: int, device: torch.device) -> None:
    case = make_latent_case(**SHAPES[shape], device=device)
    check(*run(mla_decode, case, sms=sms), case)


def test_more_parts_than_one_go_merges(device: torch.device) -> None:
    """A long sequence beside a short one, items that begin inside a run, and several query tiles."""
    case = make_latent_case([2, 2], [1100, 100], heads=9, latent=16, device=device)
    check(*run(mla_decode, case, sms=37), case)


@low_precision(mla_decode, reference)
def test_low_precision(dtype: torch.dtype, op: Any, device: torch.device) -> None:
    case = make_latent_case([2, 2], [75, 9], heads=20, latent=64, rope=16, dtype=dtype, device=device)
    check(*run(op, case), case)


def test_writes_where_told_and_nothing_else(device: torch.device) -> None:
    case = make_latent_case([1, 1], [40, 0], device=device)
    out = torch.full((2, 1, 8, 40), torch.nan, device=device)
    lse = torch.full((2, 1, 8), torch.nan, device=device)
    check(*run(mla_decode, case, out=out[:, :, 2:6, :32], lse=lse[:, :, 2:6], sms=3), case)
    check(out[:, 0, 2:6, :32], lse[:, 0, 2:6], case)
    for rest in (out[:, :, :2], out[:, :, 6:], out[..., 32:], lse[:, :, :2], lse[:, :, 6:]):
        assert rest.isnan().all()


@pytest.mark.parametrize("column", [3, 35], ids=["latent", "rope"])
def test_nan_in_a_key_that_is_read_surfaces(column: int, device: torch.device) -> None:
    case = make_latent_case([1], [20], device=device)
    case.cache[int(case.block_table[0, 0]), 3, column] = torch.nan
    assert run(mla_decode, case)[0].isnan().any()


def test_repeats_bitwise(device: torch.device) -> None:
    case = make_latent_case([3, 3], [90, 31], heads=6, latent=16, device=device)
    first, second = run(mla_decode, case, sms=5), run(mla_decode, case, sms=5)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("planted", ["one key left out", "one key too many", "scale", "lse", "no rope part"])
def test_planted_errors_are_caught(planted: str) -> None:
    case = make_latent_case([1, 1], [40, 23])
    expected = case.expected()
    q = case.q
    if planted == "one key left out":
        case.hi[0] -= 1
    if planted == "one key too many":
        case.hi[1] += 1
        case.cache[int(case.block_table[1, 1]), 23 - 16] = case.keys[1][0, 0]
    if planted == "scale":
        case.q = q * 1.001
    if planted == "no rope part":
        case.q = q.clone()
        case.q[..., case.latent :] = 0
    out, lse = run(reference, case)
    if planted == "lse":
        lse = lse + 1e-3
    with pytest.raises(AssertionError):
        check(out, lse, case, expected)


# What Hopper's kernels take: latents of 512 + 64, pages of whole tiles of 64 keys. Up to 32 rows are few.
ON_HOPPER = {
    "one-head": dict(counts=[1] * 4, lengths=[5000, 0, 333, 1], heads=1),
    "16-heads": dict(counts=[1] * 4, lengths=[5000, 0, 333, 1], heads=16),
    "20-heads": dict(counts=[1] * 3, lengths=[700, 64, 65], heads=20),
    "32-heads": dict(counts=[1] * 4, lengths=[5000, 0, 333, 1], heads=32),
    "33-heads": dict(counts=[1] * 4, lengths=[5000, 0, 333, 1], heads=33),
    "verify-2": dict(counts=[2] * 4, lengths=[5000, 0, 333, 2], heads=16),
    "verify-2-of-10-heads": dict(counts=[2] * 5, lengths=[700, 1, 63, 64, 65], heads=10),
    "verify-3-of-20-heads": dict(counts=[3] * 3, lengths=[700, 64, 65], heads=20),
    "verify-7": dict(counts=[7] * 3, lengths=[700, 3, 129], heads=33),
    "verify-16-of-2-heads": dict(counts=[16] * 3, lengths=[700, 16, 70], heads=2),
    "verify-32": dict(counts=[32] * 2, lengths=[700, 40], heads=5),
    "verify-32-of-one-head": dict(counts=[32] * 3, lengths=[700, 32, 70], heads=1),
    "one-sequence": dict(counts=[1], lengths=[3000], heads=64),
    "one-sequence-of-few": dict(counts=[1], lengths=[3000], heads=16),
    "page-128": dict(counts=[2] * 3, lengths=[700, 64, 65], heads=48, page_size=128),
    "page-192-of-few": dict(counts=[2] * 3, lengths=[700, 64, 65], heads=12, page_size=192),
    "fp16": dict(counts=[1] * 3, lengths=[700, 64, 65], heads=128, dtype=torch.float16),
    "fp16-of-few": dict(counts=[1] * 3, lengths=[700, 64, 65], heads=16, dtype=torch.float16),
    "window": dict(counts=[1] * 3, lengths=[900, 200, 70], heads=64, window=190),
    "window-of-few": dict(counts=[1] * 3, lengths=[900, 200, 70], heads=16, window=190),
    "window-verify-4": dict(counts=[4, 4], lengths=[900, 210], heads=32, window=100),
    "window-verify-2-of-few": dict(counts=[2, 2, 2], lengths=[900, 210, 65], heads=16, window=64),
    "all-empty": dict(counts=[1, 1], lengths=[0, 0], heads=128),
    "all-empty-of-few": dict(counts=[1, 1], lengths=[0, 0], heads=16),
    "sequences-of-more-than-a-warp": dict(counts=[1] * 70, lengths=list(range(70)), heads=40),
    "sequences-of-more-than-a-warp-of-few": dict(counts=[1] * 70, lengths=list(range(70)), heads=16),
    **{
        f"from-{n}-keys-of-{heads}": dict(counts=[1] * 8, lengths=list(range(n, n + 8)), heads=heads)
        for n in (1, 57, 121, 185)
        for heads in (16, 128)
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ON_HOPPER)
def test_on_hopper(shape: str) -> None:
    """Each schedule of programs, into outputs full of NaN, and bitwise the same when repeated."""
    settings = dict(page_size=64, dtype=torch.bfloat16) | ON_HOPPER[shape]
    case = make_latent_case(**settings, latent=512, rope=64, device="cuda")
    check_on_hopper(case)


def check_on_hopper(case: LatentCase) -> None:
    B = len(case.counts)
    assert decode_common_sm90.fits(case.q.unflatten(0, (B, -1)), case.paged(B))
    expected = case.expected()
    for options in ({}, {"sms": 7}):
        shape_of_lse = (B, case.counts[0], case.q.shape[1])
        # Strided, as a slice of something wider.
        out = torch.full((*shape_of_lse, 520), torch.nan, dtype=case.q.dtype, device="cuda")[..., :512]
        lse = torch.full(shape_of_lse, torch.nan, device="cuda")
        check(*run(mla_decode, case, out=out, lse=lse, **options), case, expected)
        first = out.clone()
        for _ in range(5):
            run(mla_decode, case, out=out, lse=lse, **options)
            assert torch.equal(first, out)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [12, 64])
def test_bounds_that_are_read_early(heads: int) -> None:
    case = make_latent_case(
        [2, 2], [700, 250], heads=heads, latent=512, rope=64, page_size=64, dtype=torch.bfloat16, device="cuda"
    )
    check(*run(mla_decode, case, early=True), case)


@pytest.mark.parametrize(
    "change, fits",
    [
        ({}, True),
        ({"heads": 3}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"page_size": 192}, True),
        ({"page_size": 96}, False),
        ({"latent": 448}, False),
    ],
    ids=str,
)
def test_what_fits_hopper(change: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = dict(heads=32, latent=512, dtype=torch.bfloat16, page_size=64) | change
    case = make_latent_case([1], [3], rope=576 - shape["latent"], **shape)
    assert decode_common_sm90.fits(case.q[:, None], case.paged(1)) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_one_graph_serves_every_length(heads: int) -> None:
    case = make_latent_case(
        [1, 1, 1], [700, 3, 250], heads=heads, latent=512, rope=64, page_size=64, dtype=torch.bfloat16, device="cuda"
    )
    B = 3
    q, keys = case.q.unflatten(0, (B, -1)), case.paged(B)
    hi = keys.hi
    mla_decode(q, keys)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla_decode(q, keys)
    for bounds in ([1, 0, 64], [65, 1, 0], [512, 2, 128], [700, 3, 250]):
        hi.copy_(torch.tensor(bounds, device="cuda")[:, None])
        case.hi = hi.flatten().clone()
        graph.replay()
        check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads, count", [(16, 1), (16, 2), (16, 8), (20, 3), (64, 1), (128, 1), (128, 8), (1, 16)])
def test_real_sizes(dtype: torch.dtype, page_size: int, heads: int, count: int) -> None:
    case = make_latent_case(
        [count] * 4, [5000, 0, 333, count], heads=heads, latent=512, rope=64,
        page_size=page_size, dtype=dtype, device="cuda",
    )  # fmt: skip
    check(*run(mla_decode, case), case)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """The last pages of a cache of 2^32 elements hold what is read."""
    pages, page_size = (1 << 32) // (64 * 576) + 1, 64
    cache = torch.empty(pages, page_size, 1, 576, dtype=torch.bfloat16, device="cuda")
    case = make_latent_case(
        [1], [100], heads=16, latent=512, rope=64, page_size=page_size, dtype=torch.bfloat16, device="cuda"
    )
    for i in range(2):
        cache[pages - 1 - i] = case.k_cache[int(case.block_table[0, i])]
        case.block_table[0, i] = pages - 1 - i
    case.k_cache = cache
    check(*run(mla_decode, case), case)
