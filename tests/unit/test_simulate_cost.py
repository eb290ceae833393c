"""The cost model against the paper's closed formulas and numbers that were worked out by hand: equal to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.rows import FIGURE_1, scaled
from helix.layout import HelixLayout
from helix.placement import BlockBudget, Placement
from helix.planner.hardware import PROVENANCE, Hardware, sent_bytes
from helix.planner.layer import COUNTED, DIGITS, Layer, experts_touched, pipelined
from helix.planner.points import Options, Points, Sparse, Speculation, Tier
from helix.planner.step import CHUNK_TOKENS, Memory, StepCost, memory_of, predict
from helix.setup.tiering import tiered_bytes
from helix.worker.keeps import LATENT_GROUP, EngineSizes, page_bytes, token_bytes
from helix.worker.kv_cache import with_bounds
from kernels.indexer import choose, keys
from kernels.scaled_keys import GROUP
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

EXACT = 1e-9  # relative: closed formulas in float64, a few dozen operations of 1e-16 each
M = 10**6
# Appendix A in microseconds (TPA = TPF): KV at 1e6 and at 2^20 tokens, weights.
WIDTHS = {
    1: (1024, 1073.741824, 236.978176),
    2: (512, 536.870912, 118.489088),
    4: (256, 268.435456, 59.244544),
    8: (128, 134.217728, 29.622272),
    16: (128, 134.217728, 14.942208),
    32: (128, 134.217728, 7.602176),
    64: (128, 134.217728, 3.932160),
}
# (TPA, KVP, TPF): KV at 1e6 tokens, weights; one grid that nothing divides, and one that a swap of TPA and TPF changes.
GRIDS = {
    (8, 2, 16): (64, 17.039360),
    (8, 4, 32): (32, 10.747904),
    (8, 8, 64): (16, 7.602176),
    (4, 16, 64): (16, 12.058624),
    (1, 64, 64): (16, 38.797312),
    (3, 1, 3): (384, 79.0801066666666667),
}
RATE = 8e12


def gb200() -> Hardware:
    return load_hardware("gb200")


def reading(hardware: Hardware | None = None) -> Hardware:
    """Hardware on which only bytes and FLOPs take time."""
    return scaled(hardware or gb200(), kernel=0, collective=0, link=1e30)


def step(model: str, hardware: Hardware, mode: str, batch: int = 1, length: int = M, **more: object) -> StepCost:
    widths = {key: more.pop(key) for key in ("pp", "dp", "kvp", "tpa", "tpf", "ep") if key in more}
    return predict(load_spec(model), hardware, Points.of(mode, batch, **widths), length, Options(**more))  # type: ignore[arg-type]


def kv_us(tpa: int, kvp: int, length: int) -> float:
    return float(1e6 * FIGURE_1.kv_s(8, length, tpa, kvp))


def weights_us(tpa: int, tpf: int) -> float:
    return float(1e6 * FIGURE_1.weights_s(tpa, tpf))


def together_s(
    data: float, latency: float, wire: float, batch: int, hopb: bool, serial: bool = False, chunk_s: float = 0.0
) -> Any:
    """Attention and exchange of a batch, on hardware whose further chunks take `chunk_s`."""
    hardware = replace(gb200(), chunk_s=replace(gb200().chunk_s, value=chunk_s))
    options = Options(hopb=hopb, exchange="serial" if serial else "batched")
    layer = Layer(load_spec("llama-3.1-8b"), hardware, Points.of("helix", batch, kvp=2), M, options)
    return layer.attended_and_exchanged_s(*(np.array([x]) for x in (data, latency, wire)))


@pytest.mark.parametrize("width", WIDTHS)
def test_figure_1_over_tensor_parallel_widths(width: int) -> None:
    found = kv_us(width, 1, M), kv_us(width, 1, 1 << 20), weights_us(width, width)
    assert found == pytest.approx(WIDTHS[width], rel=EXACT)


@pytest.mark.parametrize("grid", GRIDS)
def test_figure_1_over_grids(grid: tuple[int, int, int]) -> None:
    tpa, kvp, tpf = grid
    assert (kv_us(tpa, kvp, M), weights_us(tpa, tpf)) == pytest.approx(GRIDS[grid], rel=EXACT)


def test_the_grids_would_show_a_swap_of_both_widths() -> None:
    assert weights_us(64, 8) != pytest.approx(GRIDS[8, 8, 64][1], rel=0.01)
    assert weights_us(32, 32) == pytest.approx(GRIDS[8, 8, 64][1], rel=EXACT)  # why one such pair does not show it


def test_kv_and_weights_take_equally_long_at_one_length() -> None:
    assert kv_us(8, 1, 231_424) == pytest.approx(weights_us(8, 8), rel=EXACT)


def test_formulas_take_arrays() -> None:
    tpa = np.array(list(WIDTHS))
    assert 1e6 * FIGURE_1.kv_s(8, M, tpa, 1) == pytest.approx([kv for kv, _, _ in WIDTHS.values()], rel=EXACT)


@pytest.mark.parametrize(
    "compute, exchange, batch, off, on",
    [(2, 1.2, 8, 25.6, 17.2), (1, 1.5, 8, 20, 13), (2, 2, 4, 16, 10), (3, 0.5, 1, 3.5, 3.5)],
)
def test_hopb_timeline(compute: float, exchange: float, batch: int, off: float, on: float) -> None:
    for hopb, expected in ((False, off), (True, on)):
        for serial in (False, True):  # without latency both are the paper's
            found = together_s(compute * batch, 0.0, exchange * batch, batch, hopb, serial)
            assert found == pytest.approx(expected, rel=EXACT)
    assert pipelined(compute, exchange, batch) == pytest.approx(on, rel=EXACT)


def test_hopb_takes_no_chunks_that_cost_more_than_they_hide() -> None:
    given = 16.0, 0.0, 9.6, 8, True
    assert together_s(*given, chunk_s=100.0) == pytest.approx(25.6, rel=EXACT)
    # Four chunks: 16 + 9.6 / 4 + 3 * 1 = 21.4; two: 16 + 4.8 + 1 = 21.8; eight: 16 + 1.2 + 7 = 24.2.
    assert together_s(*given, chunk_s=1.0) == pytest.approx(21.4, rel=EXACT)


def test_serial_exchanges_have_a_latency_each() -> None:
    given = 8.0, 5.0, 4.0, 4
    for hopb, serial, expected in (
        (False, True, 8 + 4 * 6), (True, True, 2 + 4 * 6), (False, False, 8 + 5 + 4), (True, False, 8 + 5 + 1)
    ):  # fmt: skip
        assert together_s(*given, hopb, serial) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize(
    "mode, batch, widths, ms",
    [
        ("tp", 1, {"tpa": 8}, 5.170280448),
        ("tp", 1, {"tpa": 64}, 2.439186432),
        ("helix", 1, {"tpa": 8, "kvp": 8}, 0.906397440),
        ("helix", 8, {"tpa": 8, "kvp": 8}, 2.670397440),
        ("helix", 32, {"tpa": 8, "kvp": 8}, 8.718397440),
    ],
)
def test_reading_alone_of_llama_405b(mode: str, batch: int, widths: dict[str, int], ms: float) -> None:
    """TTL of the whole model with the head. Worked out in integers:

    126 * (KV + (16384 * (16384 / TPA + 2048 * max(8 / TPA, 1) / 8 + 16384 / N + 3 * 53248 / N)) / 2) / 8e12 + head.
    """
    n, tpa, kvp = widths["tpa"] * widths.get("kvp", 1), widths["tpa"], widths.get("kvp", 1)
    kv = batch * 2 * max(8 // tpa, 1) * 128 * M // kvp
    layer = 16384 * (16384 // tpa + 2 * 128 * max(8 // tpa, 1) + 16384 // n + 3 * 53248 // n)
    by_hand = (126 * (kv + layer) + 128256 * 16384 // n) / 2 / 8e12
    found = step("llama-3.1-405b", reading(), mode, batch, **widths).ttl_s[0]
    assert found == pytest.approx(by_hand, rel=EXACT)
    assert round(1e3 * found, 6) == round(ms, 6)


def test_the_weights_of_the_appendix_but_for_the_output_projection() -> None:
    """The appendix divides it over the 8 ranks of TPA; section 2.2 over all 64."""
    found = step("llama-3.1-405b", reading(), "helix", tpa=8, kvp=8)
    by_phase = {phase.name: phase.bytes[0] for phase in found.phases}
    layer = sum(by_phase[name] for name in ("qkv", "output", "ffn")) / 126 / RATE
    of_appendix = replace(FIGURE_1, ffn=53248).weights_s(8, 64)
    output = 16384 * 16384 * 0.5 / RATE
    assert layer == pytest.approx(of_appendix - output / 8 + output / 64, rel=EXACT)


@pytest.mark.parametrize("model, gb", [("deepseek-r1", 17.568), ("llama-3.1-405b", 129.024)])
def test_kv_of_a_request(model: str, gb: float) -> None:
    spec = load_spec(model)
    # One page is the whole length, so that nothing is rounded up.
    found = memory_of(spec, gb200(), Points.of("tp"), M - 1, Options(append_block=M, page_size=M))
    assert found.kv_bytes[0] == pytest.approx(gb * 1e9, rel=EXACT)


@pytest.mark.parametrize("model, gb", [("deepseek-r1", 335.51269888), ("llama-3.1-405b", 200.82327552 + 2.101346304)])
def test_weights(model: str, gb: float) -> None:
    found = memory_of(load_spec(model), gb200(), Points.of("tp"), M, Options())
    assert found.weight_bytes[0] == pytest.approx(gb * 1e9, rel=EXACT)


def test_experts_touched() -> None:
    assert experts_touched(256, 8, 1) == pytest.approx(8, rel=EXACT)
    assert experts_touched(256, 8, 2) == pytest.approx(15.75, rel=EXACT)  # 8 + 8 * 248 / 256
    assert experts_touched(256, 8, 10**4) == pytest.approx(256, rel=EXACT)


def test_bytes_of_experts_are_those_touched_whatever_the_grid() -> None:
    per_layer = 15.75 * 3 * 7168 * 2048 * 0.5 / 64
    for ep in (1, 8, 64):
        found = step("deepseek-r1", gb200(), "helix", 2, kvp=64, ep=ep)
        experts = next(phase for phase in found.phases if phase.name == "experts")
        assert experts.bytes[0] == pytest.approx(58 * per_layer, rel=EXACT)


@pytest.mark.parametrize(
    "mode, widths, saved", [("helix", {"ep": 1}, 2), ("helix", {"ep": 2}, 0), ("dp", {"ep": 1}, 0)]
)
def test_shared_experts_among_the_routed_have_no_launches(mode: str, widths: dict[str, int], saved: int) -> None:
    """Two less in each of R1's 58 layers with experts, where these are on all ranks; as many bytes."""
    width = {"helix": "kvp", "dp": "dp"}[mode]
    routed, dense = (
        step("deepseek-r1", gb200(), mode, 8, **{width: 8}, **widths, shared=s) for s in ("routed", "dense")
    )
    launches, read = (
        [sum(getattr(p, key)[0] for p in s.phases) for s in (dense, routed)] for key in ("launches", "bytes")
    )
    assert launches[0] - launches[1] == 58 * saved and read[0] == pytest.approx(read[1], rel=EXACT)


