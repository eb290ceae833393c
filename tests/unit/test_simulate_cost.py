"""The cost model against the paper's closed formulas and numbers that were worked out by hand: equal to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.rows import FIGURE_1, scaled
from helix.kv_placement import BlockBudget, KVPlacement
from helix.layers.specs import MXFP4, NVFP4, AttentionSpec, MatrixFormat
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.loading import weights_of
from helix.planner.hardware import E4M3, PROVENANCE, QUANTIZED, Hardware, Stored, sent_bytes
from helix.planner.layer import COUNTED_DIGITS, DIGIT_VALUES, Layer
from helix.planner.offload import CHUNK_TOKENS
from helix.planner.phases import pipelined
from helix.planner.points import Offload, Options, Points, Sparse, Speculation
from helix.planner.step import Memory, StepCost, memory_of, predict
from helix.setup.offload import offload_bytes
from helix.setup.parts import make_formats, make_spec
from helix.worker.kv_cache import KVCache, with_bounds
from helix.worker.kv_cache_spec import LATENT_GROUP, EngineSizes, page_bytes, token_bytes
from helix.worker.offloaded_latents import (
    FetchBuffer,
    host_page_bytes,
    latents_of,
    with_latents_on_host,
)
from kernels.indexer import keys, select_topk
from kernels.scaled_keys import GROUP
from launch.inputs.auto_layout import planner_options
from launch.inputs.compose import compose_config
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

EXACT = 1e-9  # relative: closed formulas in float64, a few dozen operations of 1e-16 each
M, K128 = 10**6, 1 << 17
RATE = 8e12
BF16: dict[str, Any] = {"weights": "bf16", "kv": "bf16", "messages": "bf16"}
KEPT = pytest.mark.parametrize("kv, known", [("auto", "bf16"), ("fp8", "e4m3"), ("k16v8", "k16v8")])
GB200, H200 = load_hardware("gb200"), load_hardware("h200")


def reading(hardware: Hardware = GB200) -> Hardware:
    """Hardware on which only bytes and FLOPs take time."""
    return scaled(hardware, kernel=0, collective=0, link=1e30)


def step(model: str, hardware: Hardware, mode: str, batch: int = 1, length: int = M, **more: Any) -> StepCost:
    widths = {key: more.pop(key) for key in ("pp", "dp", "kvp", "tpa", "tpf", "ep") if key in more}
    return predict(load_spec(model), hardware, Points.of(mode, batch, **widths), length, Options(**more))


def phases(*question: Any, **more: Any) -> dict[str, Any]:
    return {phase.name: phase for phase in step(*question, **more).phases}


# Appendix A in microseconds, by (TPA, KVP, TPF): KV of 1e6 tokens, weights. A swap of TPA and TPF, and a grid that
# nothing divides, show.
FIGURE = {
    (1, 1, 1): (1024, 236.978176),
    (8, 1, 8): (128, 29.622272),
    (64, 1, 64): (128, 3.932160),
    (8, 8, 64): (16, 7.602176),
    (1, 64, 64): (16, 38.797312),
    (3, 1, 3): (384, 79.0801066666666667),
}


@pytest.mark.parametrize("tpa, kvp, tpf", FIGURE)
def test_figure_1(tpa: int, kvp: int, tpf: int) -> None:
    found = 1e6 * FIGURE_1.kv_s(8, M, tpa, kvp), 1e6 * FIGURE_1.weights_s(tpa, tpf)
    assert found == pytest.approx(FIGURE[tpa, kvp, tpf], rel=EXACT)


# Time of attention, latency and wire of the exchange, batch, chunk cost; HOP-B, exchanges in turn, time of both.
HOPB = [
    # Without latency both ways to exchange are the paper's.
    *((compute * batch, 0.0, exchange * batch, batch, 0.0, hopb, serial, expected[hopb])
      for compute, exchange, batch, *expected in ((2, 1.2, 8, 25.6, 17.2), (1, 1.5, 8, 20, 13), (2, 2, 4, 16, 10),
                                                  (3, 0.5, 1, 3.5, 3.5))
      for hopb in (False, True) for serial in (False, True)),
    # No chunks that cost more than they hide. Four: 16 + 9.6 / 4 + 3 = 21.4; two: 16 + 4.8 + 1; eight: 16 + 1.2 + 7.
    (16.0, 0.0, 9.6, 8, 100.0, True, False, 25.6), (16.0, 0.0, 9.6, 8, 1.0, True, False, 21.4),
    # Exchanges in turn have a latency each.
    (8.0, 5.0, 4.0, 4, 0.0, False, True, 8 + 4 * 6), (8.0, 5.0, 4.0, 4, 0.0, True, True, 2 + 4 * 6),
    (8.0, 5.0, 4.0, 4, 0.0, False, False, 8 + 5 + 4), (8.0, 5.0, 4.0, 4, 0.0, True, False, 8 + 5 + 1),
]  # fmt: skip


@pytest.mark.parametrize("data, latency, wire, batch, chunk_s, hopb, serial, expected", HOPB)
def test_attention_and_exchange(
    data: float, latency: float, wire: float, batch: int, chunk_s: float, hopb: bool, serial: bool, expected: float
) -> None:
    hardware = replace(GB200, chunk_s=replace(GB200.chunk_s, value=chunk_s))
    options = Options(hopb=hopb, exchange="serial" if serial else "batched")
    layer = Layer(load_spec("llama-3.1-8b"), hardware, Points.of("helix", batch, kvp=2), M, options)
    found = layer.attention_and_exchange_s(*(np.array([x]) for x in (data, latency, wire)))
    assert found == pytest.approx(expected, rel=EXACT)
    if hopb and not latency and not chunk_s:
        assert pipelined(data / batch, wire / batch, batch) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("hides, mode", [((), "tp"), (("tp",), "tp"), (("tp",), "helix"), (("tp", "helix"), "helix")])
def test_a_mode_that_hides_its_all_reduces_takes_what_they_took_less(hides: tuple[str, ...], mode: str) -> None:
    """Of both all-reduces in each layer; no other phase changes, and they still send what they sent."""
    widths = {"tpa": 8} if mode == "tp" else {"tpa": 4, "kvp": 2}
    usual, hidden = (step("llama-3.1-8b", GB200, mode, **widths, overlap=overlap) for overlap in ((), hides))
    reduces = [phase for phase in usual.phases if phase.name.endswith("all-reduce")]
    expected = sum(phase.seconds[0] for phase in reduces) if mode in hides else 0.0
    assert len(reduces) == 2 and usual.ttl_s[0] - hidden.ttl_s[0] == pytest.approx(expected, rel=EXACT)
    assert [phase.sent[0] for phase in hidden.phases] == [phase.sent[0] for phase in usual.phases]


@pytest.mark.parametrize(
    "mode, batch, tpa, kvp, ms",
    [("tp", 1, 64, 1, 2.439186432), ("helix", 1, 8, 8, 0.90639744), ("helix", 32, 8, 8, 8.71839744)],
)
def test_reading_alone_of_llama_405b(mode: str, batch: int, tpa: int, kvp: int, ms: float) -> None:
    """TTL of the whole model with the head. Worked out in integers:

    126 * (KV + (16384 * (16384 / TPA + 2048 * max(8 / TPA, 1) / 8 + 16384 / N + 3 * 53248 / N)) / 2) / 8e12 + head.
    """
    n = tpa * kvp
    kv = batch * 2 * max(8 // tpa, 1) * 128 * M // kvp
    layer = 16384 * (16384 // tpa + 2 * 128 * max(8 // tpa, 1) + 16384 // n + 3 * 53248 // n)
    by_hand = (126 * (kv + layer) + 128256 * 16384 // n) / 2 / RATE
    found = step("llama-3.1-405b", reading(), mode, batch, tpa=tpa, kvp=kvp).ttl_s[0]
    assert found == pytest.approx(by_hand, rel=EXACT) and round(1e3 * found, 6) == round(ms, 6)


def test_the_weights_of_the_appendix_but_for_the_output_projection() -> None:
    """The appendix divides it over the 8 ranks of TPA; section 2.2 over all 64."""
    found = phases("llama-3.1-405b", reading(), "helix", tpa=8, kvp=8)
    layer = sum(found[name].bytes[0] for name in ("qkv", "output", "ffn")) / 126 / RATE
    appendix_weights_s = replace(FIGURE_1, ffn=53248).weights_s(8, 64)
    output = 16384 * 16384 * 0.5 / RATE
    assert layer == pytest.approx(appendix_weights_s - output / 8 + output / 64, rel=EXACT)


@pytest.mark.parametrize(
    "model, kv_gb, weights_gb",
    [("deepseek-r1", 17.568, 335.51269888), ("llama-3.1-405b", 129.024, 200.82327552 + 2.101346304)],
)
def test_memory_of_a_request(model: str, kv_gb: float, weights_gb: float) -> None:
    # One page is the whole length, so that nothing is rounded up.
    found = memory_of(load_spec(model), GB200, Points.of("tp"), M - 1, Options(append_block=M, page_size=M))
    assert found.kv_bytes[0] == pytest.approx(kv_gb * 1e9, rel=EXACT)
    assert found.weight_bytes[0] == pytest.approx(weights_gb * 1e9, rel=EXACT)


QWEN, QWEN_2 = ("qwen2.5-7b", H200, "tp"), ("qwen2.5-7b", H200, "helix", 2)
# A question, more of it, a phase, and what it reads or sends, worked out by hand.
COUNTED_BY_HAND: list[tuple[tuple[Any, ...], dict[str, Any], str, str, float]] = [
    # Of two tokens' experts those touched, 8 + 8 * 248 / 256 = 15.75, whatever the grid.
    *((("deepseek-r1", GB200, "helix", 2), {"kvp": 64, "ep": ep}, "experts", "bytes",
       58 * 15.75 * 3 * 7168 * 2048 / 128) for ep in (1, 8, 64)),
    # Outputs and their LSE.
    (("llama-3.1-405b", GB200, "helix", 4), {"tpa": 8, "kvp": 8, "messages": "bf16"}, "exchange", "sent",
     126 * 4 * 16 * (128 * 2 + 4) * 7 / 8),
    # Section 2 of the gather-decode report: 57,344 n bytes dense; 448 n of bounds and 13 blocks sparse.
    (QWEN, {"length": K128, **BF16}, "attention", "bytes", 57344 * K128),
    (QWEN, {"length": K128, "sparse": Sparse(8), **BF16}, "attention", "bytes", 57344 * 1664),
    (QWEN, {"length": K128, "sparse": Sparse(8), **BF16}, "find blocks", "bytes", 448 * K128),
    # Each rank takes its share of the chosen blocks, rounded up; of sink and window together, too.
    *((QWEN_2, {"kvp": kvp, "sparse": Sparse(topk), **BF16}, "attention", "bytes",
       28 * 2 * blocks * 128 * 4 * 2 * 128 * 2)
      for kvp, topk, blocks in ((1, 32, 37), (2, 32, 16 + 3), (8, 32, 4 + 1), (8, 9, 2 + 1), (8, 0, 1), (1, 0, 5))),
    (QWEN_2, {"kvp": 4, "sparse": Sparse(0), **BF16}, "find blocks", "bytes", 0),  # a window alone judges none
    # Scores and numbers of 32 blocks of 4 heads of two sequences go to three other ranks.
    (QWEN_2, {"kvp": 4, "sparse": Sparse(32, choice="global"), **BF16}, "offer blocks", "sent",
     2 * 28 * 3 * 4 * 32 * 8),
    # Latents in the bytes that the runtime keeps.
    *((("deepseek-r1", H200, "helix"), {"kvp": 8, "length": K128, **BF16, "kv": kv}, "attention", "bytes",
       61 * token_bytes_of_kv * K128 / 8) for kv, token_bytes_of_kv in (("bf16", 1152), ("e4m3", 656))),
]  # fmt: skip


@pytest.mark.parametrize("question, more, phase, what, expected", COUNTED_BY_HAND)
def test_what_is_read_and_sent(
    question: tuple[Any, ...], more: dict[str, Any], phase: str, what: str, expected: float
) -> None:
    assert getattr(phases(*question, **more)[phase], what)[0] == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("mode, width, ep, saved", [("helix", "kvp", 1, 2), ("helix", "kvp", 2, 0), ("dp", "dp", 1, 0)])
def test_shared_experts_among_the_routed_have_no_launches(mode: str, width: str, ep: int, saved: int) -> None:
    """Two less in each of R1's 58 layers with experts, where these are on all ranks; as many bytes."""
    widths = {width: 8, "ep": ep}
    routed, dense = (step("deepseek-r1", GB200, mode, 8, **widths, shared=s).phases for s in ("routed", "dense"))
    launches, read = ([sum(getattr(p, key)[0] for p in s) for s in (dense, routed)] for key in ("launches", "bytes"))
    assert launches[0] - launches[1] == 58 * saved and read[0] == pytest.approx(read[1], rel=EXACT)


