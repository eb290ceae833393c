"""Benchmarks: what they compute before they measure, jobs and rows, queues of jobs, clients of a server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import jobs, queue
from benchmarks.bench import BENCHMARKS, main, parse_context
from benchmarks.kernels import moe
from benchmarks.models import hopb, layer_drafts
from benchmarks.models import pareto as timed
from benchmarks.models.http import HTTPClient, HTTPTiming, row, serving
from benchmarks.models.speculate import GAMMAS, PARTS, REST, expected_tokens, split
from benchmarks.models.steps import time_job
from benchmarks.models.workloads import WORKLOADS, Items, fitting_layers, floor_s, layouts
from benchmarks.program import PROGRAM
from benchmarks.quality import agent_turns
from benchmarks.quality.copy_prompts import GIVEN, LINES, copy_prompts
from benchmarks.queue import Queue, QueuedJob, read
from benchmarks.runner import BenchContext, Benchmark, Part, record, run
from benchmarks.schema import bench_points, check
from helix.devices import ranks as ranks_of
from helix.setup.parts import make_layout
from kernels.scaled import as_tensor
from launch.inputs.compose import ROOT
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec, spec_of
from launch.job import spawn
from launch.job.rank import prepare
from tests.benchmark_config import compose_config
from tests.serving.api_server import api_server


@pytest.mark.parametrize(
    "model, batch, length, milliseconds",
    [  # the floors of a whole step on eight H200 that are published beside vLLM's figures, within their rounding
        ("llama-3.1-8b", 1, 131072, 0.86),
        ("llama-3.1-8b", 8, 131072, 4.06),
        ("llama-3.1-8b", 1, 1 << 20, 4.06),
        ("qwen2.5-7b", 1, 131072, 0.58),
        ("qwen2.5-7b", 8, 131072, 1.98),
        # Written out: 15.7e9 numbers, of which 210e6 only in the embedding; at batch 1, 58 of 64 experts stay unread.
        ("deepseek-v2-lite", 1, 0, 2 * (15.706e9 - 0.210e9 - 26 * 58 * 3 * 2048 * 1408) / 8 / 4.69e9),
        ("deepseek-v2-lite", 1, 1 << 20, (2 * 2.450e9 + 27 * 1152 * (1 << 20)) / 8 / 4.69e9),
    ],
)
def test_floors(model: str, batch: int, length: int, milliseconds: float) -> None:
    assert 1e3 * floor_s(spec_of(model), batch, length, 8) == pytest.approx(milliseconds, rel=0.01)


def test_the_layers_that_fit() -> None:
    """DeepSeek-R1: 671e9 numbers less 14e9 of the layer for more tokens; 11.5e9 of a layer with experts."""
    spec, memory = spec_of("deepseek-r1"), 141 << 30
    assert fitting_layers(spec, 1000, memory) == len(spec.layers) == 61
    assert fitting_layers(spec, 8, memory) == 3 + int((0.8 * 8 * memory - 2 * 1.85e9 - 3 * 2 * 0.6e9) / (2 * 11.5e9))
    assert fitting_layers(spec_of("llama-3.1-8b"), 1, memory) == 32
    assert fitting_layers(spec_of("llama-3.1-70b"), 1, memory) < 80


@pytest.mark.parametrize(
    "gpus, ranks, processes, emulated", [(0, 8, 8, 0), (4, 4, 4, 0), (2, 8, 2, 1), (1, 2, 1, 1), (4, 8, 2, 1)]
)
def test_ranks_beyond_the_gpus_are_emulated(
    gpus: int, ranks: int, processes: int, emulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(spawn, "run", lambda overrides: started.append(overrides) or 1)
    with pytest.raises(jobs.JobError, match=r"^exit code 1$"):
        jobs.measure(ranks, wanted := ["bench=comm", f"layout.kvp={ranks}"])
    [overrides] = started
    assert overrides[:-1] == [*jobs.COMMAND, *["comm.backend=emulated"] * emulated, *wanted]
    assert overrides[-1].startswith("record=")
    config = compose_config(*overrides[2:-1])
    assert ranks_of(config) == processes
    launched: list[int] = []
    monkeypatch.setattr(spawn, "launch", lambda count, *_: launched.append(count) or 1)
    assert prepare(config, PROGRAM.select(config), None, [])() == 1
    assert launched == [processes]


def test_a_failed_job_is_a_result_and_an_interrupted_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    work, layout = WORKLOADS[0], layouts(spec_of(WORKLOADS[0].model), 2, baselines=False)[0]
    monkeypatch.setattr(spawn, "run", lambda overrides: os.write(2, b"error: no room\n") and 1)
    assert [row["failed"] for row in time_job([work, work], layout, [])] == ["no room"] * 2
    monkeypatch.setattr(spawn, "run", lambda overrides: spawn.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):  # or the next job would start
        time_job([work], layout, [])


@pytest.mark.parametrize(
    "what, argument, gpus, words",
    [
        ("step", "models=qwen2.5-7B", 8, r"qwen2.5-7B is unknown; known: qwen2.5-7b, .*\(did you mean qwen2.5-7b\?\)"),
        ("hopb", "models=gpt-oss-20b,gpt", 8, "gpt is unknown; known: deepseek-r1, "),
        ("kernels", "models=qwen2.5-7b", 8, "models is unknown; known: output"),
        ("kernels", "ranks=8", 2, "ranks is unknown; known: output"),
        ("step", "models=qwen2.5-7b", 0, "without a GPU only the demo model runs"),
        ("step", "--models", 8, "did you mean models=VALUE"),
        ("step", "ranks=8", 8, "ranks=8 must exceed the 8 GPUs here"),
        ("step", "ranks=two", 8, "ranks=two must be an integer of at most 64 bits"),
    ],
)
def test_a_wrong_argument_of_a_benchmark(
    what: str, argument: str, gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=words):
        parse_context(what, [argument], gpus)


def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["benchmarks.bench", *arguments])
    main()
    return capsys.readouterr().out


def test_every_benchmark_is_listed_and_teaches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = output(monkeypatch, capsys)
    for what, benchmark in BENCHMARKS.items():
        assert f"{what:<15} {benchmark.about}" in listed
        taught = output(monkeypatch, capsys, what, "--help")
        assert f"helix bench {what}" in taught and "output" in taught
        assert ("ranks " in taught, "models:" in taught) == (benchmark.emulated, bool(benchmark.models))
    monkeypatch.setattr(sys, "argv", ["benchmarks.bench", "kernel"])
    with pytest.raises(SystemExit, match=r"^error: kernel is unknown; known: .*\(did you mean kernels\?\)"):
        main()


def test_rows_are_tabulated_and_kept_whatever_becomes_of_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(ctx: BenchContext, count: int) -> Iterator[dict[str, object]]:
        for i in range(count):
            yield {"bare": i, "us": 12.345, "bar_us": None if i else 6.1725}
        if count == 3:
            raise jobs.JobError("no room")

    device, out = torch.device("cpu"), tmp_path / "rows.jsonl"
    part = Part(lambda ctx: [(1,), (2,)], measure, "bare us bar_us us/bar_us")
    summed = Benchmark("", "", (part,), summary=lambda rows: {"rows": len(rows)})
    record("x", run(summed, BenchContext(device, 2)), BenchContext(device, 2), out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("bare") for row in rows] == [0, 0, 1, None] and rows[-1]["rows"] == 3
    assert all(row["name"] == "x" and "commit" in row for row in rows)
    shown = capsys.readouterr().out
    assert all(f"┃ {head} " in shown for head in ("bare", "target us", "us/target us")), shown
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    assert [line for line in table if line] == [["0", "12.3", "6.17", "2.00"]] * 2 + [["1", "12.3", "-", "-"]]

    failing = Benchmark("", "", (Part(lambda ctx: [(3,)], measure, "us"),))
    with pytest.raises(jobs.JobError):
        record("x", run(failing, BenchContext(device, 2)), BenchContext(device, 2), out)
    assert len(out.read_text().splitlines()) == 7 and "appended 3 lines" in capsys.readouterr().out


def test_models_are_cut_to_the_layers_that_fit_beside_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30), raising=False
    )
    # Of 68.7 GB, embedding and head take 1.05; a layer 0.4 of weights, and 4.3 of keys and values of 64 x 128K.
    for length, layers in ((128 << 10, hopb.MAX_LAYERS), (256 << 10, int((68.7 - 1.05) / (0.4 + 8.6)))):
        fits = ["model.weights=fp8", f"model.config.num_hidden_layers={layers}"]
        assert hopb.cut("llama-3.1-405b", 8, [(64, length), (8, 8192)]) == fits
    assert hopb.cut("qwen2.5-3b", 2, [(1, 8192)]) == [f"model.config.num_hidden_layers={hopb.MAX_LAYERS}"]


def test_packed_experts_of_a_gpu_have_whole_blocks() -> None:
    """Those of gpt-oss-120b on eight ranks: 384 of 2,880 columns, since 360 are no whole blocks of 32."""
    ctx, found = SimpleNamespace(gpu=True, models=None, device=torch.device("cpu")), set()
    for case in (*moe.few_bits_cases(ctx), *moe.packed_cases(ctx), *moe.verified_cases(ctx)):
        model, (tpf, _), _, stored = case
        found.add((model.hidden, moe.columns_of(model, tpf, stored), stored))
    assert (2880, 384, "mxfp4") in found and (2880, 360, "bf16") in found
    for hidden, columns, stored in found:
        for rows, width in ((2, hidden), (3, columns)):
            weight = moe.random_weight(stored, 1, rows, width, ctx)
            assert as_tensor(weight, torch.float32).shape == (1, rows, width)


def test_rows_come_while_a_job_measures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And one that fails leaves those that it had; one whose rows nobody wants any more ends."""
    job = tmp_path / "job.py"
    job.write_text("import sys\nprint('a table')\nprint('{\"a\": 1}')\nsys.exit('error: no room')\n")
    rows = jobs.rows([], [str(job)])
    assert next(rows) == {"a": 1}
    with pytest.raises(jobs.JobError, match=r"^no room$"):
        next(rows)
    assert capfd.readouterr().out == "a table\n"
    job.write_text("import sys, time\nprint(sys.argv[1])\ntime.sleep(600)\n")
    rows = jobs.rows(['{"b": 2}'], [str(job)])
    assert next(rows) == {"b": 2}
    rows.close()  # it does not wait for the job