def test_rows_that_all_ranks_have_are_gathered_and_their_sums_scattered() -> None:
    """In R1's layers with experts, one reduce-scatter and one all-gather: as many bytes as one all-reduce."""
    dp = step("deepseek-r1", gb200(), "dp", 64, dp=8, ep=8, dispatch="all")
    helix = step("deepseek-r1", gb200(), "helix", 64, kvp=8, ep=8)
    sent = [{p.name: p.sent[0] for p in found.phases} for found in (dp, helix)]
    assert sent[0]["gather rows"] + sent[0]["ffn all-reduce"] == pytest.approx(sent[1]["ffn all-reduce"], rel=EXACT)
    read = [{p.name: p.bytes[0] for p in found.phases} for found in (dp, helix)]
    assert all(read[0][name] == pytest.approx(read[1][name], rel=EXACT) for name in ("shared experts", "experts"))


@pytest.mark.parametrize(
    "op, width, message, sent",
    [("all_reduce", 8, 64, 112), ("all_to_all", 8, 64, 56), ("all_gather", 8, 64, 56), ("send", 2, 64, 64)],
)
def test_what_leaves_a_rank(op: str, width: int, message: int, sent: float) -> None:
    assert sent_bytes(op, width, message) == sent


def test_the_exchange_carries_outputs_and_their_lse() -> None:
    found = step("llama-3.1-405b", gb200(), "helix", 4, tpa=8, kvp=8, messages="bf16")
    exchange = next(phase for phase in found.phases if phase.name == "exchange")
    assert exchange.sent[0] == pytest.approx(126 * 4 * 16 * (128 * 2 + 4) * 7 / 8, rel=EXACT)


