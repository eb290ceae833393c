"""moe: kernel and reference against float64, and against transformers' own experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kernels.moe import experts as moe_module
from kernels.moe import experts_scaled_sm90, experts_sm90
from kernels.moe.experts import RoutedExperts
from kernels.moe.router import route
from kernels.scaled import ScaledMatrix, groups


@dataclass
class Case:
    """Arguments of `moe`; what nobody may read is NaN."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Any  # Tensor or ScaledMatrix
    down: Any
    first: int = 0
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp_at: float | None = None
    addend: Tensor | None = None
    shared_count: int = 0

    @property
    def experts(self) -> RoutedExperts:
        return RoutedExperts(**{field.name: getattr(self, field.name) for field in fields(self)})

    def result(self) -> Tensor:
        return self.experts.compute()

    def expected(self) -> Tensor:
        """[N, H] float64 on the CPU, one pair of a token and an expert at a time."""
        x, weights, local = self.x.double(), self.weights.double(), self.ids - self.first
        out = torch.zeros_like(x) if self.addend is None else self.addend.double()
        for e in range(len(self.gate_up)):
            pairs = (local == e).nonzero().tolist()
            if not pairs:
                continue
            both = self.gate_up[e], self.down[e]
            gate_up, down = ((w.unpacked() if isinstance(w, ScaledMatrix) else w).double() for w in both)
            for n, slot in pairs:
                gate, up = (gate_up @ x[n] + (0 if self.gate_up_bias is None else self.gate_up_bias[e])).chunk(2)
                if self.clamp_at is None:
                    h = gate / (1 + (-gate).exp()) * up
                else:
                    gate, up = gate.clamp(max=self.clamp_at), up.clamp(-self.clamp_at, self.clamp_at)
                    h = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
                out[n] += weights[n, slot] * (down @ h + (0 if self.down_bias is None else self.down_bias[e]))
        return out.cpu()


