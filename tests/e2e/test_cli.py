"""The command line end to end: results, refusals, resume, records, several agents, and failures."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench import BENCHMARKS
from benchmarks.bench import main as bench_main
from benchmarks.jobs import COMMAND
from benchmarks.ranks.steps import UNTIMED
from benchmarks.runner import BenchContext
from benchmarks.runner import run as run_benchmark
from comm.loopback import LoopbackWorld
from helix.engine.request import Request
from helix.layout import HelixLayout
from launch import demo
from launch.demo import verdict
from launch.inputs.files import claim
from launch.job import spawn
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.command_line import ENTRY, LABORATORY, ROOT, Ended, Job, environment, lines_of, torchrun, write_lines
from tests.e2e.parity import build_engine
from tests.sequences import generated_ids

FAMILY = "qwen3"  # no tokenizer: jobs start in three seconds
KEYS = ["id", "prompt_tokens", "token_ids", "text", "finish_reason", "request"]

pytestmark = pytest.mark.timeout(400)


def run(tmp_path: Path, *overrides: str, command: list[str] = ENTRY) -> Ended:
    return Job(command, *overrides, log=tmp_path / "log").wait()


def decode(tmp_path: Path, *overrides: str, command: list[str] = ENTRY) -> tuple[Ended, list[dict[str, Any]]]:
    out = tmp_path / "out.jsonl"
    ended = run(tmp_path, f"decode.output={out}", *overrides, command=command)
    return ended, lines_of(out) if out.exists() else []


ASCII = """if True:
    import sys
    from launch.job import lifeline
    from launch.run import entry

    sys.stdout.reconfigure(encoding="ascii")
    lifeline.begin()
    sys.exit(entry(sys.argv[1:]))