def test_gather_decode_traffic() -> None:
    """Section 2 of the gather-decode report, Qwen2.5-7B: 57,344 n bytes dense; 448 n of bounds and 13 blocks sparse."""
    n, h100 = 131072, load_hardware("h100")
    read = {}
    for sparse in (None, Sparse(8)):
        bf16 = {"weights": "bf16", "kv": "bf16", "messages": "bf16"}
        found = step("qwen2.5-7b", h100, "tp", length=n, sparse=sparse, **bf16)
        read[sparse] = {phase.name: phase.bytes[0] for phase in found.phases}
    assert read[None]["attention"] == pytest.approx(57344 * n, rel=EXACT)
    assert read[Sparse(8)]["attention"] == pytest.approx(57344 * 1664, rel=EXACT)
    assert read[Sparse(8)]["find blocks"] == pytest.approx(448 * n, rel=EXACT)


@pytest.mark.parametrize(
    "kvp, topk, blocks",
    [(1, 32, 37), (2, 32, 16 + 3), (8, 32, 4 + 1), (8, 8, 1 + 1), (8, 9, 2 + 1), (8, 0, 1), (1, 0, 5)],
)
def test_blocks_of_the_fullest_rank(kvp: int, topk: int, blocks: int) -> None:
    """Each rank takes its share of the chosen blocks, rounded up; of sink and window together, too."""
    found = step(
        "qwen2.5-7b", load_hardware("h200"), "helix", 2, kvp=kvp, sparse=Sparse(topk), weights="bf16", kv="bf16"
    )
    attention = next(phase for phase in found.phases if phase.name == "attention")
    assert attention.bytes[0] == pytest.approx(28 * 2 * blocks * 128 * 4 * 2 * 128 * 2, rel=EXACT)