def make_case(
    N: int, k: int, E: int, H: int, F: int, *,
    experts: int | None = None, first: int = 0, clamped: bool = False, addend: bool = False,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0,
) -> Case:  # fmt: skip
    """Random tokens that choose k different ones of `experts` (all local if None), of which E from `first` are here."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int, behind: int = 0, scale: float = 1.0) -> Tensor:
        wide = torch.full((shape[0] + behind, *shape[1:]), torch.nan)
        wide[: shape[0]] = torch.randn(shape, generator=gen) * scale
        return wide.to(device, dtype)[: shape[0]]

    x = torch.full((N, H + 3), torch.nan)
    x[:, :H] = torch.randn(N, H, generator=gen)
    ids = torch.stack([torch.randperm(experts or E, generator=gen)[:k] for _ in range(N)]) if N else torch.zeros(0, k)
    return Case(
        x.to(device, dtype)[:, :H],
        ids.int().to(device),
        torch.rand(N, k, generator=gen).to(device),
        normal(E, 2 * F, H, behind=1, scale=max(H, 1) ** -0.5),
        normal(E, H, F, behind=1, scale=max(F, 1) ** -0.5),
        first,
        *((normal(E, 2 * F, behind=1), normal(E, H, behind=1), 1.5) if clamped else (None, None, None)),
        normal(N, H, behind=1) if addend else None,
    )


def scaled(like: Tensor, packed: bool, group: int, begin: int, seed: int = 0) -> ScaledMatrix:
    """Weights of the size of `like` [E, R, K]: e4m3 with scales from 1e-6 to 1e2, or e2m1 with powers of two.

    Behind the last expert stand NaN, in numbers and in scales.
    """
    device = like.device
    gen = torch.Generator(device).manual_seed(seed)
    (E, R, K), size = like.shape, like.shape[2] ** -0.5
    shape = E + 1, groups(begin, K, group), R
    if packed:
        data = torch.randint(256, (E + 1, R, K // 2), generator=gen, dtype=torch.uint8, device=device)
        top = round(math.log2(size)) - 1
        scales = (torch.randint(-20, top + 1, shape, generator=gen, device=device) + 127).to(torch.uint8)
        scales[:, ::2] = top + 127  # so that most weights count
        scales[E] = 255
    else:
        scales = 10 ** (torch.rand(shape, generator=gen, device=device) * 8 - 6)
        each = scales.mT[..., (begin + torch.arange(K, device=device)) // group]
        weights = torch.randn(E + 1, R, K, generator=gen, device=device) * size
        data = (weights / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        data.view(torch.uint8)[E], scales[E] = 0x7F, torch.nan
    return ScaledMatrix(data[:E], scales[:E], group, begin)


def scaled_case(case: Case, packed: bool, group: int = 0, begins: tuple[int, int] = (0, 0)) -> Case:
    """The case with other weights, in groups of 128 or 32 columns that begin so far before the first column."""
    group = group or (32 if packed else 128)
    gate_up = scaled(case.gate_up, packed, group, begins[0])
    down = scaled(case.down, packed, group, begins[1], seed=1)
    return replace(case, gate_up=gate_up, down=down)


def check(out: Tensor, case: Case) -> None:
    """Compares with float64.

    Tolerances: fp32 sums of up to a few hundred terms of size 1/sqrt(terms), twice in a row, and over experts: a few
    units of 2^-24 of values up to 10. In bf16 the two halves, the activations and an expert's output may each be
    rounded, and the result is: five times half a unit, 2^-9, of values up to 6.
    """
    wanted = case.expected()
    assert out.dtype == case.x.dtype and out.shape == wanted.shape
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 30 * 2**-9, torch.float16: 30 * 2**-12}[out.dtype]
    torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance, rtol=0)


WAYS = "few", "some", "many"  # each of them serves any number of tokens; the fourth has tests of its own, below


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way of the kernels for all sizes, over memory that begins as NaN."""
    monkeypatch.setattr("kernels.moe.experts.way_of", lambda N, top_k, E: way)
    for hopper in ("experts_sm90", "experts_scaled_sm90"):
        monkeypatch.setattr(f"kernels.moe.{hopper}.fits", lambda *tensors: False)
    poison(monkeypatch)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*shape: int, **options: Any) -> Tensor:
        t = empty(*shape, **options)
        return t.fill_(torch.nan) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=[*WAYS, "reference"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of the kernels, one way at a time, or the CPU for the reference."""
    if request.param == "reference":
        return torch.device("cpu")
    take(request.param, monkeypatch)
    return request.getfixturevalue("device")


@pytest.fixture(params=WAYS)
def kernel(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    take(request.param, monkeypatch)
    return device


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("N, k, E, H, F", [(1, 4, 8, 64, 48), (7, 3, 5, 100, 33), (18, 2, 3, 33, 24), (3, 1, 1, 17, 1)])
def test_moe(N: int, k: int, E: int, H: int, F: int, clamped: bool, where: torch.device) -> None:
    case = make_case(N, k, E, H, F, clamped=clamped, addend=N > 1, device=where)
    check(case.result(), case)


@given(
    N=st.sampled_from([1, 2, 4, 5, 17, 33, 70]), k=st.integers(1, 4), E=st.integers(1, 7), H=st.integers(1, 80),
    F=st.integers(1, 50), elsewhere=st.integers(0, 6), first=st.integers(0, 6), clamped=st.booleans(),
    addend=st.booleans(), crowded=st.booleans(), shared_count=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
def test_any_shape(
    N: int, k: int, E: int, H: int, F: int, elsewhere: int, first: int, clamped: bool, addend: bool, crowded: bool,
    shared_count: int, seed: int, kernel: torch.device,
) -> None:  # fmt: skip
    """Experts without tokens, tokens without experts, all tokens on one expert, hints that hold and that do not."""
    experts = E + elsewhere
    if moe_module.way_of(N, k, E) == "few":  # a program a pair and tile takes the interpreter long
        N = min(N, 4)
    case = make_case(
        N, min(k, experts), E, H, F, experts=experts, first=min(first, elsewhere), clamped=clamped, addend=addend,
        device=kernel, seed=seed,
    )  # fmt: skip
    if crowded:
        case.ids[:] = case.first + E - 1
    check(replace(case, shared_count=min(shared_count, E)).result(), case)


@pytest.mark.parametrize(
    "N, k, E, shared_count", [(5, 3, 5, 2), (16, 2, 4, 1), (17, 3, 4, 2), (40, 4, 9, 1), (35, 2, 2, 2)]
)
def test_experts_of_all_tokens(N: int, k: int, E: int, shared_count: int, where: torch.device) -> None:
    """Shared experts among the routed, as `route` has them: the first ones, behind a token's others."""
    if moe_module.way_of(N, k, E) == "few":  # a program a pair and tile takes the interpreter long
        N = min(N, 7)
    case = make_case(N, k, E, 48, 24, clamped=True, addend=True, device=where)
    ids = torch.stack([torch.randperm(E - shared_count)[: k - shared_count] + shared_count for _ in range(N)])
    case.ids[:] = torch.cat([ids, torch.arange(shared_count).expand(N, -1)], 1)
    check(replace(case, shared_count=shared_count).result(), case)


FORMATS = [  # e2m1 or e4m3, columns of a group, columns of the first groups that other ranks have
    (False, 128, (0, 0)), (False, 128, (64, 96)), (False, 128, (8, 120)), (False, 256, (128, 208)),
    (False, 512, (0, 64)), (True, 32, (0, 0)), (True, 32, (8, 16)), (True, 32, (0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("packed, group, begins", FORMATS)
@pytest.mark.parametrize("N, k, E, H, F", [(1, 4, 8, 288, 48), (7, 3, 5, 100, 162), (18, 2, 3, 34, 24)])
def test_weights_of_a_few_bits(
    packed: bool, group: int, begins: tuple[int, int], N: int, k: int, E: int, H: int, F: int, where: torch.device
) -> None:
    """Ragged groups, cuts inside of one, one of all columns; experts elsewhere, shared ones, biases and clamps."""
    N = min(N, 4) if moe_module.way_of(N, k, E) == "few" else N
    more: Any = dict(experts=E + 3, first=N % 2, clamped=N == 7, addend=N > 1, device=where, seed=N)
    case = scaled_case(replace(make_case(N, k, E, H, F, **more), shared_count=N % 2), packed, group, begins)
    check(case.result(), case)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("off", [(0, 1, 0), (0, 0, 1)])
def test_a_scale_of_a_neighbour_is_caught(packed: bool, off: tuple[int, ...], where: torch.device) -> None:
    """A wrong group and a wrong row both show."""
    case = scaled_case(make_case(4, 2, 4, 260, 136, device=where), packed, begins=(64, 0))
    check(case.result(), case)
    for name in ("gate_up", "down"):
        right = getattr(case, name)
        wrong = replace(right, scales=right.scales.roll(off, (0, 1, 2)).contiguous())
        with pytest.raises(AssertionError, match="not close"):
            check(replace(case, **{name: wrong}).result(), case)


def test_ranks_add_up(kernel: torch.device) -> None:
    """Experts over ranks and columns over ranks: the parts' sum is the whole; the down bias enters once."""
    whole = make_case(6, 4, 7, 40, 30, clamped=True, device=kernel)
    total = torch.zeros_like(whole.expected())
    for experts in (slice(0, 3), slice(3, 7)):
        for columns in (slice(0, 17), slice(17, 30)):
            rows = [*range(30)[columns], *range(30, 60)[columns]]
            part = replace(
                whole,
                gate_up=whole.gate_up[experts, rows].contiguous(),
                down=whole.down[experts, :, columns].contiguous(),
                gate_up_bias=whole.gate_up_bias[experts, rows].contiguous(),
                down_bias=whole.down_bias[experts].contiguous() * (columns.start == 0),
                first=experts.start,
            )
            total += part.result().double().cpu()
    torch.testing.assert_close(total, whole.expected(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("N, E, F", [(3, 0, 8), (3, 4, 0), (0, 4, 8)])
def test_nothing_to_do(N: int, E: int, F: int, addend: bool, where: torch.device) -> None:
    case = make_case(N, 2, E, 16, F, experts=4, addend=addend, device=where)
    assert case.result().tolist() == ([[0.0] * 16] * N if case.addend is None else case.addend.tolist())


@pytest.mark.parametrize("addend", [False, True])
def test_no_pair_of_this_rank(addend: bool, where: torch.device) -> None:
    case = make_case(3, 2, 4, 33, 24, first=9, clamped=True, addend=addend, device=where)
    assert case.result().tolist() == ([[0.0] * 33] * 3 if case.addend is None else case.addend.tolist())


def test_no_columns_but_a_bias(where: torch.device) -> None:
    case = make_case(5, 2, 4, 16, 0, clamped=True, device=where)
    check(case.result(), case)


@pytest.mark.parametrize("clamped", [False, True])
def test_moe_is_transformers(clamped: bool, where: torch.device) -> None:
    case = make_case(9, 3, 6, 32, 24, clamped=clamped, device=where)
    if clamped:
        case.clamp_at = 7.0
        case.x *= 4  # so that some gates reach it
        experts: Any = GptOssExperts(GptOssConfig(num_local_experts=6, hidden_size=32, intermediate_size=24))
        gate, up = case.gate_up.chunk(2, 1)
        experts.gate_up_proj.data = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
        experts.gate_up_proj_bias.data = torch.stack(case.gate_up_bias.chunk(2, 1), 2).flatten(1)
        experts.down_proj.data, experts.down_proj_bias.data = case.down.transpose(1, 2), case.down_bias
    else:
        experts = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=6, hidden_size=32, moe_intermediate_size=24))
        experts.gate_up_proj.data, experts.down_proj.data = case.gate_up, case.down
    with torch.no_grad():
        wanted = experts(case.x, case.ids.long(), case.weights)
    # Sums of 32 and 24 terms in another order: a few units of 2^-24 of terms up to 30.
    torch.testing.assert_close(case.result(), wanted, atol=5e-5, rtol=0)


@pytest.mark.parametrize("clamped", [False, True])
def test_nan_of_a_token_stays_with_it(clamped: bool, where: torch.device) -> None:
    case = make_case(8, 2, 4, 32, 16, clamped=clamped, device=where)
    case.x[3] = torch.nan
    out = case.result()
    assert out[3].isnan().all() and not out[torch.arange(8) != 3].isnan().any()


def test_a_slot_left_out_is_caught(kernel: torch.device) -> None:
    case = make_case(5, 3, 4, 32, 16, device=kernel)
    out = replace(case, ids=case.ids.masked_fill(torch.eye(5, 3, device=kernel).bool(), -1)).result()
    with pytest.raises(AssertionError, match="not close"):
        check(out, case)


def test_a_summand_left_out_is_caught(where: torch.device) -> None:
    case = make_case(5, 3, 4, 32, 16, addend=True, device=where)
    check(case.result(), case)
    with pytest.raises(AssertionError, match="not close"):
        check(replace(case, addend=None).result(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize(
    "N, k, E, H, F",
    [
        (1, 8, 128, 2048, 96), (4, 4, 4, 720, 360), (5, 8, 128, 512, 96), (64, 4, 8, 360, 200), (900, 2, 4, 256, 104),
        (64, 8, 128, 2048, 96), (16, 4, 32, 2880, 360),  # of some tokens, such that down starts early, by many rows
    ],
)  # fmt: skip
def test_long(N: int, k: int, E: int, H: int, F: int, clamped: bool, dtype: torch.dtype) -> None:
    case = make_case(
        N, k, E, H, F, experts=2 * E, first=E // 2, clamped=clamped, addend=True, dtype=dtype, device="cuda"
    )
    out = case.result()
    check(out, case)
    assert torch.equal(out, case.result())  # bit by bit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed, group, begins", FORMATS)
@pytest.mark.parametrize(
    "N, k, E, H, F", [(1, 8, 128, 2048, 96), (5, 8, 128, 512, 192), (64, 4, 8, 352, 208), (900, 2, 4, 256, 104)]
)
def test_long_of_a_few_bits(
    N: int, k: int, E: int, H: int, F: int, packed: bool, group: int, begins: tuple[int, int], dtype: torch.dtype
) -> None:
    more: Any = dict(experts=2 * E, first=E // 2, clamped=N == 64, addend=True, dtype=dtype, device="cuda")
    case = scaled_case(make_case(N, k, E, H, F, **more), packed, max(group, H if group > 256 else 0), begins)
    check(out := case.result(), case)
    assert torch.equal(out, case.result())


@pytest.mark.gpu
@pytest.mark.parametrize("N, F", [(2, 96), (32, 96), (1, 384), (8, 384)])
def test_one_graph_serves_all_ids(N: int, F: int) -> None:
    E, k = 16, 4
    case = make_case(N, k, 8, 256, F, experts=E, first=4, dtype=torch.bfloat16, device="cuda")
    case.x = case.x.clone(memory_format=torch.contiguous_format)  # aligned: one row counts as contiguous anywhere
    assert experts_sm90.fits(case.x, case.gate_up, case.down) == (F == 384)
    logits = torch.randn(N, E, device="cuda")

    def step() -> tuple[Tensor, Tensor, Tensor]:
        ids, weights = route(logits, k, normalise=True)
        return ids, weights, replace(case, ids=ids, weights=weights).result()

    step()  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights, out = step()
    one = torch.zeros(N, E, device="cuda")
    one[:, 3:7] = 1  # all tokens on the same four, one of them elsewhere
    for scores in (torch.randn(N, E, device="cuda"), one, torch.randn(N, E, device="cuda")):
        logits.copy_(scores)
        graph.replay()
        check(out, replace(case, ids=ids, weights=weights))
        assert torch.equal(out, step()[2])


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
    for name in ("gate_up", "down"):
        right = getattr(case, name)
        for dim in (1, 2)[right.scales.shape[1] == 1 :]:
            wrong = replace(right, scales=right.scales.roll(1, dim).contiguous())
            with pytest.raises(AssertionError, match="not close"):
                check(replace(case, **{name: wrong}).result(), case)


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
    for name in ("gate_up", "down"):
        right = getattr(case, name)
        for dim in (1, 2)[right.scales.shape[1] == 1 :]:
            wrong = replace(right, scales=right.scales.roll(1, dim).contiguous())
            with pytest.raises(AssertionError, match="not close"):
                check(replace(case, **{name: wrong}).result(), case)
    crowded = replace(scaled_case(whole, packed, group, begins), ids=torch.full_like(case.ids, case.first + E))
    check_hopper(crowded)  # nobody here
    crowded.ids[:, 0] = case.first + E // 2
    check_hopper(crowded)


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


def check_layers_in_a_graph(case: Case, experts: int, k: int) -> None:
    """Each reads what the one before wrote, in one workspace: however they overlap, the bits are the same."""
    logits = torch.randn(12, len(case.x), experts, device="cuda")
    ys = torch.empty(12, *case.x.shape, device="cuda", dtype=torch.bfloat16)

    def layers(between: Any) -> None:
        x = case.x
        for scores, y in zip(logits, ys, strict=True):
            ids, weights = route(scores, k, normalise=True)
            x = replace(case, x=x, ids=ids, weights=weights).result()
            between()
            y.copy_(x)
            between()

    layers(torch.cuda.synchronize)
    wanted = ys.clone()
    assert not wanted.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(lambda: None)
    for _ in range(50):
        ys.fill_(torch.nan)
        graph.replay()
        assert torch.equal(ys, wanted)


@pytest.mark.gpu
def test_hopper_layers_in_a_graph() -> None:
    check_layers_in_a_graph(wide_case(4, 16, 8, 2048, 768, False), 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("N, packed", [(2, True), (40, True), (40, False)])
def test_hopper_layers_of_a_few_bits_in_a_graph(N: int, packed: bool) -> None:
    case = scaled_case(wide_case(4, 16, 8, 2048, 768, False, N), packed)
    assert experts_scaled_sm90.fits(case.x, case.ids, case.gate_up, case.down)
    check_layers_in_a_graph(case, 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("N, way", [(2, "few"), (16, "some"), (64, "some")])
def test_layers_in_a_graph_that_start_early(N: int, way: str) -> None:
    E, k, H, F = 64, 8, 2048, 96
    few, _ = moe_module.few_tiles(N, F)
    some, _ = moe_module.tiles_of("some", N * k, E, F, H, torch.bfloat16, touched=50 / 132)
    assert moe_module.way_of(N, k, E) == way and (few if way == "few" else some)["EARLY"]
    check_layers_in_a_graph(make_case(N, k, E, H, F, dtype=torch.bfloat16, device="cuda"), E, k)


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
