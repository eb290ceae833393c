"""moe on Hopper: kernels of few tokens, and of weights of a few bits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.moe import experts_many_sm90, experts_scaled_sm90, experts_sm90
from tests.kernels.routed_experts import Case, check, check_layers_in_a_graph, poison, scaled_case

# Qwen3-30B-A3B, gpt-oss-20b, DeepSeek-R1: experts of a token, in all and on a rank, H, the rank's F, biases and clamp.
RANKS = [
    (8, 128, 16, 2048, 768, False), (8, 128, 32, 2048, 384, False),
    (4, 32, 4, 2880, 2880, True), (4, 32, 8, 2880, 1440, True), (4, 32, 32, 2880, 360, True),
    (8, 256, 32, 7168, 2048, False), (8, 256, 64, 7168, 1024, False), (8, 256, 256, 7168, 512, False),
]  # fmt: skip


def wide_case(k: int, experts: int, E: int, H: int, F: int, clamped: bool, N: int = 8) -> Case:
    """N tokens of a rank that holds E of the experts, in the middle; x is strided, with NaN between its rows."""
    gen = torch.Generator("cuda").manual_seed(F)

    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        return torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16) * fan_in**-0.5

    x = torch.full((N, H + 8), torch.nan, device="cuda", dtype=torch.bfloat16)
    x[:, :H] = normal(N, H)
    return Case(
        x[:, :H],
        torch.rand(N, experts, generator=gen, device="cuda").argsort(1)[:, :k].int().contiguous(),
        torch.rand(N, k, generator=gen, device="cuda"),
        normal(E, 2 * F, H, fan_in=H),
        normal(E, H, F, fan_in=F),
        (experts - E) // 2,
        *((normal(E, 2 * F), normal(E, H), 1.5) if clamped else (None, None, None)),
        normal(N, H),
    )


def check_hopper(case: Case) -> None:
    """Right, and the same bits every time, though programs meet in another order."""
    x, ids, gate_up, down = case.x, case.ids, case.gate_up, case.down
    assert experts_sm90.fits(x, gate_up, down) or experts_scaled_sm90.fits(x, ids, gate_up, down)
    out = case.result()
    check(out, case)
    for _ in range(5):
        assert torch.equal(out, case.result())


def check_that_wrong_scales_show(case: Case) -> None:
    """Checks that scales of a neighbouring row, or of a neighbouring group, make another result."""
    for name in ("gate_up", "down"):
        right = getattr(case, name)
        for dim in (1, 2)[right.scales.shape[1] == 1 :]:
            wrong = replace(right, scales=right.scales.roll(1, dim).contiguous())
            with pytest.raises(AssertionError, match="not close"):
                check(replace(case, **{name: wrong}).result(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("k, experts, E, H, F, clamped", RANKS)
def test_hopper(
    k: int, experts: int, E: int, H: int, F: int, clamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Choices as they come, in which some ranks have no pair; what nobody chose is NaN."""
    case = wide_case(k, experts, E, H, F, clamped)
    poison(monkeypatch)
    for N in (8, 3, 2, 1):  # fewer choose fewer
        case = replace(
            case, x=case.x[:N], ids=case.ids[:N], weights=case.weights[:N], addend=case.addend[:N] if N > 1 else None
        )
        local = torch.arange(case.first, case.first + E, device="cuda", dtype=torch.int32)
        for t in (case.gate_up, case.down, case.gate_up_bias, case.down_bias):
            if t is not None:
                t[~torch.isin(local, case.ids)] = torch.nan
        check_hopper(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "k, experts, E, H, F, clamped, group, begins",
    [
        (8, 128, 16, 2048, 768, False, 128, (0, 0)), (8, 256, 32, 7168, 2048, False, 128, (0, 0)),
        (4, 32, 8, 2880, 1440, True, 128, (0, 96)), (4, 32, 32, 2880, 336, True, 128, (80, 16)),
        (8, 16, 16, 2048, 384, False, 4096, (0, 384)), (8, 16, 16, 2048, 384, False, 256, (128, 208)),
    ],
)  # fmt: skip
def test_hopper_of_e4m3(
    k: int, experts: int, E: int, H: int, F: int, clamped: bool, group: int, begins: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Columns that begin inside a group, of the least size, twice that, or all; wrong scales are caught."""
    case = scaled_case(wide_case(k, experts, E, H, F, clamped), False, group, begins)
    poison(monkeypatch)
    for N in (8, 3, 1):
        case = replace(
            case, x=case.x[:N], ids=case.ids[:N], weights=case.weights[:N], addend=case.addend[:N] if N > 1 else None
        )
        local = torch.arange(case.first, case.first + E, device="cuda", dtype=torch.int32)
        for w in (case.gate_up, case.down):
            w.data.view(torch.uint8)[~torch.isin(local, case.ids)] = 0x7F
            w.scales[~torch.isin(local, case.ids)] = torch.nan
        check_hopper(case)
    case = scaled_case(wide_case(k, experts, E, H, F, clamped), False, group, begins)
    check_that_wrong_scales_show(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "N, k, experts, E, H, F, clamped, packed, group, begins",
    [
        (40, 8, 128, 128, 2048, 768, False, False, 128, (0, 0)),
        (17, 8, 256, 32, 7168, 2048, False, False, 128, (0, 0)),
        (128, 8, 128, 16, 2048, 768, False, False, 128, (0, 0)), (9, 4, 32, 8, 2880, 1440, True, False, 128, (0, 96)),
        (64, 8, 16, 16, 2064, 400, False, False, 4096, (0, 384)),
        (33, 8, 16, 5, 2048, 208, True, False, 256, (128, 208)),
        (1, 4, 32, 32, 2880, 2880, True, True, 32, (0, 0)), (5, 4, 32, 32, 2880, 2880, True, True, 32, (0, 0)),
        (40, 4, 32, 32, 2880, 2880, True, True, 32, (0, 0)), (128, 4, 128, 16, 2880, 2880, True, True, 32, (0, 0)),
        (19, 3, 7, 5, 352, 224, False, True, 32, (32, 96)), (128, 4, 8, 8, 288, 192, True, True, 64, (0, 32)),
    ],
)  # fmt: skip
def test_hopper_of_a_few_bits(
    N: int, k: int, experts: int, E: int, H: int, F: int, clamped: bool, packed: bool, group: int,
    begins: tuple[int, int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Blocks of 8 to 32 pairs, experts of several; columns that begin inside a group; wrong scales are caught."""
    whole = wide_case(k, experts, E, H, F, clamped, N)
    case = scaled_case(whole, packed, group, begins)
    for w in (case.gate_up, case.down):  # what nobody chose
        unused = ~torch.isin(torch.arange(case.first, case.first + E, device="cuda", dtype=torch.int32), case.ids)
        w.data.view(torch.uint8)[unused] = 0x7F
        w.scales[unused] = 255 if packed else torch.nan
    poison(monkeypatch)
    assert experts_scaled_sm90.fits(case.x, case.ids, case.gate_up, case.down)
    check_hopper(case)
    for columns in (8, 16, 32):
        monkeypatch.setattr(experts_scaled_sm90, "columns_of", lambda pairs, experts, columns=columns: columns)
        check_hopper(case)
    check_that_wrong_scales_show(case)
    crowded = replace(scaled_case(whole, packed, group, begins), ids=torch.full_like(case.ids, case.first + E))
    check_hopper(crowded)  # nobody here
    crowded.ids[:, 0] = case.first + E // 2
    check_hopper(crowded)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "N, k, experts, E, H, F, group, begins",
    [
        (300, 2, 6, 4, 256, 112, 128, (0, 0)), (256, 1, 2, 2, 320, 256, 128, (0, 0)),
        (401, 3, 7, 5, 576, 400, 256, (64, 208)), (333, 2, 4, 4, 1088, 144, 2048, (0, 640)),
    ],
)  # fmt: skip
def test_hopper_of_many_pairs(
    N: int, k: int, experts: int, E: int, H: int, F: int, group: int, begins: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tiles and blocks with odd ends; experts that all chose, or nobody; what nobody may read is NaN."""
    case = scaled_case(wide_case(k, experts, E, H, F, False, N), False, group, begins)
    poison(monkeypatch)
    crowded = torch.full_like(case.ids, -1)
    crowded[:, 0] = case.first + E // 2
    for ids in (case.ids, crowded, torch.full_like(case.ids, -1)):
        one = replace(case, ids=ids)
        for w in (one.gate_up, one.down):
            unused = ~torch.isin(torch.arange(case.first, case.first + E, device="cuda", dtype=torch.int32), ids)
            w.data.view(torch.uint8)[unused] = 0x7F
        assert experts_many_sm90.fits(one.x, ids.numel(), E, one.gate_up, one.down)
        out = one.result()
        check(out, one)
        for _ in range(5):
            assert torch.equal(out, one.result())
    case = scaled_case(wide_case(k, experts, E, H, F, False, N), False, group, begins)
    check_that_wrong_scales_show(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "N, k, experts, E, H, F",
    [(4096, 9, 257, 257, 6144, 256), (2048, 8, 256, 64, 7168, 1024), (8192, 10, 512, 512, 4096, 128)],
)
def test_many_pairs_as_any_other_algorithm(
    N: int, k: int, experts: int, E: int, H: int, F: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = scaled_case(wide_case(k, experts, E, H, F, False, N), False)
    assert experts_many_sm90.fits(case.x, case.ids.numel(), E, case.gate_up, case.down)
    ours = case.result()
    monkeypatch.setattr(experts_many_sm90, "fits", lambda *args: False)
    # Both round weights or sums, activations and outputs: see `check`.
    torch.testing.assert_close(ours.float(), case.result().float(), atol=60 * 2**-9, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "k, experts, E, H, F, packed",
    [
        (9, 257, 257, 6144, 256, False), (8, 256, 32, 7168, 2048, False), (1, 64, 16, 2048, 384, False),
        (4, 32, 32, 2880, 2880, True), (1, 128, 16, 2880, 2880, True),
    ],
)  # fmt: skip
def test_few_are_found_as_many_are(
    N: int, k: int, experts: int, E: int, H: int, F: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pairs looked up in registers, or listed in memory, bits are the same: programs have the same shares."""
    case = scaled_case(wide_case(k, experts, E, H, F, packed, N), packed)
    poison(monkeypatch)
    crowded, empty = case.ids[:1].repeat(N, 1), torch.full_like(case.ids, -1)
    for ids in (case.ids, crowded, torch.cat([empty[:1], crowded[1:]]), empty):
        one = replace(case, ids=ids)
        check_hopper(one)
        with monkeypatch.context() as patch:
            patch.setattr(experts_scaled_sm90, "are_few", lambda *sizes: False)
            listed = one.result()
        assert torch.equal(one.result(), listed)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 2, 3, 8])
