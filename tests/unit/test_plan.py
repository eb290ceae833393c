"""The planner: ranking, memory, words, commands; `layout=auto`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import planner
from benchmarks.papers.rows import scaled
from benchmarks.program import PROGRAM
from helix.devices import ranks
from helix.layers.specs import MatrixFormat
from helix.layout import HelixLayout
from helix.models.loading import weights_of
from helix.planner.hardware import Hardware
from helix.planner.plan import PlannedLayout, PlanQuery, Ranking, largest_matrix, plan
from helix.planner.points import Offload, Options, Points, Sparse
from helix.planner.step import memory_of, predict
from helix.setup.buffers import max_chunk, piece_bytes, prompt_bytes, sampling_bytes, token_buffers
from launch.inputs.auto_layout import choose, workload
from launch.inputs.break_even import compare_sparse, sparse_pays_from, ttl_s
from launch.inputs.hardware import HARDWARE, device_here, hardware_of, load_hardware, read_hardware
from launch.inputs.planning import pick_hardware
from launch.inputs.prompt_files import PromptLine
from launch.inputs.shapes import load_spec
from launch.job.sweep import skip_reason
from tests.benchmark_config import compose_config

M = 1 << 20
H200 = load_hardware("h200")
BF16 = Options(weights="bf16", kv="bf16", messages="bf16", hopb=False)


def ask(model: str = "qwen2.5-7b", hardware: Hardware = H200, **more: Any) -> Ranking:
    asked = {"gpus": 8, "context": M, "batch": 8} | more
    return plan(PlanQuery(load_spec(model), hardware, **asked))


def test_states_are_counted() -> None:
    """48 layers of Qwen3.5-27B have 48 heads of 128 x 128 fp32, read and written once; 16 have keys."""
    spec, one = load_spec("qwen3.5-27b"), Points.of("tp", 1)
    short, long = (predict(spec, H200, one, length, BF16) for length in (1, 1 + M // 8))
    states = next(phase for phase in short.phases if phase.name == "states")
    state_bytes = 48 * 48 * 128 * 128 * 4
    assert states.bytes[0] == 2 * state_bytes and states.launches[0] == 48
    # Four inputs of the convolution, of 16 key heads twice and 48 value heads, and the last token's update.
    kept_bytes = state_bytes + 48 * (4 * (2 * 16 + 48) * 128 * 2 + 48 * (128 + 128 + 1) * 4)
    tokens = short.memory.kv_bytes[0] - kept_bytes
    assert tokens == pytest.approx(16 * 64 * 2 * 4 * 256 * 2)  # a page
    assert long.memory.kv_bytes[0] == pytest.approx(kept_bytes + (M // 8 / 64 + 1) * tokens)
    assert short.memory.weight_bytes[0] == pytest.approx(2 * 26.896e9, rel=2e-3)
    sparse = replace(BF16, sparse=Sparse())
    for options in (sparse, replace(sparse, offload=Offload(0.9))):  # of the layers with attention alone
        few = predict(spec, H200, one, 1 + M // 8, options)
        assert next(phase for phase in few.phases if phase.name == "states").bytes[0] == 2 * state_bytes
    offloaded, without = (
        predict(replace(spec, layers=layers), H200, one, 1 + M // 8, options).memory.kv_bytes[0]
        for layers in (spec.layers, tuple(layer for layer in spec.layers if layer.mixer.is_attention))
    )
    assert offloaded - without == pytest.approx(kept_bytes)
    with pytest.raises(ValueError, match="recurrent states"):
        predict(spec, H200, Points.of("dp", 2, dp=2), 1, BF16)


@pytest.mark.parametrize("model", ["glm-5.2", "deepseek-r1", "llama-3.1-8b"])
def test_room_for_kv_is_what_the_engine_leaves_to_it(model: str) -> None:
    """Beside chunks of prompts, which take more than a tenth where experts share a GPU, pieces, and logits."""
    spec, bf16, fp8 = load_spec(model), "bfloat16", replace(BF16, weights="fp8")
    choice = ask(model, batch=1, context=M, options=fp8).choices[0]
    layout, kind = choice.layout, MatrixFormat(128)
    of_layers = weights_of(spec, layout, 0, torch.bfloat16, lambda name: kind if "layers" in name else None)
    pieces = piece_bytes(spec, of_layers.max_matrix_size, False, bf16, captured=True)
    free = int(choice.free_bytes + choice.kv_bytes) - pieces
    chunk = max_chunk(token_buffers(spec, layout, 0, bf16), free, spec.experts is not None)
    logits = sampling_bytes(1, 1, len(layout.vocab_rows(0, spec.vocab)), captured=True)
    prompts = prompt_bytes(spec, layout, 0, chunk, M, bf16, captured=True)
    assert (prompts > 0.1 * free) == (model != "llama-3.1-8b")
    assert choice.largest_batch == min(0.9 * free, free - prompts - logits) // choice.kv_bytes
    few = ask(model, batch=1, context=M, options=replace(fp8, prompt_chunk=256)).choices[0]
    prompts = prompt_bytes(spec, layout, 0, 256, M, bf16, captured=True)
    assert few.largest_batch == min(0.9 * free, free - prompts - logits) // few.kv_bytes


@pytest.mark.parametrize("layout", [("helix", 1), ("tp", 1, 2), ("helix", 4, 2)], ids=str)
@pytest.mark.parametrize("model", ["glm-5.2", "kimi-k2", "qwen3.5-27b", "gpt-oss-20b", "laguna-xs", "gemma-3-27b"])
def test_the_largest_matrix_is_that_of_the_weights(model: str, layout: tuple[Any, ...]) -> None:
    spec, kind, where = load_spec(model), MatrixFormat(128), HelixLayout.create(*layout)
    spec = replace(spec, layers=(*dict.fromkeys(spec.layers),))  # one of each
    of_layers = weights_of(spec, where, 0, torch.bfloat16, lambda name: kind if "layers" in name else None)
    assert largest_matrix(spec, where, replace(BF16, weights="fp8")) == of_layers.max_matrix_size
    assert not largest_matrix(spec, where, BF16)


def predicted(choice: PlannedLayout, model: str, length: int) -> float:
    layout = choice.layout
    widths = {key: getattr(layout, key) for key in ("kvp", "tpa", "tpf", "ep")}
    points = Points.of(layout.mode, choice.batch, **widths)
    return float(predict(load_spec(model), H200, points, length, BF16).ttl_s[0])


@pytest.fixture(autouse=True)
def shipped(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped descriptions alone: one that was calibrated on this machine would come before them."""
    directory = tmp_path_factory.mktemp("hardware")
    for name in ("b200", "gb200", "h100", "h200"):
        (directory / f"{name}.yaml").symlink_to(HARDWARE / f"{name}.yaml")
    monkeypatch.setattr("launch.inputs.hardware.HARDWARE", directory)


