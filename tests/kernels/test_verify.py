"""Greedy verification and packing: kernels against a walk over lists, and against the eager reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.papers import verification as bench_verify
from benchmarks.papers import verification_kernels as baselines
from benchmarks.papers import verification_reference as reference
from benchmarks.papers import verify_and_pack as module
from benchmarks.papers.verify_and_pack import Packed, Verified, verify_and_pack
from kernels.peers.ll_protocol import send

SCANS = {"naive": baselines.naive, "ballot": baselines.ballot, "scan": baselines.verify}
FUSED = {"fused": verify_and_pack, "one block": baselines.verify_and_pack_one_block}


@dataclass
class Case:
    """Tokens and rows in wider tensors, what is beside them poisoned."""

    draft: Tensor
    target: Tensor
    kv: Tensor
    accepted: list[int]


def make(B: int, G: int, D: int, device: torch.device, alpha: float = 0.5, dtype: torch.dtype = torch.float32) -> Case:
    """Binomial acceptance; alpha 0 and 1 are all-reject and all-accept."""
    g = torch.Generator().manual_seed(0)
    accepted = (torch.rand(B, G, generator=g) < alpha).sum(1).tolist()
    wide = torch.randint(0, 5, (B, G + 3), generator=g)  # few tokens: they also agree behind the first mismatch
    target = torch.randint(0, 5, (B, G + 4), generator=g)[:, 1 : G + 2]
    draft = wide[:, :G]
    for i, k in enumerate(accepted):
        target[i, :k] = draft[i, :k]
        if k < G:
            target[i, k] = draft[i, k] + 1
        wide[i, G:] = target[i, G]  # would count as accepted
    kv = torch.randn(B, G + 1, D, generator=g).to(dtype)
    kv[:, G:] = torch.nan
    return Case(wide.to(device)[:, :G], strided(target, device), kv.to(device)[:, :G], accepted)


def strided(x: Tensor, device: torch.device) -> Tensor:
    """A copy whose rows lie apart."""
    wide = torch.full((len(x), x.shape[1] + 2), -9, dtype=x.dtype, device=device)
    wide[:, : x.shape[1]] = x.to(device)
    return wide[:, : x.shape[1]]


def poisoned(case: Case) -> tuple[Verified, Packed]:
    """Outputs in which nothing is right yet."""
    B = len(case.draft)
    out = Verified.create(B, case.draft.device)
    out.accepted.fill_(-7)
    out.next_tokens.fill_(-7)
    out.has_mismatch.copy_(torch.tensor([k == case.draft.shape[1] for k in case.accepted]))
    packed = Packed.create(case.kv)
    packed.kv.fill_(torch.nan)
    packed.offsets.fill_(-7)
    return out, packed


def check_verified(out: Verified, case: Case) -> None:
    G = case.draft.shape[1]
    assert out.accepted.tolist() == case.accepted
    assert out.has_mismatch.tolist() == [k < G for k in case.accepted]
    assert out.next_tokens.tolist() == [row[k] for row, k in zip(case.target.tolist(), case.accepted, strict=True)]
    for mine, theirs in zip(out.tensors, reference.verify(case.draft, case.target), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def check_packed(packed: Packed, case: Case) -> None:
    """All accepted rows, sequence after sequence, and where each one's begin."""
    total, kept = sum(case.accepted), zip(case.kv, case.accepted, strict=True)
    wanted = torch.cat([kv[:k] for kv, k in kept])
    assert packed.offsets.tolist() == [sum(case.accepted[:i]) for i in range(len(case.accepted) + 1)]
    assert torch.equal(packed.kv[:total], wanted)
    assert packed.kv[total:].isnan().all(), "rows behind the last one are not ours"
    rows, offsets = reference.pack(case.kv, torch.tensor(case.accepted, device=case.kv.device))
    assert torch.equal(rows, wanted) and torch.equal(packed.offsets, offsets)


def check_fused(op: Callable[..., None], case: Case, times: int) -> None:
    out, packed = poisoned(case)
    for _ in range(times):
        op(case.draft, case.target, case.kv, out, packed)
        check_verified(out, case)
        check_packed(packed, case)