def test_rows_that_all_ranks_have_are_gathered_and_their_sums_scattered() -> None:
    """In R1's layers with experts, one reduce-scatter and one all-gather: as many bytes as one all-reduce."""
    dp = phases("deepseek-r1", GB200, "dp", 64, dp=8, ep=8, dispatch="all")
    helix = phases("deepseek-r1", GB200, "helix", 64, kvp=8, ep=8)
    sent = dp["gather rows"].sent[0] + dp["ffn all-reduce"].sent[0]
    assert sent == pytest.approx(helix["ffn all-reduce"].sent[0], rel=EXACT)
    for name in ("shared experts", "experts"):
        assert dp[name].bytes[0] == pytest.approx(helix[name].bytes[0], rel=EXACT)
    # Each rank has the whole head, and samples its own rows.
    assert dp["head"].bytes[0] == pytest.approx(8 * helix["head"].bytes[0], rel=EXACT)
    assert dp["head"].flops[0] == pytest.approx(helix["head"].flops[0], rel=EXACT) and not dp["sampling"].launches[0]


@pytest.mark.parametrize(
    "op, width, sent", [("all_reduce", 8, 112), ("all_to_all", 8, 56), ("all_gather", 8, 56), ("send", 2, 64)]
)
def test_what_leaves_a_rank(op: str, width: int, sent: float) -> None:
    assert sent_bytes(op, width, 64) == sent