def test_sparse_attention_pays_for_finding_once_and_for_a_launch_like_dense() -> None:
    h200 = load_hardware("h200")
    assert h200.finding_s is not None
    more = {"length": 4 * 128, "weights": "bf16", "kv": "bf16"}
    dense = step("qwen2.5-7b", h200, "tp", **more)
    sparse = step("qwen2.5-7b", h200, "tp", sparse=Sparse(32), **more)  # as many blocks as there are: all are read
    bounds = 28 * 4 * 4 * 2 * 128 * 2
    assert h200.finding_sequence_s is not None and h200.bounds_share is not None
    price = h200.finding_s.value + h200.finding_sequence_s.value
    extra = 28 * price + bounds / h200.bounds_share.value / h200.read_bytes_per_s.value
    assert sparse.ttl_s[0] - dense.ttl_s[0] == pytest.approx(extra, rel=1e-6)
    short = step("qwen2.5-7b", h200, "tp", sparse=Sparse(32, from_tokens=4 * 128 + 1), **more)
    assert short.ttl_s[0] == dense.ttl_s[0], "shorter than from_tokens: dense"
    assert short.memory.kv_bytes[0] == sparse.memory.kv_bytes[0] == dense.memory.kv_bytes[0] * (1 + 1 / 128)


@pytest.mark.parametrize("kvp, hits", [(1, 0.0), (2, 0.8), (4, 1.0)])
def test_what_is_not_hot_comes_over_the_link(kvp: int, hits: float) -> None:
    """What is missing of a rank's share of the chosen blocks; all else is as over a cache on the GPU."""
    h200 = load_hardware("h200")
    assert h200.link_bytes_per_s is not None and h200.fetch_s is not None
    more = {"length": M, "weights": "bf16", "kv": "bf16", "kvp": kvp, "sparse": Sparse(32)}
    on_gpu, tiered = (step("qwen2.5-7b", h200, "helix", **more, tier=tier) for tier in (None, Tier(hits)))
    come = (1 - hits) * 32 / kvp * 28 * 4 * 65536
    extra = 28 * h200.fetch_s.value + come / h200.link_bytes_per_s.value
    assert tiered.ttl_s[0] - on_gpu.ttl_s[0] == pytest.approx(extra, rel=1e-6)
    with pytest.raises(ValueError, match=r"link to host memory is not known on .* link_bytes_per_s and fetch_s"):
        step("qwen2.5-7b", replace(h200, fetch_s=None), "helix", **more, tier=Tier(hits))