"""


def test_text_in_text_out_and_refusals_among_it(tmp_path: Path) -> None:
    """One job of the demo model with all that a prompt line can hold; refused requests end it with code 3.

    Its terminal shows no umlauts.
    """
    code = 'def read_json(path):\n    """Read a JSON file'
    prompts = write_lines(
        tmp_path / "p.jsonl",
        {"id": "plain", "prompt": code},
        {"prompt": code, "stop": ["Parameters"], "max_tokens": 30},
        {"id": "empty", "prompt": ""},
        {"id": "outside", "prompt_ids": [1, 4096]},
        {"id": "sampled", "prompt": code, "temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 5},
        {"id": "kühl", "prompt": code, "temperature": -1},
        {"id": "long", "prompt": code, "max_tokens": 300},
        {"id": "longer", "prompt": code, "max_tokens": 40_000},
    )
    record = tmp_path / "record.json"
    ended, lines = decode(
        tmp_path, f"decode.prompts={prompts}", "layout.kvp=2", "decode.max_tokens=12", "kv.tokens=200",
        "speculation=ngram", f"record={record}", "model.config.rope_parameters.factor=4",
        command=[sys.executable, "-c", ASCII],
    )  # fmt: skip
    assert ended.code == 3, ended.output
    assert [line["id"] for line in lines] == ["plain", 1, "empty", "outside", "sampled", "kühl", "long", "longer"]
    by_id = {line["id"]: line for line in lines}
    reasons = {line["id"]: line["reason"] for line in lines if line["finish_reason"] == "error"}
    assert set(reasons) == {"empty", "outside", "kühl", "long", "longer"}
    assert "empty" in reasons["empty"] and "4096" in reasons["outside"] and "temperature=-1" in reasons["kühl"]
    assert "are 316, which exceed the KV cache's capacity (kv.tokens) of 200 tokens" in reasons["long"]
    assert "context of 32768" in reasons["longer"]
    for name in ("plain", 1, "sampled"):
        assert list(by_id[name]) == KEYS
        assert by_id[name]["prompt_tokens"] == 16
    assert by_id["plain"]["finish_reason"] == "length" and len(by_id["plain"]["token_ids"]) == 12
    assert by_id["plain"]["text"].startswith(" from a JSON file.")
    assert by_id[1]["finish_reason"] == "stop" and "Parameters" not in by_id[1]["text"]
    assert by_id[1]["text"].startswith(by_id["plain"]["text"][:20])
    assert by_id["plain"]["text"] in ended.output, "text is streamed to the terminal"
    assert "3 served, 5 refused" in ended.output and "[k\\xfchl] refused: " in ended.output

    found = json.loads(record.read_text())
    assert found["config"]["layout"]["kvp"] == 2 and found["config"]["decode"]["max_tokens"] == 12
    resolved = found["resolved"]["model"]
    assert resolved["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6, "factor": 4}
    assert resolved["hidden_size"] == 256 and list(found["resolved"]) == ["model"]
    assert ended.output.count("model.config.rope_parameters.factor=4 changes nothing") == 1
    assert found["layout"] == {"mode": "helix", "kvp": 2, "tpa": 1, "tpf": 2, "ep": 1, "dp": 1, "world_size": 2}
    assert {"torch", "transformers", "python", "triton"} <= set(found["versions"])
    assert {"imports_s", "preflight_s", "connect_s", "load_s", "decode_s"} <= set(found["phases"])
    assert 0 < found["ttl_p50_us"] <= found["ttl_p90_us"]
    assert found["speculation"]["mean_drafts"] > 0 and "mean gamma" in ended.output
    assert found["tokens_per_s_gpu"] > 0 and found["tokens_per_s_user"] > 0
    layout = HelixLayout.create("helix", 2)
    # Three sequences of 16 tokens and what was drawn; the fullest moment is between these two.
    full = [sum(layout.local_length(16 + 30, k, 16, s % 2) for s in range(3)) for k in range(2)]
    assert all(0 < tokens <= most for tokens, most in zip(found["kv_tokens_per_rank"], full, strict=True))
    per_token = 2 * 8 * 2 * 64 * 4  # K and V, layers, KV heads, head dim, fp32
    assert found["kv_bytes_per_rank"] == [n * per_token for n in found["kv_tokens_per_rank"]]


@pytest.fixture(scope="module")
def many(tmp_path_factory: Any) -> Path:
    lines = [{"id": f"r{i}", "prompt_ids": [i + 1, 2, 3], "max_tokens": 10 + 5 * i} for i in range(8)]
    return write_lines(tmp_path_factory.mktemp("prompts") / "many.jsonl", *lines)


def common(many: Path) -> list[str]:
    return [f"model.path={checkpoint(FAMILY)}", f"decode.prompts={many}", "decode.max_batch=2", "layout.kvp=2"]


HALTS = """if True:
    import itertools, sys, time
    from helix.engine.core import Engine
    from launch.run import entry

    tokens, record = itertools.count(), Engine._record
    def halts(*given):  # in the middle of its work, until somebody ends it
        if next(tokens) == 110:
            time.sleep(600)
        return record(*given)

    Engine._record = halts
    sys.exit(entry(sys.argv[1:]))
"""


def test_control_c_ends_the_job_in_a_line_and_what_was_done_is_kept_and_resumed(tmp_path: Path, many: Path) -> None:
    out = tmp_path / "out.jsonl"
    job = Job([sys.executable, "-c", HALTS], *common(many), f"decode.output={out}", log=tmp_path / "log")
    job.wait_for(out, "r1")
    with pytest.raises(BlockingIOError, match="another run is writing it"):
        claim(out)
    job.send(signal.SIGINT)
    ended = job.wait()
    assert ended.code == 130
    assert "interrupted: results of finished requests are in decode.output" in ended.output
    assert "Traceback" not in ended.output
    done = {line["id"] for line in lines_of(out)}
    assert {"r0", "r1"} <= done and len(done) < 8
    with out.open("a") as file:
        file.write('{"id": "r7", "prompt_')
    ended, resumed = decode(tmp_path, *common(many), "decode.resume=true")
    assert ended.code == 0 and f"{8} served" in ended.output
    engine = build_engine(
        checkpoint(FAMILY), HelixLayout.create(), LoopbackWorld(1).communicator(0, [0]), 16, max_batch=8
    )
    asked = lines_of(many)
    tokens = generated_ids(engine, (Request(line["id"], line["prompt_ids"], line["max_tokens"]) for line in asked))
    assert [(line["id"], tuple(line["token_ids"])) for line in resumed] == sorted(tokens.items())

    # Results that a run was killed before it could put in order are, without the model that made them.
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(reversed(lines)))
    ended, again = decode(tmp_path, *common(many), "decode.resume=true")
    assert ended.code == 0 and "already has the results of all 8 prompts" in ended.output
    assert "weight slices" not in ended.output and again == resumed


def test_a_full_disk_ends_every_rank_with_one_line(tmp_path: Path, many: Path) -> None:
    """Files of 900 bytes at most stand in for it."""
    out = tmp_path / "out.jsonl"
    given = [*common(many), f"decode.output={out}", "decode.stream=false"]
    job = Job(["env", "HELIX_LOG_LEVEL=ERROR", *ENTRY], *given, log=tmp_path / "log")  # the log is a file, too
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (900, 900))  # long before it starts its ranks
    ended = job.wait()
    done = out.read_bytes().count(b"\n")
    assert ended.code == 1 and 1 <= done < 8 and out.stat().st_size == 900, ended.output
    expected = f"error: decode.output={out} cannot be written: File too large; {done} of 8 results are complete"
    assert ended.output.count(expected) == 1, ended.output
    assert "Traceback" not in ended.output and "rank 1" not in ended.output, ended.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "out.jsonl"]