def test_sparse_attention_pays_for_finding_once_and_for_a_launch_like_dense() -> None:
    assert H200.finding_s is not None and H200.finding_sequence_s is not None and H200.bounds_share is not None
    dense = step(*QWEN, length=4 * 128, **BF16)
    sparse = step(*QWEN, length=4 * 128, sparse=Sparse(32), **BF16)  # as many blocks as there are: all are read
    bounds = 28 * 4 * 4 * 2 * 128 * 2
    price = H200.finding_s.value + H200.finding_sequence_s.value
    extra = 28 * price + bounds / H200.bounds_share.value / H200.read_bytes_per_s.value
    assert sparse.ttl_s[0] - dense.ttl_s[0] == pytest.approx(extra, rel=1e-6)
    short = step(*QWEN, length=4 * 128, sparse=Sparse(32, from_tokens=4 * 128 + 1), **BF16)
    assert short.ttl_s[0] == dense.ttl_s[0], "shorter than from_tokens: dense"
    assert short.memory.kv_bytes[0] == sparse.memory.kv_bytes[0] == dense.memory.kv_bytes[0] * (1 + 1 / 128)


@pytest.mark.parametrize("kvp, hits", [(1, 0.0), (2, 0.8), (4, 1.0)])
def test_what_is_not_hot_comes_over_the_link(kvp: int, hits: float) -> None:
    """What is missing of a rank's share of the chosen blocks; all else is as over a cache on the GPU."""
    assert H200.link_bytes_per_s is not None and H200.fetch_s is not None
    more = {"kvp": kvp, "sparse": Sparse(32), **BF16}
    on_gpu, offloaded = (
        step("qwen2.5-7b", H200, "helix", **more, offload=offload) for offload in (None, Offload(hits))
    )
    come = (1 - hits) * 32 / kvp * 28 * 4 * 65536
    extra = 28 * H200.fetch_s.value + come / H200.link_bytes_per_s.value
    assert offloaded.ttl_s[0] - on_gpu.ttl_s[0] == pytest.approx(extra, rel=1e-6)
    with pytest.raises(ValueError, match=r"has no link_bytes_per_s or fetch_s"):
        step("qwen2.5-7b", replace(H200, fetch_s=None), "helix", **more, offload=Offload(hits))