# ---- ranking


def test_every_layout_of_the_runtime_is_ranked_by_its_prediction() -> None:
    found = ask("qwen3-30b-a3b", context=M // 8, batch=3)
    names = {choice.name for choice in found.choices}
    assert len(names) == len(found.choices) and {"tp tpa=8", "helix kvp=8", "helix kvp=8 tpf=1 ep=8"} <= names
    assert {c.layout.mode for c in found.choices} == {"tp", "medha", "helix"} and not found.rejected
    times = [choice.ttl_s for choice in found.choices]
    # Chunks cost 9 us each on this hardware: none are cut, and a choice is the plain prediction of its layout.
    assert times == pytest.approx([predicted(c, "qwen3-30b-a3b", M // 8) for c in found.choices], rel=1e-9)
    assert times == sorted(times) and {choice.chunks for choice in found.choices} == {1}
    for choice in found.choices:
        assert sum(choice.phases.values()) == pytest.approx(choice.ttl_s, rel=1e-9)
        assert choice.tokens_per_s_user == pytest.approx(1 / choice.ttl_s) and choice.tokens_per_s_gpu == pytest.approx(
            3 * choice.tokens_per_s_user / 8
        )


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 8), st.integers(1, 1 << 20), st.integers(8, 16))
def test_what_is_said_to_fit_fits_and_no_more(gpus: int, length: int, batch: int) -> None:
    """To the last sequence, and to the last token."""
    for choice in ask(gpus=gpus, context=length, batch=batch).choices:
        layout = choice.layout
        options = replace(BF16, append_block=choice.append_block)

        def largest(points: Points, length: int, options: Options = options) -> int:
            return int(memory_of(load_spec("qwen2.5-7b"), H200, points, length, options).largest_batch[0])

        points = Points.of(layout.mode, batch, kvp=layout.kvp, tpa=layout.tpa)
        assert largest(points, length) == choice.largest_batch >= batch
        assert largest(points, choice.longest_context) >= batch
        assert (
            largest(points, choice.longest_context + 1) < batch or choice.longest_context == 2 * M
        )  # the model's context
        assert choice.weight_bytes + choice.kv_bytes + choice.free_bytes == pytest.approx(H200.memory_bytes.value)
        assert choice.free_bytes > 0


@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3.5-27b"])
def test_what_is_longest_is_so_whatever_length_is_planned(model: str) -> None:
    """Windows and states take the same at every length."""
    short, long = (ask(model, gpus=2, context=context).choices for context in (M >> 10, M >> 3))
    longest = {choice.name: choice.longest_context for choice in long}
    assert {choice.name: choice.longest_context for choice in short} == longest
    assert max(longest.values()) < 2 * M  # the model's context


def test_the_append_block_shrinks_until_ranks_hold_alike() -> None:
    blocks = {c.layout.kvp: c.append_block for c in ask(context=100, batch=1).choices}
    held = {kvp: HelixLayout.create("helix", kvp).local_length(100, 0, block) for kvp, block in blocks.items()}
    assert blocks[1] == 16 or held[1] == 100
    assert all(block == 1 or held[kvp] <= 1.01 * 100 / kvp for kvp, block in blocks.items())
    assert {c.append_block for c in ask().choices} == {16}


def test_batches_and_limits() -> None:
    found = ask(batch=None, ttl_s=0.020)
    assert all(found.meets_ttl(c) for c in found.choices)
    assert [c.tokens_per_s_gpu for c in found.choices] == sorted(
        (c.tokens_per_s_gpu for c in found.choices), reverse=True
    )
    for choice in found.choices:  # a third more sequences (the grid's next but one) are too many, or have no room
        more = replace(choice, batch=int(np.ceil(1.5 * choice.batch)))
        assert predicted(more, "qwen2.5-7b", M) > 0.020 or more.batch > choice.largest_batch
    late = ask(ttl_s=0.020)
    assert late.choices[-1].name == "tp tpa=8" and not late.meets_ttl(late.choices[-1])
    assert "where 20.00 ms are allowed" in late.verdict and "No layout meets" not in found.reason + late.reason
    for more in ({}, {"batch": None}):
        never = ask(ttl_s=1e-4, **more)
        assert never.reason.startswith(f"No layout meets ttl_ms=0.1: the closest, {never.choices[0].name}, takes ")


def test_drafts_where_they_are_accepted() -> None:
    assert {c.gamma for c in ask(acceptance=0.0, batch=1).choices} == {0}
    plain, drafted = ask(batch=1).choices[0], ask(acceptance=0.8, batch=1).choices[0]
    assert drafted.gamma > 0 and drafted.ttl_s < plain.ttl_s
    assert {c.gamma for c in ask(acceptance=0.8, gamma=2, batch=1).choices} == {2}


# ---- words


def test_helix_helps_where_kv_is_most_and_not_where_it_is_little() -> None:
    long, short = ask(), ask(context=2048, batch=1)
    assert long.verdict.startswith("Helix helps here: helix kvp=") and "attention" in long.verdict
    assert short.choices[0].name == "tp tpa=8"
    assert short.verdict.startswith("Helix does not help here: tp tpa=8 is ") and "exchange" in short.verdict
    assert "a single GPU cannot split KV" in ask(gpus=1, batch=1).verdict
    # 8 x 2M tokens of KV that TP doubles: 240 GB a GPU.
    assert "without splitting KV (kvp=1) nothing fits" in ask(context=2 * M).verdict
    assert "no plain TP over 3 GPUs, 4 KV heads and 28 query heads cannot be split" in ask(gpus=3, batch=1).verdict
    assert ask(batch=1, modes=("tp",)).verdict == "Helix is not compared here: modes=tp leave out helix."
    assert ask(batch=1, modes=("helix",)).verdict == "Helix is not compared here: modes=helix leave out tp."


@pytest.mark.parametrize(
    "more, words",
    [
        ({"model": "deepseek-r1"}, r"no layout of 8 x NVIDIA H200 \(149 GB each\).*the weights alone take \S+ G"),
        ({"batch": 1000}, r"for 1000 sequences.*the closest, .*, lacks \S+ GB per GPU; batch=\d+ would fit$"),
        (
            {"model": "deepseek-r1", "gpus": 4},
            r"the weights alone .*; gpus=8 \(a whole NVLink domain\) would not do either",
        ),
        # 812 GB, of which 76 are QKV: 8 heads go to tpa=2 at most on 6 ranks, (812 - 76) / 6 + 76 / 2 = 161 GB.
        (
            {"model": "llama-3.1-405b", "gpus": 1, "context": 1024, "batch": 1},
            r"the weights alone take 811\.7 GB per GPU; gpus=8 would do",
        ),
        ({"gpus": 2, "batch": 10}, r"batch=4 would fit; gpus=5 would do"),
        ({"batch": None}, "set batch, or set ttl_ms"),
    ],
)
def test_what_cannot_be_planned(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ask(**more)


# ---- block-sparse attention beside dense


def test_sparse_attention_is_planned_as_it_would_run() -> None:
    ranking = ask(context=M // 8, batch=4, options=replace(BF16, sparse=Sparse()))
    for choice in ranking.choices:
        layout = choice.layout
        points = Points.of(layout.mode, 4, **{key: getattr(layout, key) for key in ("kvp", "tpa", "tpf", "ep")})
        options = replace(BF16, sparse=Sparse(), append_block=128)
        expected = predict(load_spec("qwen2.5-7b"), H200, points, M // 8, options).ttl_s[0]
        assert choice.ttl_s == pytest.approx(float(expected))
        assert ttl_s(ranking.query, choice, M // 8) == pytest.approx(predicted(choice, "qwen2.5-7b", M // 8))
        assert choice.append_block == 128, "a block is a page, and one rank's run of tokens"
    slow = replace(scaled(H200, link=1e-3), chunk_s=replace(H200.chunk_s, value=0.0))
    for choice, cut in (("local", True), ("global", False)):  # whose exchange chunks would cut
        options = replace(BF16, sparse=Sparse(choice=choice))
        found = ask("llama-3.1-8b", slow, context=M // 8, gpus=2, options=options)
        assert any(c.chunks > 1 for c in found.choices) == cut


def test_where_dense_attention_is_faster() -> None:
    """To the token; sooner where more sequences share the batch; nowhere where finding takes longer than all keys."""
    question = ask(gpus=1, batch=1, options=replace(BF16, sparse=Sparse(from_tokens=99))).query
    found = {batch: plan(replace(question, batch=batch, context=4096)).choices[0] for batch in (1, 8)}
    from_tokens = {batch: sparse_pays_from(question, choice) for batch, choice in found.items()}
    assert from_tokens[1] is not None and from_tokens[8] is not None and from_tokens[8] < from_tokens[1] / 2
    assert sparse_pays_from(question, replace(found[1], batch=8)) == from_tokens[8]

    def ahead(length: int) -> bool:
        (choice,) = plan(replace(question, context=length, options=replace(BF16, sparse=Sparse()))).choices
        return choice.ttl_s <= ttl_s(question, choice, length)

    assert ahead(from_tokens[1]) and not ahead(from_tokens[1] - 1)
    assert H200.finding_s is not None
    dear = replace(question, hardware=replace(H200, finding_s=replace(H200.finding_s, value=1.0)))
    assert sparse_pays_from(dear, found[1]) is None
    nowhere = "dense attention is faster below every length of the model's context at batch 1, "
    assert nowhere in compare_sparse(plan(dear))
    assert compare_sparse(plan(question)).startswith("Block-sparse attention pays here: ")
    short = plan(replace(question, context=12288))
    assert compare_sparse(short).startswith("Dense attention is faster here: ")
    assert f"With tp, dense attention is faster below {from_tokens[1]:,} tokens at batch 1, " in compare_sparse(short)
    assert f"{from_tokens[8]:,} tokens at batch 8." in compare_sparse(short)


# ---- records


def test_records_that_are_not_there_are_named() -> None:
    for command in ("check", "sparse"):
        with pytest.raises(SystemExit, match=r"error: .*nowhere\.jsonl cannot be read"):
            planner.main([command, "nowhere.jsonl"])
    with pytest.raises(SystemExit, match="chek is unknown; known: check, sparse"):
        planner.main(["chek"])


# ---- layout=auto


def auto(*overrides: str, prompts: tuple[PromptLine, ...] = (), world: int = 8, device: str | None = H200.name) -> str:
    config = compose_config("model=qwen2.5-7b", "layout=auto", *overrides)
    layout, reason = choose(config, load_spec("qwen2.5-7b"), prompts, world, device, PROGRAM.select(config).load)
    assert reason
    return str(layout)


def test_auto_takes_the_planner_s_first_choice() -> None:
    assert auto("bench=decode", "bench.points=[8x1048576,1x1024]") == str(ask().choices[0].layout)
    assert auto("bench=decode", "bench.points=[1x2048]") == str(ask(context=2048, batch=1).choices[0].layout)
    slow = auto("bench=decode", "comm.backend=nccl", "bench.points=[1x131072]")
    assert slow.startswith("tp "), "an exchange is 15 us"
    selecting = "attention=block_sparse", "attention.choice=global"
    split = auto("bench=decode", "comm.backend=nccl", "bench.points=[1x131072]", *selecting)
    assert split.startswith("helix "), "a global selection has all query heads of a KV head on one rank"


def test_auto_counts_sparse_attention() -> None:
    """Each rank reads a few blocks of so long a sequence: what TP keeps twice no longer decides."""
    sparse = "attention=block_sparse", "bench=decode"
    options = replace(BF16, sparse=Sparse(from_tokens=32768))
    assert auto(*sparse, f"bench.points=[1x{M}]") == str(ask(batch=1, options=options).choices[0].layout)
    assert auto(*sparse, f"attention.from_tokens={M + 1}", f"bench.points=[1x{M}]").startswith("helix ")
    config = compose_config("model=qwen2.5-7b", "layout=auto", *sparse, f"bench.points=[1x{M}]")
    assert ", block_sparse attention: " in choose(config, load_spec("qwen2.5-7b"), (), 8, H200.name, (1, M))[1]
    config.attention.from_tokens = M + 1
    assert "block_sparse" not in choose(config, load_spec("qwen2.5-7b"), (), 8, H200.name, (1, M))[1]


def test_auto_counts_the_longest_prompt_and_the_slots() -> None:
    ids, text = PromptLine("a", None, tuple(range(100)), {"max_tokens": 7}), PromptLine("b", "x" * 401, None, {})
    config = compose_config("decode.max_tokens=5", "decode.max_batch=2")
    assert workload(config, [ids]) == (1, 107) and workload(config, [ids, text, ids]) == (2, 107)
    assert workload(config, [text]) == (1, 101 + 5)  # four bytes a token
    odd = PromptLine("c", None, (1, 2), {"max_tokens": "many"})  # refused when it is served
    assert workload(config, [odd]) == (1, 7)


def test_auto_on_cpus_and_where_it_cannot_be() -> None:
    assert auto(world=6, device=None) == "helix kvp=3 tpa=2 -> tpf=6 ep=1"  # four KV heads: tpa 2, of 1, 2, 3, 6
    _, why = choose(compose_config("layout=auto"), load_spec("qwen2.5-7b"), (), 6, None, (1, 1))
    assert why.endswith("the largest tpa that divides 4 KV heads and 6 ranks; kvp is the rest")
    assert why.count("the rest") == 1
    for overrides, device, words in (
        ((), "NVIDIA A100", r"there is no hardware description of 'NVIDIA A100', only of .*NVIDIA H200 \(h200\)"),
        (("layout.kvp=2", "layout.ep=2"), H200.name, r"layout=auto chooses layout\.kvp and layout\.ep itself"),
        (("model.dtype=float32",), H200.name, r"does not predict model\.dtype=float32"),
    ):
        with pytest.raises(ValueError, match=words):
            auto(*overrides, device=device)
    assert (
        skip_reason(compose_config("model=qwen2.5-7b", "layout=auto")) is None
    )  # in a sweep its job says what is wrong
    assert ranks(compose_config("layout.kvp=3")) == 3 and ranks(compose_config("layout=auto", "comm.backend=gloo")) == 1


def test_a_calibrated_profile_comes_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_hardware(HARDWARE / "h200.yaml")
    for name, date in (("h200", None), ("mine", "2026-11-21"), ("older", "2026-11-20")):
        of = {"gpus": {None: 8, "2026-11-21": 4, "2026-11-20": 2}[date]}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(data | of | ({"calibrated": {"date": date}} if date else {})))
    monkeypatch.setattr("launch.inputs.hardware.HARDWARE", tmp_path)
    assert hardware_of("NVIDIA H200").gpus == 4


def test_the_gpu_here_is_the_drivers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `nvidia-smi`'s and torch's words, as descriptions have it."""
    monkeypatch.setattr("launch.inputs.hardware.DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_here() is None and pick_hardware(None, "auto") == H200
    for bus, model in (("0000:1b:00.0", "NVIDIA H100 80GB HBM3"), ("0000:2a:00.0", "NVIDIA H200")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 18\nGPU UUID: \t GPU-1\n")
    assert pick_hardware(None, "auto").name == "NVIDIA H100 80GB HBM3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_here() is None