@pytest.mark.parametrize("hits, ahead", [(0.0, 1.0), (0.0, 0.5), (0.8, 0.5), (1.0, 1.0)])
def test_what_a_guess_names_comes_while_others_compute(hits: float, ahead: float) -> None:
    """Layers take as long as what is launched in turn, guesses among it, or as the link is busy; the longer counts."""
    h200 = load_hardware("h200")
    assert h200.link_bytes_per_s is not None and h200.fetch_s is not None
    more = {"length": M, "weights": "bf16", "kv": "bf16", "sparse": Sparse(32)}
    on_gpu, guessing = (step("qwen2.5-7b", h200, "tp", **more, tier=tier) for tier in (None, Tier(hits, ahead=ahead)))
    guess = next(phase for phase in guessing.phases if phase.name == "guess")
    find = sum(phase.seconds[0] for phase in on_gpu.phases if phase.name == "find blocks") / 28
    assert (
        guess.seconds[0] > 27 * (find + 3584 * 28 * 128 * 2 / h200.read_bytes_per_s.value) and guess.launches[0] == 54
    )
    fixed, come = h200.fetch_s.value, (1 - hits) * 32 * 4 * 65536 / h200.link_bytes_per_s.value
    own = 28 * (fixed + come) - 27 * ahead * come
    in_turn, link = on_gpu.ttl_s[0] + guess.seconds[0] + own, own + 27 * (fixed + come)
    link += sum(phase.seconds[0] for phase in on_gpu.phases if phase.name in ("head", "sampling"))
    assert guessing.ttl_s[0] == pytest.approx(max(in_turn, link), rel=1e-6)
    assert (link > in_turn) == (hits == 0), "where nothing is hot, the link decides"