@pytest.mark.parametrize("hits, ahead", [(0.0, 1.0), (0.0, 0.5), (0.8, 0.5), (1.0, 1.0)])
def test_what_a_guess_names_comes_while_others_compute(hits: float, ahead: float) -> None:
    """Layers take as long as what is launched in turn, guesses among it, or as the link is busy; the longer counts."""
    assert H200.link_bytes_per_s is not None and H200.fetch_s is not None
    on_gpu, guessing = (
        step(*QWEN, sparse=Sparse(32), **BF16, offload=offload) for offload in (None, Offload(hits, prefetch=ahead))
    )
    guess = next(phase for phase in guessing.phases if phase.name == "guess")
    find = sum(phase.seconds[0] for phase in on_gpu.phases if phase.name == "find blocks") / 28
    assert guess.seconds[0] > 27 * (find + 3584 * 28 * 128 * 2 / H200.read_bytes_per_s.value)
    assert guess.launches[0] == 54
    fixed, come = H200.fetch_s.value, (1 - hits) * 32 * 4 * 65536 / H200.link_bytes_per_s.value
    own = 28 * (fixed + come) - 27 * ahead * come
    in_turn, link = on_gpu.ttl_s[0] + guess.seconds[0] + own, own + 27 * (fixed + come)
    link += sum(phase.seconds[0] for phase in on_gpu.phases if phase.name in ("head", "sampling"))
    assert guessing.ttl_s[0] == pytest.approx(max(in_turn, link), rel=1e-6)
    assert (link > in_turn) == (hits == 0), "where nothing is hot, the link decides"