def test_a_rank_whose_memory_runs_out_ends_every_rank_with_one_line(tmp_path: Path, many: Path) -> None:
    program = """if True:
        import os, sys, torch, helix.setup.engine
        from launch.run import entry

        make = helix.setup.engine.KVCache
        def short(*given):
            if os.environ["RANK"] == "1":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")
            return make(*given)

        helix.setup.engine.KVCache = short
        sys.exit(entry(sys.argv[1:]))
    """
    ended = run(tmp_path, *common(many), "layout.kvp=2", command=[sys.executable, "-c", program])
    expected = "error: rank 1 ran out of host memory while allocating the KV cache (2,684,354,560 bytes requested, "
    assert ended.code == 1 and ended.output.count("error: ") == ended.output.count(expected) == 1, ended.output
    assert "lower kv.memory_fraction=0.9, decode.max_batch=" in ended.output, ended.output
    assert "Traceback" not in ended.output and " ERROR " not in ended.output, ended.output


def test_a_reader_who_leaves_ends_the_run_with_one_line(tmp_path: Path, many: Path) -> None:
    read, end = os.pipe()
    os.close(read)
    with open(end, "w") as closed:
        ended = subprocess.run(
            [*ENTRY, *common(many)], cwd=ROOT, env=environment(), stdout=closed, stderr=subprocess.PIPE, text=True
        )
    (error,) = (line for line in ended.stderr.splitlines() if " INFO " not in line)
    assert ended.returncode == 1 and error.startswith("error: stdout is a pipe"), ended.stderr


@pytest.mark.parametrize(
    "words, options, overrides",
    [
        ("3 ranks, but 2 were started", ["--max-restarts=2"], ["layout.kvp=3"]),  # in vain
        ("error: kv.tokens=1000000000000 needs", [], ["layout.kvp=2", "kv.tokens=1000000000000"]),  # weights are in
    ],
)
def test_an_error_is_the_last_line_of_torchrun(
    words: str, options: list[str], overrides: list[str], tmp_path: Path, many: Path
) -> None:
    """Which would have forty of its own; neither it nor a rank is left."""
    ended = run(tmp_path, *common(many), *overrides, command=["env", *torchrun(2, *options)])
    assert ended.code and ended.output.count(words) == 1 and words in ended.output.splitlines()[-1], ended.output
    assert ended.output.count("\n") <= 6, ended.output  # the last kind has five lines about the model


