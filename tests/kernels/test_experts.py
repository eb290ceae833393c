"""moe: kernel and reference against float64, and against transformers' own experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
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
from kernels.moe import experts_sm90
from kernels.moe.router import route
from tests.kernels.routed_experts import check, check_layers_in_a_graph, make_case, poison, scaled_case
from tests.pairs import params

WAYS = "few", "some", "many"  # each of them serves any number of tokens; the fourth has tests of its own, below


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way of the kernels for all sizes, over memory that begins as NaN."""
    monkeypatch.setattr("kernels.moe.experts.way_of", lambda N, top_k, E: way)
    for hopper in ("experts_sm90", "experts_scaled_sm90"):
        monkeypatch.setattr(f"kernels.moe.{hopper}.fits", lambda *tensors: False)
    poison(monkeypatch)


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


@pytest.mark.parametrize(
    "where, shape, form",
    params(
        [*product((*WAYS, "reference"), [(1, 4, 8, 288, 48), (7, 3, 5, 100, 162), (18, 2, 3, 34, 24)], FORMATS)],
        lambda way, shape, form: f"{way}-{shape[0]}-{form}",
    ),
    indirect=["where"],
)
def test_weights_of_a_few_bits(where: torch.device, shape: tuple[int, ...], form: tuple[Any, ...]) -> None:
    """Ragged groups, cuts inside of one, one of all columns; experts elsewhere, shared ones, biases and clamps."""
    (N, k, E, H, F), (packed, group, begins) = shape, form
    N = min(N, 4) if moe_module.way_of(N, k, E) == "few" else N
    more: Any = dict(experts=E + 3, first=N % 2, clamped=N == 7, addend=N > 1, device=where, seed=N)
    case = scaled_case(replace(make_case(N, k, E, H, F, **more), shared_count=N % 2), packed, group, begins)
    check(case.result(), case)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("off", [(0, 1, 0), (0, 0, 1)])
def test_a_scale_of_a_neighbour_is_caught(packed: bool, off: tuple[int, ...], where: torch.device) -> None:
    """A wrong group and a wrong row both show."""
    case = scaled_case(make_case(2, 1, 2, 260, 136, device=where), packed, begins=(64, 0))
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


@pytest.mark.gpu
@pytest.mark.parametrize("N, way", [(2, "few"), (16, "some"), (64, "some")])
def test_layers_in_a_graph_that_start_early(N: int, way: str) -> None:
    E, k, H, F = 64, 8, 2048, 96
    few, _ = moe_module.few_tiles(N, F)
    some, _ = moe_module.tiles_of("some", N * k, E, F, H, torch.bfloat16, touched=50 / 132)
    assert moe_module.way_of(N, k, E) == way and (few if way == "few" else some)["EARLY"]
    check_layers_in_a_graph(make_case(N, k, E, H, F, dtype=torch.bfloat16, device="cuda"), E, k)