@KEPT
@pytest.mark.parametrize("kvp", [1, 2])
def test_both_memories_are_counted_as_the_runtime_counts_them(kvp: int, kv: str, known: str) -> None:
    spec, layout = load_spec("qwen2.5-7b"), HelixLayout.create("helix", kvp)
    placement = KVPlacement(layout, 0, 128, 128)
    cache_specs = spec.kv_cache_specs(layout, 0, "bfloat16", kv)
    runtime = offload_bytes(with_bounds(cache_specs, "bfloat16"), placement, EngineSizes(1, chunk=CHUNK_TOKENS))
    pages = placement.stripes.pages_for(K128 + 1)
    budget = BlockBudget(1, 4, 32 // kvp, 0)
    used_bytes = runtime.fixed + pages * runtime.page + placement.max_blocks(budget, K128) * runtime.resident_block
    options = Options("bf16", known, "bf16", sparse=Sparse(32), append_block=128, page_size=128)

    def found(offload: Offload | None, batch: int = 1) -> Memory:
        return memory_of(spec, H200, Points.of("helix", batch, kvp=kvp), K128, replace(options, offload=offload))

    bounded = sum(page_bytes(kept, 128) for kept in with_bounds(cache_specs, "bfloat16"))
    assert found(None).kv_bytes[0] == pytest.approx(pages * bounded, rel=EXACT), "with bounds, of the model's type"
    assert found(Offload(0.0)).kv_bytes[0] == pytest.approx(used_bytes, rel=0.05)
    bytes_per_page = sum(page_bytes(kept, 128) for kept in cache_specs)
    assert found(Offload(0.0), 3).host_bytes[0] == pytest.approx(3 * pages * bytes_per_page, rel=0.001)
    for count in (2, 5):
        assert found(Offload(0.0, host_bytes=(count + 0.5) * pages * bytes_per_page)).largest_batch[0] == count
        enough = used_bytes + (count - 1) * (found(Offload(0.0), 2).kv_bytes[0] - found(Offload(0.0)).kv_bytes[0])
        assert found(Offload(0.0, gpu_bytes=1.06 * enough)).largest_batch[0] >= count
        assert found(Offload(0.0, gpu_bytes=0.94 * enough)).largest_batch[0] < count


@pytest.mark.parametrize("kv, known", [("auto", "bf16"), ("fp8", "e4m3")])
def test_latents_are_counted_as_the_runtime_counts_them(kv: str, known: str) -> None:
    spec, layout = load_spec("deepseek-r1"), HelixLayout.create("helix", 8)
    pages = KVPlacement(layout, 0, 16, 64).stripes.pages_for(K128 + 1)
    cache_specs = spec.kv_cache_specs(layout, 0, "bfloat16", kv)
    assert {token_bytes(kept) for kept in cache_specs} == {{"auto": 1152, "fp8": 656}[kv]}
    found = memory_of(spec, H200, Points.of("helix", 1, kvp=8), K128, Options("bf16", known, "bf16"))
    assert found.kv_bytes[0] == pytest.approx(pages * sum(page_bytes(kept, 64) for kept in cache_specs), rel=EXACT)


@pytest.mark.parametrize("model, sharing", [("glm-5.2", 4), ("deepseek-v3.2", 1)])
def test_offloaded_latents_are_counted_as_the_runtime_counts_them(model: str, sharing: int) -> None:
    """And a step waits for what the layers with an indexer select, the others fetch ahead."""
    spec, layout = load_spec(model), HelixLayout.create("helix", 8)
    pages = KVPlacement(layout, 0, 16, 64).stripes.pages_for(K128 + 1)
    cache_specs = with_latents_on_host(spec.kv_cache_specs(layout, 0, "bfloat16"), len(spec.layers))
    fixed = FetchBuffer.bytes(latents_of(cache_specs), sharing, 3, 2048)
    options, points = Options("fp8", "bf16", "bf16", offload=Offload(0.0)), Points.of("helix", 3, kvp=8)
    found = memory_of(spec, H200, points, K128, options)
    index_bytes = sum(page_bytes(kept, 64) for kept in cache_specs)
    assert found.kv_bytes[0] == pytest.approx(3 * pages * index_bytes + fixed, rel=EXACT)
    assert found.host_bytes[0] == pytest.approx(3 * pages * host_page_bytes(cache_specs, 64), rel=EXACT)
    half = replace(options, offload=Offload(0.0, host_bytes=2.5 * found.host_bytes[0] / 3))
    assert memory_of(spec, H200, points, K128, half).largest_batch[0] == 2
    on_gpu, offloaded = (predict(spec, H200, points, K128, replace(options, offload=o)) for o in (None, Offload(0.0)))
    layers, selecting, rate = len(spec.layers), len(spec.indexers), H200.link_bytes_per_s
    assert rate is not None
    come_s = 3 * 2048 / 8 * 1152 / rate.value
    extra = layers * H200.kernel_s.value + selecting * come_s
    assert offloaded.ttl_s[0] - on_gpu.ttl_s[0] == pytest.approx(extra, rel=1e-6)
    slow = replace(H200, link_bytes_per_s=replace(rate, value=1e8))
    assert predict(spec, slow, points, K128, options).ttl_s[0] > layers * come_s * rate.value / 1e8, "the link decides"
    with pytest.raises(ValueError, match="no link_bytes_per_s"):
        predict(spec, replace(H200, link_bytes_per_s=None), points, K128, options)


@pytest.mark.parametrize("widths", [("helix", 4, 1), ("helix", 2, 4), ("tp", 1, 8), ("medha", 2, 2), ("dp", 1, 1, 4)])
@pytest.mark.parametrize("model", ["laguna-xs", "step-3.5-flash", "gemma-3-27b"])
def test_layers_that_differ_are_counted_as_the_runtime_counts_them(model: str, widths: tuple[Any, ...]) -> None:
    """Weights and KV of the fullest rank, within 2%; as if all layers were like the first, weights are 4% off."""
    mode, kvp, tpa, dp = (*widths, 1)[:4]
    spec, layout = load_spec(model), HelixLayout.create(mode, kvp, tpa, dp=dp)
    options = Options("bf16", "bf16", "bf16", prompt_chunk=4096, snapshots=8, dispatch="all")
    found = memory_of(spec, H200, Points.of(mode, dp, dp=dp, kvp=kvp, tpa=tpa), K128, options)
    ranks = [weights_of(spec, layout, rank, torch.bfloat16) for rank in range(layout.world_size)]
    assert found.weight_bytes[0] == pytest.approx(max(weights.bytes for weights in ranks), rel=0.02)
    assert found.kv_bytes[0] == pytest.approx(allocated(spec, layout), rel=0.02)


def allocated(spec: DecoderSpec, layout: HelixLayout, drafts: int = 0) -> int:
    """Bytes of the fullest rank's cache for one sequence and eight snapshots."""
    placement = KVPlacement(layout, 0, 16, 64)
    pages = placement.stripes.pages_for(K128 + 1 + drafts)
    sizes = EngineSizes(1, K128 + 1 + drafts, 4096, drafts, pages, snapshots=8)
    specs = [spec.kv_cache_specs(layout, rank, "bfloat16") for rank in range(layout.world_size)]
    made = [KVCache(of, placement, sizes, torch.device("meta")) for of in specs]
    return max(sum(tensor.nbytes for tensor in cache.tensors) for cache in made)


@pytest.mark.parametrize("gamma", [0, 4, 16])
@pytest.mark.parametrize("mode, kvp, tpa", [("helix", 4, 1), ("helix", 3, 2), ("tp", 1, 2), ("medha", 2, 2)])
@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "qwen3.5-27b"])
def test_states_are_counted_as_the_runtime_counts_them(model: str, mode: str, kvp: int, tpa: int, gamma: int) -> None:
    """With the convolution's last inputs and each token's update, which drafts may undo."""
    spec, layout = load_spec(model), HelixLayout.create(mode, kvp, tpa)
    points, drafts = Points.of(mode, kvp=kvp, tpa=tpa), Speculation(gamma, 0.8)
    options = Options("bf16", "bf16", "bf16", prompt_chunk=4096, snapshots=8, speculation=drafts)
    found = memory_of(spec, H200, points, K128, options).kv_bytes[0]
    assert found == pytest.approx(allocated(spec, layout, gamma), rel=1e-3)