@pytest.mark.parametrize(
    "given, words",
    [
        # The cache, found once the weights are in, on all ranks alike, at the only point.
        (
            ["model.path=MODEL", "bench.points=[65536x300]", "kv.tokens=1000000000000"],
            ["error: kv.tokens=", "of the free memory holds"],
        ),
        # Half of 1.3 TB of weights on each rank, of which nothing is taken.
        (
            ["model=deepseek-r1", "model.load=random", "bench.points=[1x64]"],
            ["error: the weights of rank", "take 67", "GB in bfloat16 (helix kvp=2 tpa=1"],
        ),
    ],
    ids=["cache", "weights"],
)
def test_what_is_too_large_ends_every_rank_with_one_line(given: list[str], words: list[str], tmp_path: Path) -> None:
    overrides = [text.replace("MODEL", str(checkpoint(FAMILY))) for text in given]
    ended = run(tmp_path, "bench=decode", "layout.kvp=2", "bench.steps=1", *overrides, command=LABORATORY)
    assert ended.code == 1 and ended.output.count(words[0]) == 1, ended.output
    assert all(word in ended.output for word in words), ended.output
    assert "rank 0 failed" not in ended.output and "Traceback" not in ended.output, ended.output


def test_prompts_are_timed_where_they_are_served(tmp_path: Path) -> None:
    """One is beyond the model's context, the other has room for its drafts; each is written as it ends."""
    record, output = tmp_path / "record.json", tmp_path / "points.jsonl"
    points = "bench.points=[1x40000,2x64]"
    given = ["model=demo", "bench=prefill", points, "speculation=ngram", f"record={record}", f"bench.output={output}"]
    ended = run(tmp_path, *given, command=LABORATORY)
    assert ended.code == 0, ended.output
    long, short = json.loads(record.read_text())["points"]
    assert [json.loads(line) for line in output.read_text().splitlines()] == [long, short]
    assert "context of 32768" in long["failed"] and short["tokens_per_s"] == 2 * 64 / short["prefill_s"] < 1e5


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def agents(tmp_path: Path, ranks: int, *overrides: str, program: Sequence[str] = ()) -> list[Job]:
    """Two of them, each with so many ranks."""
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=test")
    return [Job([*program, *torchrun(ranks, *options)], *overrides, log=tmp_path / f"agent{i}") for i in range(2)]


def test_two_agents_give_the_same_tokens(tmp_path: Path) -> None:
    """In the layout that the ranks allow, with a draft model over them: the target itself, so that all is kept."""
    wanted = oracle(FAMILY, (7, 1, 17), 24)
    lines = [{"prompt_ids": c.prompt, "max_tokens": len(c.tokens)} for c in wanted]
    prompts, out = write_lines(tmp_path / "p.jsonl", *lines), tmp_path / "out.jsonl"
    jobs = agents(
        tmp_path, 1, f"model.path={checkpoint(FAMILY)}", f"decode.prompts={prompts}", f"decode.output={out}",
        "layout=auto", "model.dtype=float32", "speculation=model", "speculation.adaptive=false",
        f"speculation.model.path={checkpoint(FAMILY)}", f"record={tmp_path}/record.json",
    )  # fmt: skip
    ended = [job.wait() for job in jobs]
    assert [e.code for e in ended] == [0, 0], [e.output for e in ended]
    assert "layout=auto chose helix kvp=1 tpa=2" in " ".join(word for e in ended for word in e.output.split())
    assert [tuple(line["token_ids"]) for line in lines_of(out)] == [c.tokens for c in wanted]
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["speculation"]["acceptance_by_position"] == [1.0] * 4
    assert (found["layout"]["kvp"], found["layout"]["tpa"]) == (1, 2) and found["config"]["layout"]["mode"] == "auto"
    assert "6 KV heads" in found["layout_reason"]


def test_a_rank_killed_under_one_agent_ends_both(tmp_path: Path) -> None:
    lines = {"id": "short", "prompt_ids": [1, 2], "max_tokens": 4}, {"prompt_ids": [5], "max_tokens": 5000}
    prompts, out = write_lines(tmp_path / "p.jsonl", *lines), tmp_path / "out.jsonl"
    more = f"decode.output={out}", "model.config.max_position_embeddings=9000"
    jobs = agents(tmp_path, 1, *common(prompts), *more)
    jobs[0].wait_for(out, "short")
    ranks = {rank: pid for job in jobs for rank, pid in job.ranks().items()}
    os.kill(ranks[1], signal.SIGKILL)
    ended = [job.wait() for job in jobs]
    assert all(e.code == 1 for e in ended)
    assert any("rank 1" in e.output or "rank      : 1" in e.output for e in ended), [e.output for e in ended]