SLOW = """
import sys, time
file = sys.argv[-1].partition("=")[2]
with open(file, "a") as out:
    for part in ('{"a": 1}\\n{"a"', ': 2}\\n', '{"a": 3'):
        out.write(part)
        out.flush()
        time.sleep(0.5)
sys.exit("error: no room")
"""


def test_points_come_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lines alone; what a job that fails has not ended is left out."""
    (job := tmp_path / "job.py").write_text(SLOW)
    monkeypatch.setattr(jobs, "COMMAND", (str(job),))
    points = jobs.points(2, ["bench=decode"])
    assert [next(points), next(points)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(jobs.JobError, match=r"^no room$"):
        next(points)


# Of prompts alone.
ELSEWHERE = {"_dequantize_kernel", "_dequantize_pages_kernel", "_inputs_kernel", "_systems_kernel", "_chunks_kernel"}


def test_every_kernel_of_a_step_is_in_one_part() -> None:
    sources = [file.read_text() for file in (ROOT / "kernels").rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.M)}
    kernels -= {name for name in kernels if "prefill" in name} | ELSEWHERE
    assert len(kernels) > 30
    for name in kernels:
        assert len([part for part, names in PARTS.items() if re.search(names, name)]) == 1, name


def test_parts_are_the_kernels_sums() -> None:
    found = split(
        {
            "_flash_decode_kernel": 5.0,
            "_merge_splits_kernel": 1.0,
            "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT": 3.0,
            "void cublasLt::splitKreduce_kernel<32, 16, int, float>": 0.5,
            "_replay_kernel": 0.25,
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": 2.0,
            "_commit_kernel": 0.125,
            "void at::native::vectorized_elementwise_kernel<2, at::native::(anonymous namespace)::where_": 1.5,
        }
    )
    assert found == {
        "draft": 0.25, "attention": 6.0, "exchange": 2.0, "projections": 3.5, "all-reduce": 0.0, "acceptance": 0.125,
        REST: 1.5,
    }  # fmt: skip


def test_edits_begin_a_copy_in_which_one_name_is_another(tmp_path: Path) -> None:
    lines = ["def f(width: int, depth: int) -> int:", "    return width * depth + width", *["# width"] * LINES]
    (tmp_path / "long.py").write_text("\n".join(lines))
    (tmp_path / "short.py").write_text("\n".join(lines[: LINES - 1]))
    (prompt,) = copy_prompts(7, tmp_path)
    assert prompt["id"] == "long.py" and prompt["max_tokens"] == 7
    before, _, after = str(prompt["prompt"]).partition("\n\n\n# The same file with width renamed to new_width.\n")
    assert before == "\n".join(lines[:LINES])
    assert after == "\n".join(lines[:GIVEN]).replace("width", "new_width")


@pytest.mark.parametrize("model", timed.MODELS)
def test_points_are_of_the_front_and_fit(model: str) -> None:
    hardware, spec = load_hardware("h100"), load_spec(model)
    found = timed.pareto_layouts(model, hardware)
    works = [work for same in found.values() for work in same]
    assert {work.length for work in works} == {*timed.LENGTHS} and len(works) <= 16 and len(found) <= 9
    modes = {layout.mode for layout in found}  # DP attention repeats its weights: Llama-405B's leave no room
    assert modes == ({*timed.TIMED} if model == "deepseek-r1" else {"helix", "tp"})
    for layout, same in found.items():
        assert layout.world_size in timed.RANKS
        layout.check_heads(spec.attention.q_heads, spec.attention.kv_heads)
        assert len({(work.batch, work.length) for work in same}) == len(same)


LISTS = sorted((ROOT / "benchmarks" / "lists").glob("*.txt"))


def test_jobs_have_gpus_of_their_own_in_the_order_of_the_list(tmp_path: Path) -> None:
    note = "echo $CUDA_VISIBLE_DEVICES > $ROWS/"
    jobs = [
        QueuedJob("a", 1, 90, f"{note}a"),
        QueuedJob("b", 1, 90, f"{note}b; until [ -e $ROWS/a ]; do sleep 0.02; done"),
        QueuedJob("both", 2, 90, f"{note}both"),
    ]
    jobs.append(QueuedJob("last", 1, 90, f"{note}last; exit 3"))
    output = [line.split("s  ")[1] for line in Queue(jobs, 2, tmp_path).run(120)]
    assert {name: (tmp_path / "rows" / name).read_text().strip() for name in ("a", "b", "both", "last")} == {
        "a": "0", "b": "1", "both": "0,1", "last": "0",
    }  # fmt: skip
    starts = [line.split()[0] for line in output if " on " in line]
    assert starts == ["a", "b", "both", "last"]
    assert output.index("both on 0, 1") > next(i for i, line in enumerate(output) if line.startswith("b: exit code 0"))
    assert output[-1].startswith("last: exit code 3")
    ledger = [json.loads(line) for line in (tmp_path / "rows" / "ledger.jsonl").read_text().splitlines()]
    assert sorted((row["job"], row["gpus"], row["end"]) for row in ledger) == [
        ("a", 1, "exit code 0"), ("b", 1, "exit code 0"), ("both", 2, "exit code 0"), ("last", 1, "exit code 3")
    ]  # fmt: skip


def test_a_job_of_all_gpus_starts_early_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "WAITS", ("START_AFTER",))
    began = "date +%s.%N > $ROWS/new; mv $ROWS/new $ROWS/began"
    waits = f"{began}; until [ -e $START_AFTER ]; do sleep 0.02; done; date +%s.%N > $ROWS/went"
    first = "until [ -e $ROWS/began ]; do sleep 0.02; done; date +%s.%N > $ROWS/ended"
    jobs = [QueuedJob("first", 2, 90, first), QueuedJob("second", 2, 90, waits)]
    assert [*Queue(jobs, 2, tmp_path).run(120)][-1].split("  ")[-1].startswith("second: exit code 0")
    began, ended, went = (float((tmp_path / "rows" / name).read_text()) for name in ("began", "ended", "went"))
    assert began < ended < went


def test_late_jobs_are_ended_and_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on with each look alone."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic, clock.sleep = lambda: clock.now, lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(queue, "time", clock)
    jobs = [
        QueuedJob("late", 1, 0.3, "sleep 600"), QueuedJob("cut", 1, 60, "sleep 600"), QueuedJob("never", 1, 60, "true")
    ]  # fmt: skip
    output = [*Queue(jobs, 1, tmp_path).run(1.5)]
    assert any("late: ended after its 0 s" in line for line in output)
    assert "cut: time is up" in output[-2] and output[-1] == "not begun: never"
    ledger = [json.loads(line) for line in (tmp_path / "rows" / "ledger.jsonl").read_text().splitlines()]
    assert [(row["job"], row["end"]) for row in ledger] == [("late", "ended after its 0 s"), ("cut", "time is up")]
    with pytest.raises(ValueError, match="wide takes 2 GPUs, and there are 1"):
        Queue([QueuedJob("wide", 2, 1, "true")], 1, tmp_path)


def test_lines() -> None:
    assert read("# no job\n\nname 2  3.5   echo a | cat\n") == [QueuedJob("name", 2, 3.5, "echo a | cat")]
    with pytest.raises(ValueError, match="line 1, 'name two 3 x': a job is NAME GPUS SECONDS COMMAND"):
        read("name two 3 x")


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_lists(path: Path) -> None:
    """Each command of a list is one that there is, with settings that go together."""
    jobs = read(path.read_text(encoding="utf-8"))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = [word for word in shlex.split(job.command) if not re.fullmatch(r"[A-Z0-9_]+=.*", word)]
        if "benchmarks.layout_steps" in words:
            own = {key: text for key, _, text in (word.partition("=") for word in words[4:])}
            points = own.pop("points").split(",")
            own.pop("keep", None)
            settings = [f"{key}={text}" for key, text in own.items()]
            config = compose_config(
                "bench=decode", f"bench.points=[{','.join(points)}]", "model.load=random", *settings
            )
            check(config)
            Items.of(settings)
            assert bench_points(config.bench) and make_layout(config.layout).world_size >= job.gpus
        elif words[:2] == ["helix", "bench"]:
            assert words[2] in BENCHMARKS
            parse_context(words[2], [word for word in words[3:] if not word.startswith("ranks=")], job.gpus)


def seen(sent: float, came: list[float], new: int) -> HTTPTiming:
    usage = {"completion_tokens": new, "prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 5}}
    return HTTPTiming(sent, came, usage)


def test_figures_of_a_row() -> None:
    """Two streams; the second one's last piece has two tokens, so that its gaps are not its times of a token."""
    found = row([seen(0.0, [0.1, 0.2, 0.3], 3), seen(1.0, [1.3, 1.6], 3)], 2.0, 0.05)
    wanted = {
        "mean_ttft_ms": 200, "p50_ttft_ms": 200, "mean_itl_ms": 500 / 3, "p50_itl_ms": 100, "p90_itl_ms": 260,
        "mean_tpot_ms": 125, "p99_tpot_ms": 149.5, "requests": 2, "output_throughput": 3, "hit_rate": 0.5,
        "step_ms": 50, "over_step": 2.5,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert not any("itl" in name for name in row([seen(0.0, [0.1], 4)], 2.0))


def test_a_client_notes_each_piece(tmp_path: Path) -> None:
    async def check() -> None:
        async with api_server(tmp_path) as made, asyncio.timeout(60):
            client = HTTPClient(made.url, 4096)
            noted = await client.stream(client.tokens(7), 5)
            assert noted.usage["completion_tokens"] == 5 and noted.usage["prompt_tokens"] == 7
            assert (
                1 <= len(noted.chunk_times) <= 5
                and noted.sent < noted.chunk_times[0]
                and noted.chunk_times == sorted(noted.chunk_times)
            )
            with pytest.raises(jobs.JobError, match=r"400 Bad Request.*context_length_exceeded"):
                await client.stream(client.tokens(5000), 5)

    asyncio.run(check())


def test_a_server_that_does_not_start_is_no_wait() -> None:
    with pytest.raises(jobs.JobError, match="did not start"), serving(["serve.port=70000"]):
        pass


def test_gains_of_planted_steps() -> None:
    """Two drafts kept at 0.5 give 1.75 tokens."""
    assert [expected_tokens(n, 0.5) for n in (0, 1, 2)] == [1.0, 1.5, 1.75]
    assert expected_tokens(max(GAMMAS), 1.0) == 16 and expected_tokens(7, 0.0) == 1
    timed = [{"batch": 1, "length": 9, "gamma": n, "ttl_p50_us": us} for n, us in ((0, 1000.0), (3, 1250.0), (6, 2e3))]
    found = [layer_drafts.gains("glm-4.6", row, timed) for row in timed]
    assert found[1] == {"step_over_plain": 1.25, "gain_published": 2.99 / 1.25}
    assert found[0]["gain_published"] is found[2]["gain_published"] is None
    assert layer_drafts.gains("glm-4.6", {"batch": 1, "length": 9, "failed": "no room"}, timed) == {}


def test_turns_are_what_was_said_before_each_answer(tmp_path: Path) -> None:
    output = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"messages": [*output, {"role": "assistant", "content": "d"}]}) + "\n")
    assert agent_turns.turns(trace) == [(output[:1], "b"), (output, "d")]
    trace.write_text(trace.read_text() + json.dumps({"messages": output}) + "\n")
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2: the last message must be an answer"):
        agent_turns.turns(trace)