PACKED = ("kimi-k2.5", "glm-5.2-nvfp4", "deepseek-r1-nvfp4", "minimax-m2-nvfp4", "qwen3.5-397b-a17b-gptq-int4")


@pytest.mark.parametrize("widths", [{"kvp": 8, "ep": 4}, {"kvp": 3}, {"kvp": 2, "tpa": 2}])
@pytest.mark.parametrize("model", PACKED)
def test_packed_weights_are_counted_as_the_runtime_packs_them(model: str, widths: dict[str, int]) -> None:
    """Matrices of each kind in their format, and FFNs cut between blocks of 32 columns; norms are not counted."""
    config = compose_config([f"model={model}", "model.config.num_hidden_layers=5"])
    spec, formats = make_spec(config), make_formats(config.model, None, on_gpu=True)
    if widths.get("tpa", 1) > spec.kv_heads:
        widths = {"kvp": 4}
    layout = HelixLayout.create("helix", **widths)
    found = memory_of(spec, H200, Points.of("helix", **widths), K128, planner_options(config, spec))
    ranks = [weights_of(spec, layout, rank, torch.bfloat16, formats).bytes for rank in (0, layout.world_size - 1)]
    assert found.weight_bytes[0] == pytest.approx(max(ranks), rel=1e-3)