def test_random_weights_and_timed_steps_need_no_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "shape"
    directory.mkdir()
    (directory / "config.json").write_text((checkpoint(FAMILY) / "config.json").read_text())
    record = tmp_path / "record.json"
    ended = run(
        tmp_path, f"model.path={directory}", "model.load=random", "bench=decode", "bench.points=[3x400,1x510]",
        "bench.steps=5", "bench.gammas=[3,0,1]", "speculation=ngram", "speculation.gamma=3",
        "bench.acceptance=1", "layout.kvp=2", "attention=block_sparse", "attention.from_tokens=0",
        "attention.num_blocks=4", "attention.block=16", "attention.local_blocks=2", f"record={record}",
        'bench.variants=["attention.num_blocks=4","attention.num_blocks=2"]', command=LABORATORY,
    )  # fmt: skip
    assert ended.code == 0 and "mean gamma" in ended.output, ended.output
    assert "weights are random (model.load=random)" in ended.output.partition("\n")[0]
    points = json.loads(record.read_text())["points"]
    assert [(p["batch"], p["gamma"], "failed" in p) for p in points] == [
        (batch, gamma, batch == 1) for batch in (3, 1) for _ in range(2) for gamma in (3, 0, 1)
    ]  # fmt: skip
    assert points[6]["failed"].startswith("510 tokens and "), points[6]
    read = [max(found["blocks_read_per_rank"]) for found in points[:6]]
    assert [found["variant"][-1] for found in points] == [*"444222444222"]
    assert all(more - fewer == pytest.approx(1, abs=0.2) for more, fewer in zip(read[:3], read[3:], strict=True))
    for found in points[:3]:
        each = 1 + found["gamma"]
        assert found["decode_steps"] == 5 and found["decode_tokens"] == 5 * 3 * each
        assert found["tokens_per_step"] == each and len(found["weight_bytes_per_rank"]) == 2
        assert found["tokens_per_s_user"] == pytest.approx(each * 5 / found["decode_s"])
    assert points[0]["speculation"]["acceptance_by_position"] == [1.0] * 3 and points[1]["speculation"] is None
    layout = HelixLayout.create("helix", 2)
    end = 400 + (UNTIMED + 5) * (1 + 3)  # of a sequence whose drafts are all kept
    held = [sum(layout.local_length(end, k, 16, s % 2) for s in range(3)) for k in range(2)]
    assert points[0]["kv_tokens_per_rank"] == held


@pytest.mark.parametrize("family, drafter", [("glm-5-shared", "sparse"), ("qwen3.5-tied", "mtp")])
def test_drafts_of_selections_and_states_are_timed(tmp_path: Path, family: str, drafter: str) -> None:
    output = tmp_path / "rows.jsonl"
    ended = run(
        tmp_path, f"model.path={checkpoint(family)}", "model.load=random", "bench=decode", "bench.points=[2x128]",
        "bench.steps=2", "bench.gammas=[0,2]", f"speculation={drafter}", "speculation.gamma=2", "bench.acceptance=1",
        "layout.kvp=2", f"bench.output={output}", command=LABORATORY,
    )  # fmt: skip
    assert ended.code == 0, ended.output
    assert [json.loads(line)["tokens_per_step"] for line in output.read_text().splitlines()] == [1, 3]