@pytest.fixture
def fresh_launches() -> Iterator[None]:
    """Launches made under patched constants neither serve later tests nor come from earlier ones."""
    prepared = baselines.scan_launch, baselines.packing_launch, module.fused_launch, baselines.one_block_launch
    for cached in prepared:
        cached.cache_clear()
    yield
    for cached in prepared:
        cached.cache_clear()


@pytest.fixture(params=["compares", "compares, loads ahead", "looks up"])
def many_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh_launches: None) -> None:
    """Small tiles, and a GPU's number of programs: copies are split, and take several rounds."""
    monkeypatch.setattr(module, "sm_count", lambda device: 6)
    monkeypatch.setattr(module, "TILE_BYTES", 2048)
    monkeypatch.setattr(module, "MIN_TILE_BYTES", 1024)
    monkeypatch.setattr(module, "TOKENS", 1 << 20 if request.param.startswith("compares") else 0)
    monkeypatch.setattr(module, "AHEAD_BYTES", 1 << 20 if request.param.endswith("ahead") else 0)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("B, G", [(1, 1), (3, 0), (33, 5), (4, 64), (2, 100)])
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_scans(
    scan: Callable[[Tensor, Tensor, Verified], None], B: int, G: int, alpha: float, device: torch.device
) -> None:
    case = make(B, G, 1, device, alpha=alpha)
    out, _ = poisoned(case)
    scan(case.draft, case.target, out)
    check_verified(out, case)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("B, G, D", [(1, 1, 128), (3, 0, 4), (2, 100, 7), (12, 5, 384), (40, 9, 33)])
@pytest.mark.usefixtures("many_programs")
def test_packing(B: int, G: int, D: int, alpha: float, device: torch.device) -> None:
    case = make(B, G, D, device, alpha=alpha)
    for fused in list(FUSED.values())[: 1 + (B <= baselines.ONE_BLOCK_BATCH)]:
        check_fused(fused, case, 2)
    _, packed = poisoned(case)
    accepted = torch.tensor(case.accepted, device=device)
    baselines.pack(case.kv, accepted, packed)
    check_packed(packed, case)
    rows, offsets = baselines.pack_waiting(case.kv, accepted)
    assert torch.equal(rows, packed.kv[: len(rows)]) and torch.equal(offsets, packed.offsets)


@triton.jit
def _look_kernel(lengths, total, tag, b, LOOKS: tl.constexpr, BLOCK_B: tl.constexpr):
    tl.store(total, module.looked_up(lengths, tag, b, LOOKS, BLOCK_B))


@triton.jit
def _send_late(to, words, tag, mask):
    send(to, words, tag - (words % 2 == 0).to(tl.int32), mask)


@pytest.mark.parametrize("looks", [1, 3])
def test_lengths_of_another_launch_are_not_taken(looks: int, device: torch.device) -> None:
    b, tag = 70, 7  # three blocks of 32
    words = torch.arange(100, device=device) | tag << 32
    words[b:] = (tag + 1) << 32 | 5  # sequences behind it do not matter
    total = torch.zeros(1, dtype=torch.int64, device=device)
    _look_kernel[(1,)](words, total, tag, b, LOOKS=looks, BLOCK_B=32, num_warps=1)
    assert total.item() == sum(range(b))
    for late, old in ((0, 0), (33, (tag - 1) << 32 | 33), (69, (tag + 1) << 32 | 69), (31, 31)):
        some = words.clone()
        some[late] = old
        _look_kernel[(1,)](some, total, tag, b, LOOKS=looks, BLOCK_B=32, num_warps=1)
        assert total.item() >= module.UNKNOWN.value


@pytest.mark.parametrize("late", [False, True], ids=["one look", "some late"])
def test_late_lengths_are_found_from_tokens(
    late: bool, monkeypatch: pytest.MonkeyPatch, many_programs: None, device: torch.device
) -> None:
    monkeypatch.setattr(module, "LOOKS", 2 if late else 1)  # on a GPU one look is too early for most
    if late:
        monkeypatch.setattr(module, "send", _send_late)  # even lengths carry the last launch's tag
    check_fused(verify_and_pack, make(9, 12, 130, device), 3)