@pytest.mark.parametrize(
    "matrix, bits",
    [
        (MatrixFormat(128), 8.25), (MatrixFormat(32), 9), (MXFP4, 4.25), (NVFP4, 4.5),
        (MatrixFormat(32, "int4", "bfloat16"), 4.5), (MatrixFormat(128, "int4", "float16", zeros=True), 4.1875),
    ],
)  # fmt: skip
def test_bits_of_a_packed_weight(matrix: MatrixFormat, bits: float) -> None:
    kind = matrix.kind
    assert matrix.bits == bits and Stored.mean([matrix]).bytes == bits / 8 and Stored.mean([matrix]).kind == kind
    mixed = Stored.mean([None, matrix, matrix, None, matrix])
    assert mixed.kind == kind and mixed.bytes == pytest.approx((2 * 2 + 3 * bits / 8) / 5, rel=EXACT)
    assert mixed.row_bytes == pytest.approx(4 * 3 / 5 * matrix.row_scales, rel=EXACT)


def test_what_needs_layers_alike_is_refused_where_they_differ() -> None:
    spec = load_spec("llama-3.1-8b")
    first, *others = spec.layers
    assert isinstance(first.mixer, AttentionSpec)
    mixed = replace(spec, layers=(replace(first, mixer=replace(first.mixer, kv_heads=4)), *others))
    assert mixed.heads == [(32, 4), (32, 8)] and mixed.kv_heads == 4 and mixed.full_layers_differ
    dense = Options("bf16", "bf16", "bf16")
    alike, differing = (memory_of(s, H200, Points.of("tp", tpa=4), K128, dense) for s in (spec, mixed))
    assert differing.kv_bytes[0] == pytest.approx(alike.kv_bytes[0] * 63 / 64)
    assert (differing.weight_bytes[0] < alike.weight_bytes[0]) and not spec.full_layers_differ
    with pytest.raises(ValueError, match="tpa divides the 4 KV heads"):
        predict(mixed, H200, Points.of("helix", tpa=8), K128, dense)
    for more in (dict(sparse=Sparse()), dict(speculation=Speculation(2, 0.5, 0.1))):
        with pytest.raises(ValueError, match="the same heads in every layer"):
            predict(mixed, H200, Points.of("tp"), K128, replace(dense, **more))


def test_each_draft_reads_blocks_of_its_own_and_one_choice_is_an_exchange_more() -> None:
    plain = phases(*QWEN_2, kvp=4, sparse=Sparse(32), **BF16)
    drafted = phases(*QWEN_2, kvp=4, sparse=Sparse(32), speculation=Speculation(4, 0.5), **BF16)
    assert drafted["attention"].bytes[0] == 5 * plain["attention"].bytes[0]
    assert drafted["find blocks"].bytes[0] == plain["find blocks"].bytes[0], "their scores come from one read"
    together = phases(*QWEN_2, kvp=4, sparse=Sparse(32, choice="global"), **BF16)
    assert "offer blocks" not in plain and together["attention"].bytes[0] == plain["attention"].bytes[0]


def test_speculation() -> None:
    assert Speculation(0, 0.7).tokens == 1
    plain = step("llama-3.1-405b", reading(), "helix", tpa=8, kvp=8)
    drafted = step("llama-3.1-405b", reading(), "helix", tpa=8, kvp=8, speculation=Speculation(2, 0.5))
    # Reading decides at batch 1: three tokens take as long as one.
    assert drafted.ttl_s[0] == pytest.approx(plain.step_s[0] / 1.75, rel=EXACT)


@KEPT
def test_windows_bound_what_is_read(kv: str, known: str) -> None:
    """In the bytes that the runtime keeps: windows stay in bf16."""
    spec = load_spec("gpt-oss-20b")
    assert any(spec.windows), "the model has windows"
    cache_specs = spec.kv_cache_specs(HelixLayout.create(), 0, "bfloat16", kv)
    wanted = sum(
        sum(k.bytes for k in kept) * (window or M) for window, kept in zip(spec.windows, cache_specs, strict=True)
    )
    found = phases("gpt-oss-20b", H200, "tp", weights="bf16", kv=known)
    assert found["attention"].bytes[0] == pytest.approx(wanted, rel=EXACT)