@pytest.mark.parametrize("clamped", [False, True])
def test_hopper_crowded_and_empty(N: int, clamped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens on one expert, once or with all their slots; all on all; one token alone here; no pair here."""
    whole = wide_case(4, 32, 4, 2880, 360, clamped)
    poison(monkeypatch)
    case = replace(whole, x=whole.x[:N], ids=whole.ids[:N], weights=whole.weights[:N], addend=whole.addend[:N])
    case.ids[:] = -1
    for addend in (case.addend, None):
        empty = replace(case, addend=addend)
        check_hopper(empty)
        assert torch.equal(empty.result(), torch.zeros_like(case.x) if addend is None else addend)
    case.ids[-1, 2] = case.first + 1
    check_hopper(case)
    case.ids[:, 2] = case.first + 3
    check_hopper(case)
    case.ids[:] = torch.arange(case.first, case.first + 4, device="cuda", dtype=torch.int32)
    check_hopper(case)
    case.ids[:] = case.first + 3
    check_hopper(replace(case, weights=case.weights / 4))  # values as large as the tolerance is made for


@pytest.mark.gpu
@pytest.mark.parametrize("clamped", [False, True])
def test_hopper_lets_nothing_pass(clamped: bool) -> None:
    """NaN of a token stays with it; a slot or a summand left out is caught."""
    case = wide_case(4, 8, 8, 512, 328, clamped)
    check_hopper(case)
    for less in (
        replace(case, addend=None),
        replace(case, ids=case.ids.masked_fill(torch.eye(8, 4).bool().cuda(), -1)),
    ):
        out = less.result()
        check(out, less)
        with pytest.raises(AssertionError, match="not close"):
            check(out, case)
    case.x[3] = torch.nan
    out = case.result()
    assert out[3].isnan().all() and not out[torch.arange(8) != 3].isnan().any()


@pytest.mark.gpu
def test_hopper_does_not_take() -> None:
    case = wide_case(4, 8, 8, 512, 328, False)
    taken = case.x, case.gate_up, case.down
    assert experts_sm90.fits(*taken)
    x, gate_up, down = taken
    assert not experts_sm90.fits(torch.cat([x, x[:1]]), gate_up, down)
    assert not experts_sm90.fits(*(t.half() for t in taken))
    assert not experts_sm90.fits(x[:, 1:], gate_up, down)
    assert not experts_sm90.fits(x, gate_up, down[..., :312])  # a view, for its shape alone
    assert not experts_sm90.fits(x, gate_up.flatten()[1:], down)
    of_few_bits = (336, False, 16), (336, False, 8), (328, False, 0), (336, False, 4), (336, True, 0)
    for F, packed, begin in of_few_bits:  # copies begin at multiples of 16 bytes
        case = scaled_case(wide_case(4, 8, 8, 512, F, False), packed, begins=(0, begin))
        assert experts_sm90.fits(case.x, case.gate_up, case.down) == ((F, packed, begin) == of_few_bits[0])


@pytest.mark.gpu
def test_hopper_layers_in_a_graph() -> None:
    check_layers_in_a_graph(wide_case(4, 16, 8, 2048, 768, False), 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("N, packed", [(2, True), (40, True), (40, False)])
def test_hopper_layers_of_a_few_bits_in_a_graph(N: int, packed: bool) -> None:
    case = scaled_case(wide_case(4, 16, 8, 2048, 768, False, N), packed)
    assert experts_scaled_sm90.fits(case.x, case.ids, case.gate_up, case.down)
    check_layers_in_a_graph(case, 16, 4)


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has one program, no tile more programs than a tree has leaves, no program two tiles that it joins."""
    monkeypatch.setattr(experts_sm90, "gl", SimpleNamespace(minimum=min, maximum=max))
    monkeypatch.setattr(experts_sm90, "LEVELS", levels := experts_sm90.LEVELS.value)
    for programs in (2, 156, 264):
        for tiles in (0, 1, 2, 3, 16, 45, 112, 131, 132, 133, 264, 265, 2048):
            for steps in (1, 3, 16, 23, 57, 100):
                shares = [experts_sm90.share_of.fn(tiles, steps, p, programs) for p in range(programs)]
                active, total = shares[0][2:]
                assert total == tiles * steps and {share[2:] for share in shares} == {(active, total)}
                owners = [p for p, (begin, end, *_) in enumerate(shares) for _ in range(begin, end)]
                assert len(owners) == total and [begin for begin, *_ in shares] == sorted(s[0] for s in shares)
                joined = []
                for tile in range(tiles):
                    mine = sorted(set(owners[tile * steps : (tile + 1) * steps]))
                    begin, count = experts_sm90.sharers.fn(tile, steps, active, total)
                    assert mine == [*range(begin, begin + count)] and count <= 1 << levels
                    joined += mine[1:]
                assert len(joined) == len(set(joined))