@pytest.mark.parametrize("kv, known", [("auto", "bf16"), ("fp8", "e4m3"), ("k16v8", "k16v8")])
@pytest.mark.parametrize("kvp", [1, 2])
def test_both_memories_are_counted_as_the_runtime_counts_them(kvp: int, kv: str, known: str) -> None:
    h200, spec, length = load_hardware("h200"), load_spec("qwen2.5-7b"), 128 * 1024
    layout = HelixLayout.create("helix", kvp)
    placement = Placement(layout, 0, 128, 128)
    keeps = spec.keeps(layout, 0, "bfloat16", kv)
    runtime = tiered_bytes(with_bounds(keeps, "bfloat16"), placement, EngineSizes(1, chunk=CHUNK_TOKENS))
    pages = placement.stripes.pages_for(length + 1)
    budget = BlockBudget(1, 4, 32 // kvp, 0)
    taken = runtime.fixed + pages * runtime.page + placement.most_blocks(budget, length) * runtime.place
    options = Options("bf16", known, "bf16", sparse=Sparse(32), append_block=128, page_size=128)

    def found(tier: Tier, batch: int = 1) -> Memory:
        tiered = replace(options, tier=tier)
        return memory_of(spec, h200, Points.of("helix", batch, kvp=kvp), length, tiered)

    assert found(Tier(0.0)).kv_bytes[0] == pytest.approx(taken, rel=0.05)
    of_page = sum(page_bytes(kept, 128) for kept in keeps)
    assert found(Tier(0.0), 3).host_bytes[0] == pytest.approx(3 * pages * of_page, rel=0.001)
    for count in (2, 5):
        assert found(Tier(0.0, host_bytes=(count + 0.5) * pages * of_page)).largest_batch[0] == count
        enough = taken + (count - 1) * (found(Tier(0.0), 2).kv_bytes[0] - found(Tier(0.0)).kv_bytes[0])
        assert found(Tier(0.0, gpu_bytes=1.06 * enough)).largest_batch[0] >= count
        assert found(Tier(0.0, gpu_bytes=0.94 * enough)).largest_batch[0] < count


def test_each_draft_reads_blocks_of_its_own_and_one_choice_is_an_exchange_more() -> None:
    h200, more = load_hardware("h200"), {"length": M, "weights": "bf16", "kv": "bf16", "messages": "bf16", "kvp": 4}

    def phases(**also: Any) -> dict[str, Any]:
        return {phase.name: phase for phase in step("qwen2.5-7b", h200, "helix", **more, **also).phases}

    plain = phases(sparse=Sparse(32))
    drafted = phases(sparse=Sparse(32), speculation=Speculation(4, 0.5))
    assert drafted["attention"].bytes[0] == 5 * plain["attention"].bytes[0]
    assert drafted["find blocks"].bytes[0] == plain["find blocks"].bytes[0], "their scores come from one read"
    assert phases(sparse=Sparse(0))["find blocks"].bytes[0] == 0, "a window alone judges none"
    together = phases(sparse=Sparse(32, choice="global"))
    assert "offer blocks" not in plain and together["attention"].bytes[0] == plain["attention"].bytes[0]
    # Scores and numbers of 32 blocks of 4 heads go to three other ranks.
    assert together["offer blocks"].sent[0] == pytest.approx(28 * 3 * 4 * 32 * 8, rel=EXACT)


@pytest.mark.parametrize(
    "length, batch, dense, sparse",
    [(8192, 1, 121.0, 101.6), (32768, 4, 367.9, 395.5), (131072, 1, 94.5, 99.6), (131072, 4, 221.1, 388.7)],
)
def test_gather_decode_throughput(length: int, batch: int, dense: float, sparse: float) -> None:
    """Table 2 of the report, k = 8, with its own three constants put in: tokens/s of all sequences.

    It counts the embedding among the weights that a step reads (7% of the weights here), hence 6%.
    """
    h100 = load_hardware("h100")
    kernels = 28 * 5 + 1  # of our count; c0 = 3.2 ms is spread over them
    h100 = replace(
        h100,
        kernel_s=replace(h100.kernel_s, value=3.2e-3 / kernels),
        product_s={},
        finding_s=replace(h100.finding_s, value=1.74e-3 / 28),  # type: ignore[type-var]
        finding_sequence_s=None,
        bounds_share=None,
    )
    bf16 = {"weights": "bf16", "kv": "bf16", "messages": "bf16"}
    for chosen, expected in ((None, dense), (Sparse(8), sparse)):
        found = step("qwen2.5-7b", h100, "tp", batch, length=length, sparse=chosen, **bf16)
        assert batch / found.ttl_s[0] == pytest.approx(expected, rel=0.06)


def test_speculation() -> None:
    assert Speculation(0, 0.7).tokens == 1
    plain = step("llama-3.1-405b", reading(), "helix", tpa=8, kvp=8)
    drafted = step("llama-3.1-405b", reading(), "helix", tpa=8, kvp=8, speculation=Speculation(2, 0.5))
    # Reading decides at batch 1: three tokens take as long as one.
    assert drafted.ttl_s[0] == pytest.approx(plain.step_s[0] / 1.75, rel=EXACT)


@pytest.mark.parametrize("kv, known", [("auto", "bf16"), ("fp8", "e4m3"), ("k16v8", "k16v8")])
def test_windows_bound_what_is_read(kv: str, known: str) -> None:
    """In the bytes that the runtime keeps: windows stay in bf16."""
    spec = load_spec("gpt-oss-20b")
    short = [w for w in spec.windows if w is not None]
    assert short, "the model has windows"
    found = step("gpt-oss-20b", load_hardware("h200"), "tp", length=M, weights="bf16", kv=known)
    attention = next(phase for phase in found.phases if phase.name == "attention")
    wanted = sum(
        sum(k.bytes for k in kept) * (window or M)
        for window, kept in zip(spec.windows, spec.keeps(HelixLayout.create(), 0, "bfloat16", kv), strict=True)
    )
    assert attention.bytes[0] == pytest.approx(wanted, rel=EXACT)


def test_numbers_in_e4m3_are_read_at_their_own_rate() -> None:
    """Converting takes a share of the read rate, of each kind its own."""
    h200 = load_hardware("h200")
    free = replace(h200, e4m3_share={})
    for model, phase, kind in (
        ("llama-3.1-8b", "ffn", "weights"), ("llama-3.1-8b", "attention", "kv"), ("deepseek-r1", "experts", "experts"),
    ):  # fmt: skip
        times = []
        for hardware in (h200, free):
            found = step(model, hardware, "tp", length=1 << 17, weights="e4m3", kv="e4m3", arithmetic="bf16")
            (one,) = (p for p in found.phases if p.name == phase)
            times.append((one.seconds[0], one.bytes[0]))
        (seconds, read), (without, _) = times
        more = read / h200.read_bytes_per_s.value * (1 / h200.e4m3_share[kind].value - 1)
        assert seconds - without == pytest.approx(more, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "model, kv, tpa, kind",
    [
        ("deepseek-r1", "e4m3", 1, "latent_flops"), ("deepseek-r1", "e4m3", 8, "latents"),
        ("llama-3.1-8b", "k16v8", 1, "k16v8"),
    ],
)  # fmt: skip
def test_converting_slows_what_it_feeds(model: str, kv: str, tpa: int, kind: str) -> None:
    """Products with latents of all heads, reading for few of them, and values alone."""
    h200 = load_hardware("h200")
    slow = replace(h200, e4m3_share={**h200.e4m3_share, kind: replace(h200.e4m3_share[kind], value=0.01)})
    seconds = []
    for hardware in (h200, slow):
        found = step(model, hardware, "tp", length=1 << 20, tpa=tpa, kv=kv, arithmetic="bf16")
        (attention,) = (p for p in found.phases if p.name == "attention")
        seconds.append(attention.seconds[0] - len(load_spec(model).layers) * h200.kernel_s.value)
    assert seconds[1] / seconds[0] == pytest.approx(h200.e4m3_share[kind].value / 0.01)


@pytest.mark.parametrize("kv, known", [("auto", "bf16"), ("fp8", "e4m3"), ("k16v8", "k16v8")])
def test_capacity_is_counted_as_the_runtime_counts_it(kv: str, known: str) -> None:
    """With bounds, whose type is the model's."""
    spec, layout, length = load_spec("qwen2.5-7b"), HelixLayout.create("helix", 2), 128 * 1024
    pages = Placement(layout, 0, 128, 128).stripes.pages_for(length + 1)
    keeps = with_bounds(spec.keeps(layout, 0, "bfloat16", kv), "bfloat16")
    options = Options("bf16", known, "bf16", sparse=Sparse(32), append_block=128, page_size=128)
    found = memory_of(spec, load_hardware("h200"), Points.of("helix", 1, kvp=2), length, options)
    assert found.kv_bytes[0] == pytest.approx(pages * sum(page_bytes(kept, 128) for kept in keeps), rel=EXACT)


@pytest.mark.parametrize("kv, known, of_token", [("auto", "bf16", 1152), ("fp8", "e4m3", 656)])
def test_latents_are_counted_as_the_runtime_counts_them(kv: str, known: str, of_token: int) -> None:
    """In pages, and as attention reads them."""
    spec, layout, length = load_spec("deepseek-r1"), HelixLayout.create("helix", 8), 128 * 1024
    pages = Placement(layout, 0, 16, 64).stripes.pages_for(length + 1)
    keeps = spec.keeps(layout, 0, "bfloat16", kv)
    assert {token_bytes(kept) for kept in keeps} == {of_token}
    hardware, points = load_hardware("h200"), Points.of("helix", 1, kvp=8)
    found = memory_of(spec, hardware, points, length, Options("bf16", known, "bf16"))
    assert found.kv_bytes[0] == pytest.approx(pages * sum(page_bytes(kept, 64) for kept in keeps), rel=EXACT)
    taken = step("deepseek-r1", hardware, "helix", length=length, kvp=8, weights="bf16", kv=known, messages="bf16")
    read = next(phase for phase in taken.phases if phase.name == "attention")
    assert read.bytes[0] == pytest.approx(61 * of_token * length / 8, rel=EXACT)


def test_latencies_between_and_beyond_known_widths() -> None:
    seconds, level = load_hardware("h200").collectives["all_to_all"].latency(np.array([2, 3, 8, 16]))
    assert seconds == pytest.approx([2.5e-6, 2.5e-6 + 0.1e-6 * np.log2(1.5), 2.8e-6, 3.0e-6], rel=EXACT)
    assert [PROVENANCE[x] for x in level] == ["measured", "interpolated", "measured", "extrapolated"]


def test_provenance_is_that_of_the_worst_input() -> None:
    bf16 = {"weights": "bf16", "kv": "bf16", "messages": "bf16"}
    of = {n: step("qwen2.5-7b", load_hardware("h200"), "tp", tpa=n, **bf16).provenance(0) for n in (1, 8)}
    assert of == {1: "interpolated", 8: "interpolated"}  # out of measured parts, itself not measured
    assert (
        step("llama-3.1-8b", replace(load_hardware("h200"), gpus=16), "tp", tpa=16, **bf16).provenance(0)
        == "extrapolated"
    )
    assert step("llama-3.1-8b", load_hardware("h200"), "tp", tpa=2, weights="fp8").provenance(0) == "roofline"
    assert step("llama-3.1-405b", gb200(), "tp", tpa=8).provenance(0) == "roofline"


def test_kernels_have_the_sizes_that_are_counted_without_them() -> None:
    assert (GROUP.value, choose.COUNTED.value, keys.DIGITS) == (LATENT_GROUP, COUNTED, DIGITS)


@settings(deadline=None, max_examples=30)  # a machine that others use as well
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64))
def test_more_sequences_and_tokens_never_take_less(tpa: int, kvp: int, batch: int) -> None:
    spec, points = load_spec("llama-3.1-405b"), Points.of("helix", batch, tpa=tpa, kvp=kvp)
    base = predict(spec, gb200(), points, M, Options()).ttl_s[0]
    more = Points.of("helix", batch + 1, tpa=tpa, kvp=kvp)
    # With HOP-B a batch that allows one more cut can take less.
    assert predict(spec, gb200(), more, M, Options(hopb=False)).ttl_s[0] > base * (1 - EXACT)
    assert predict(spec, gb200(), points, M + 64, Options()).ttl_s[0] > base
    assert predict(spec, gb200(), points, M, Options(hopb=False)).ttl_s[0] >= base