def test_a_missing_token_is_never_accepted(device: torch.device) -> None:
    draft = torch.tensor([[3, -1, 4], [-1, 2, 2], [1, 2, -1]], device=device)
    target = torch.tensor([[3, -1, 4, 5], [6, 2, 2, 2], [1, 2, -1, 9]], device=device)  # -1: broken rows
    case = Case(draft, target, torch.randn(3, 3, 2, device=device), [1, 0, 2])
    for verify in SCANS.values():
        out, _ = poisoned(case)
        verify(case.draft, case.target, out)
        check_verified(out, case)


@pytest.mark.usefixtures("many_programs")
def test_a_planted_error_shows(device: torch.device) -> None:
    case = make(6, 12, 96, device)
    out, packed = poisoned(case)
    draft = case.draft.clone()
    first = case.accepted.index(max(case.accepted))
    draft[first, 0] = -1  # one token less in one sequence moves all that follow
    verify_and_pack(draft, case.target, case.kv, out, packed)
    with pytest.raises(AssertionError):
        check_verified(out, case)
    with pytest.raises(AssertionError):
        check_packed(packed, case)


def test_bad_shapes_are_refused(device: torch.device) -> None:
    tokens = torch.zeros(2, module.MAX_GAMMA + 1, dtype=torch.int64, device=device)
    out = Verified.create(2, device)
    with pytest.raises(AssertionError, match="4 drafted tokens need 5 of the target"):
        baselines.verify(tokens[:, :4], tokens[:, :4], out)
    with pytest.raises(AssertionError, match="at most 1024"):
        baselines.verify(tokens, torch.zeros(2, module.MAX_GAMMA + 2, dtype=torch.int64, device=device), out)
    with pytest.raises(AssertionError, match="2 sequences, but outputs"):
        baselines.verify(tokens[:, :4], tokens[:, :5], Verified.create(3, device))
    kv = torch.zeros(2, 4, 8, device=device)
    with pytest.raises(AssertionError, match="2 sequences, but lengths"):
        baselines.pack(kv, tokens[:, :2].flatten(), Packed.create(kv))


def test_the_benchmark_knows_what_it_times() -> None:
    cpu = torch.device("cpu")
    work = bench_verify.workload(64, 50, 0.7, 3, torch.float32, cpu, seed=1)
    # Binomial(50, 0.7) has a deviation of 3.24; the mean of 64 is within five of its own.
    assert abs(float(work.accepted.double().mean()) - 35) < 5 * 3.24 / 8
    bench_verify.check(work, "fused", baselines.verify, verify_and_pack)

    def forgets_the_last_row(draft: Tensor, target: Tensor, kv: Tensor, out: Verified, packed: Packed) -> None:
        verify_and_pack(draft, target, kv, out, packed)
        packed.kv[packed.offsets[-1] - 1] = 0

    with pytest.raises(RuntimeError, match="broken differs from the reference"):
        bench_verify.check(work, "broken", None, forgets_the_last_row)


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("B", [1, 32, 133, 512])
@pytest.mark.parametrize("G, D", [(1, 4096), (8, 2048), (77, 1000), (256, 129)])
def test_bf16_payloads(B: int, G: int, D: int, alpha: float) -> None:
    check_fused(verify_and_pack, make(B, G, D, torch.device("cuda"), alpha=alpha, dtype=torch.bfloat16), 1)


@pytest.mark.gpu(gb=12)
def test_offsets_past_2_to_the_31() -> None:
    B, G, D = 260, 1024, 8192
    case = make(B, G, 1, torch.device("cuda"), alpha=1.0)
    kv = torch.zeros(B, G, D, dtype=torch.bfloat16, device="cuda")
    kv[-2:].normal_()
    out, packed = Verified.create(B, "cuda"), Packed.create(kv)
    verify_and_pack(case.draft, case.target, kv, out, packed)
    assert torch.equal(packed.kv.view_as(kv)[-2:], kv[-2:])