def test_a_full_batch_with_drafts_is_served_until_none_waits(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    ended = run(
        tmp_path, f"model.path={checkpoint(FAMILY)}", "model.load=random", "bench=serve", "bench.traces=[full_batch]",
        "decode.max_batch=3", "attention.shared_prefix=none", "speculation=sparse", "speculation.gamma=2",
        "bench.acceptance=1", "layout.kvp=2", f"record={output}", command=LABORATORY,
    )  # fmt: skip
    assert ended.code == 0, ended.output
    (row,) = json.loads(output.read_text())["points"]
    assert (row["batch"], row["requests"]) == (3, 9) and row["seconds"] > 0 and row["tokens_per_s"] > 0


@pytest.fixture
def with_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of benchmarks that begin with their imports done."""

    def run_copy(command: Sequence[str]) -> int:
        assert tuple(command[:2]) == COMMAND
        ended = run(tmp_path, *command[2:], command=LABORATORY)
        print(ended.output, file=sys.stderr)
        return ended.code

    monkeypatch.setattr(spawn, "run", run_copy)


def test_benchmarks_run_without_a_gpu(
    tmp_path: Path, with_imports: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.jsonl"
    for what in ("kernels", "baselines"):
        monkeypatch.setattr(sys, "argv", ["benchmarks.bench", what, f"output={out}"])
        bench_main()
        assert "the figures mean nothing" in capsys.readouterr().out
    kernels, shape, ragged, *rest = lines_of(out)
    linear, appends = ([row for row in rest if row.get("kind") == kind] for kind in ("linear", "append"))
    baselines = rest[len(linear) + len(appends) :]
    assert (shape["kind"], ragged["kind"]) == ("shape", "ragged") and len(linear) > 2
    assert [row["rows"] for row in appends] == [1, 4, 8, 16] and all(row["apart_us"] > 0 for row in appends)
    assert kernels["name"] == "kernels" and kernels["us"] > 0
    assert [row["layout"].split()[0] for row in baselines] == ["tp", "medha", "helix"]
    assert all(row["ttl_p50_us"] > row["floor_us"] > 0 for row in baselines)


@pytest.mark.slow
def test_speculation_is_timed_without_a_gpu(with_imports: None) -> None:
    plain, drafted, *copies = run_benchmark(BENCHMARKS["speculate"], BenchContext(torch.device("cpu"), 1))
    assert (plain["gamma"], plain["gain"], plain["tokens_per_step"]) == (0, 1, 1) and drafted["gamma"] == 2
    assert drafted["gain"] > 0 and 1 <= drafted["tokens_per_step"] <= 3
    assert drafted["gain_at_rate"] == pytest.approx((1 + 0.8 + 0.64) * plain["ttl_p50_us"] / drafted["ttl_p50_us"])
    assert [row["drafting"] for row in copies] == ["none", "4"]
    assert all(row["as_plain"] == row["prompts"] for row in copies), "fp32: drafts change no token"
    assert copies[1]["tokens_per_step"] > 1.2 > copies[0]["tokens_per_step"] == 1


def test_the_prompts_that_make_run_shows_hold_a_needle() -> None:
    lines = lines_of(DEMO.parent / "prompts.jsonl")
    needle = next(line for line in lines if "The magic number" in line["prompt"][-60:])
    word, number, _ = needle["id"].split("-")
    assert f"# The magic number for {word} is {number}." in needle["prompt"]
    assert needle["prompt"].endswith(f"# The magic number for {word} is")
    answers = {f" {number}.": "was found", f" {number}5.": "was NOT found", "": "was NOT found"}
    for text, expected in answers.items():
        results = [json.dumps({"id": name, "text": text}) for name in ("read-json", needle["id"])]
        assert f"the number hidden in the first prompt {expected}: it is {number}" in verdict(results)
    assert verdict(results[:1]) == "", "other prompts hide nothing"


@pytest.mark.parametrize(
    "given, ranks",
    [([], 4), (["layout.kvp=3"], 3), (["layout=tp", "layout.tpa=2"], 2), (["layout=auto"], 1), (["seed=3"], 4)],
)
def test_the_ranks_of_make_run_are_those_of_its_arguments(
    given: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr("launch.job.spawn.launch", lambda count, *_: started.append(count) or 1)
    monkeypatch.setattr(sys, "argv", ["launch.demo", *given])
    with pytest.raises(SystemExit):
        demo.main()
    assert started == [ranks]