@pytest.mark.parametrize(
    "model, phase, kind",
    [("llama-3.1-8b", "ffn", "weights"), ("llama-3.1-8b", "attention", "kv"), ("deepseek-r1", "experts", "experts")],
)
def test_numbers_in_e4m3_are_read_at_their_own_rate(model: str, phase: str, kind: str) -> None:
    """Converting takes a share of the read rate, of each kind its own."""
    matrices = dict.fromkeys(QUANTIZED, E4M3)
    question = {"length": K128, "weights": "bf16", "kv": "e4m3", "matrices": matrices}
    ours, free = (phases(model, hardware, "tp", **question)[phase] for hardware in (H200, replace(H200, e4m3_share={})))
    more = ours.bytes[0] / H200.read_bytes_per_s.value * (1 / H200.e4m3_share[kind].value - 1)
    assert ours.seconds[0] - free.seconds[0] == pytest.approx(more, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("kind", ["e2m1", "int4"])
def test_four_bits_are_read_more_slowly_by_more_rows(kind: str) -> None:
    """Each row of x takes its part of what converts the weights."""
    stored = replace(E4M3, kind=kind)
    for experts in (False, True):
        shares = [H200.share(stored, experts, rows).value for rows in (1, 2, 16, 24, 32, 64, 128, 4096)]
        assert shares == sorted(shares, reverse=True) and 0 < shares[-1] < shares[0] < 1
        assert H200.share(stored, experts, np.array([1, 64])).value.tolist() == [shares[0], shares[5]]


@pytest.mark.parametrize(
    "model, kv, tpa, kind",
    [
        ("deepseek-r1", "e4m3", 1, "latent_flops"), ("deepseek-r1", "e4m3", 8, "latents"),
        ("llama-3.1-8b", "k16v8", 1, "k16v8"),
    ],
)  # fmt: skip
def test_converting_slows_what_it_feeds(model: str, kv: str, tpa: int, kind: str) -> None:
    """Products with latents of all heads, reading for few of them, and values alone."""
    slow = replace(H200, e4m3_share={**H200.e4m3_share, kind: replace(H200.e4m3_share[kind], value=0.01)})
    fixed = len(load_spec(model).layers) * H200.kernel_s.value
    fast_s, slow_s = (
        phases(model, hardware, "tp", length=1 << 20, tpa=tpa, kv=kv, arithmetic="bf16")["attention"].seconds[0] - fixed
        for hardware in (H200, slow)
    )
    assert slow_s / fast_s == pytest.approx(H200.e4m3_share[kind].value / 0.01)


def test_latencies_between_and_beyond_known_widths() -> None:
    seconds, level = H200.collectives["all_to_all"].latency(np.array([2, 3, 8, 16]))
    assert seconds == pytest.approx([2.5e-6, 2.5e-6 + 0.1e-6 * np.log2(1.5), 2.8e-6, 3.0e-6], rel=EXACT)
    assert [PROVENANCE[x] for x in level] == ["measured", "interpolated", "measured", "extrapolated"]


@pytest.mark.parametrize(
    "question, more, provenance",
    [
        (QWEN, BF16, "interpolated"),  # out of measured parts, itself not measured
        (QWEN, {"tpa": 8, **BF16}, "interpolated"),
        (("llama-3.1-8b", replace(H200, gpus=16), "tp"), {"tpa": 16, **BF16}, "extrapolated"),
        (("llama-3.1-8b", H200, "tp"), {"tpa": 2, "weights": "fp8"}, "roofline"),
        (("llama-3.1-405b", GB200, "tp"), {"tpa": 8}, "roofline"),
    ],
)
def test_provenance_is_that_of_the_worst_input(
    question: tuple[Any, ...], more: dict[str, Any], provenance: str
) -> None:
    assert step(*question, **more).provenance(0) == provenance


def test_kernels_have_the_sizes_that_are_counted_without_them() -> None:
    assert (GROUP.value, select_topk.COUNTED.value, keys.DIGITS) == (LATENT_GROUP, COUNTED_DIGITS, DIGIT_VALUES)


@settings(deadline=None, max_examples=30)  # a machine that others use as well
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64))
def test_more_sequences_and_tokens_never_take_less(tpa: int, kvp: int, batch: int) -> None:
    spec, points = load_spec("llama-3.1-405b"), Points.of("helix", batch, tpa=tpa, kvp=kvp)
    base = predict(spec, GB200, points, M, Options()).ttl_s[0]
    more = Points.of("helix", batch + 1, tpa=tpa, kvp=kvp)
    # With HOP-B a batch that allows one more cut can take less.
    assert predict(spec, GB200, more, M, Options(hopb=False)).ttl_s[0] > base * (1 - EXACT)
    assert predict(spec, GB200, points, M + 64, Options()).ttl_s[0] > base
    assert predict(spec, GB200, points, M, Options(hopb=False)).ttl_s[0] >= base
