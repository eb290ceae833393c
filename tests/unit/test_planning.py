"""`helix plan`: its keys are those of a run; what it says fits the terminal, runs, and names what would fit."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from helix.config import Config
from helix.planner.hardware import E4M3
from helix.planner.plan import NoLayoutFits, plan
from helix.planner.points import Points, Sparse
from helix.planner.step import memory_of
from launch.inputs import command_parser, plots
from launch.inputs.commands import SERVE
from launch.inputs.hardware import HARDWARE, load_hardware
from launch.inputs.keys import keys
from launch.inputs.planner_commands import PLAN, PlanConfig
from launch.inputs.planning import check_query, remedies
from launch.inputs.rankings import as_text
from launch.inputs.tables import command_line, table
from launch.plan import main
from tests.benchmark_config import answered, compose_config, preflight
from tests.e2e.checkpoints import checkpoint
from tests.figure_legibility import illegible

M = 1 << 20
H200 = load_hardware("h200")
# A question for each column and each kind of sentence.
QUESTIONS = (
    "qwen2.5-7b gpus=8 context=1M batch=8",
    "qwen3-30b-a3b gpus=4 context=128K ttl_ms=20",
    "deepseek-v2-lite gpus=4 context=128K speculation=ngram acceptance=0.8",
    "glm-5.2 gpus=8 context=1M kv.prefix_host_bytes=64e9 kv.prefix_dir=/nvme kv.prefix_disk_bytes=1e12",
    "glm-5.2 gpus=8 context=1M batch=8 kv.offload=host --kv-cache-dtype fp8",
    "gpt-oss-20b gpus=6 context=8K batch=2 comm.backend=nccl",
    "llama-3.1-8b gpus=4 context=128K batch=8 attention=block_sparse attention.num_blocks=16 "
    "speculation=ngram acceptance=.8",
    "qwen2.5-7b gpus=2 context=1M batch=3 attention=block_sparse kv.offload=host hits=0.8 "
    "kv.offload_prefetch=true guessed=0.7 "
    "kv.offload_gpu_bytes=6e9",
    "qwen3-30b-a3b gpus=8 context=128K batch=8 modes=tp,helix,dp --quantization fp8 --kv-cache-dtype fp8 ttl_ms=5",
    "llama-3.1-8b gpus=4 context=100 batch=1 serve.port=0",
)


@pytest.fixture(autouse=True)
def shipped(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped descriptions alone: one that was calibrated on this machine would come before them."""
    directory = tmp_path_factory.mktemp("hardware")
    for name in ("b200", "gb200", "h100", "h200"):
        (directory / f"{name}.yaml").symlink_to(HARDWARE / f"{name}.yaml")
    monkeypatch.setattr("launch.inputs.hardware.HARDWARE", directory)
    monkeypatch.setattr("launch.inputs.planning.device_here", lambda: None)


def shown_as(name: str) -> str:
    return (Path(__file__).parent / "shown" / f"{name}.txt").read_text()


# ---- the command


@pytest.mark.parametrize("question", QUESTIONS)
def test_commands_pass_the_runtime_s_preflight(question: str) -> None:
    ranking, checked = answered(question)
    q, config = ranking.query, checked.config
    assert ranking.choices
    for choice in ranking.choices[:2]:
        program, verb, directory, *settings = checked.command(choice)
        assert [program, verb, directory] == ["helix", "serve", "DIR"]
        line = command_parser.read([checked.model, *shlex.split(" ".join(settings))], SERVE)
        config = compose_config("model.load=random", "bench=decode", *line.overrides)
        run = preflight(config, q.gpus)
        assert run.layout == choice.layout and replace(run.spec, draft=None, aux_hidden_state_layers=()) == q.spec
        assert config.blocks.append == choice.append_block
        assert config.speculation.drafter == ("suffix" if choice.gamma else "none")
        free = "batch=" not in question and q.ttl_s is None
        assert config.decode.max_batch == ("auto" if free else choice.batch)
        for key in (
            "model.weights",
            "kv.dtype",
            "kv.offload",
            "kv.offload_prefetch",
            "comm.backend",
            "serve.port",
            "attention.num_blocks",
            "kv.prefix_host_bytes",
        ):
            group, name = key.split(".")
            assert getattr(getattr(config, group), name) == getattr(getattr(checked.config, group), name), key


@pytest.mark.parametrize(
    "model, token_bytes",
    [  # 28 layers x 2 x 4 heads x 128 x 2 bytes; (78 layers x 576 + 21 x 128) x 2 bytes, an eighth of the tokens
        ("qwen2.5-7b gpus=1 context=128K", 57344),
        ("glm-5.2 gpus=8 context=1M", 95232),
    ],
)
def test_how_many_prefixes_host_memory_holds(model: str, token_bytes: int) -> None:
    size = (131072 + 64) * token_bytes  # the next token has a page, too
    text = " ".join(as_text(*answered(f"{model} kv.prefix_host_bytes=64e9"), 80).split())
    assert f"takes {size / 1e9:.3g} GB per rank: host memory holds {64e9 / size:.3g}. One comes back" in text
    assert f"from host memory in {size / 51.3e6:.2f} ms." in text
    with pytest.raises(ValueError, match=r"mode dp does not support kv\.prefix_host_bytes=1000"):
        check_query([*f"model={model}".split(), "kv.prefix_host_bytes=1000", "modes=dp"])


@pytest.mark.parametrize(
    "model, weights",
    [
        ("kimi-k2.5", "experts in int4 (4.5 bits)"),
        ("deepseek-r1-nvfp4", "output projections, dense FFNs, shared experts, experts in NVFP4 (4.5 bits)"),
        ("gpt-oss-20b", "experts in MXFP4 (4.25 bits)"),
        ("qwen2.5-7b", None),
    ],
)
def test_a_plan_names_the_formats(model: str, weights: str | None) -> None:
    ranking, checked = answered(f"{model} gpus=8 context=128K")
    lines = [line for line in as_text(ranking, checked, 200).splitlines() if line.startswith("Weights: ")]
    assert lines == ([] if weights is None else [f"Weights: {weights}; the rest in bf16."])


def test_a_checkpoint_of_one_s_own(tmp_path: Path) -> None:
    (model := tmp_path / "my model").symlink_to(checkpoint("mixtral"))
    checked = check_query([f"model.path={model}", "gpus=4", "context=512", "batch=2"])
    for choice in plan(checked.query).choices[:2]:
        *words, directory = checked.command(choice)[:3]
        assert words == ["helix", "serve"] and directory == f"'{model}'"
        config = compose_config(f"model.path={model}", "bench=decode", *checked.runtime_overrides(choice))
        assert preflight(config, 4).layout == choice.layout and config.decode.max_batch == 2
    assert "model.dtype=bfloat16" in checked.runtime_overrides(choice)  # the checkpoint is fp32, which is not predicted
    with pytest.raises(ValueError, match=r"context=513 exceeds .*context of 512"):
        check_query([f"model.path={model}", "gpus=4", "context=513"])


def test_widths_and_modes_that_are_asked_for() -> None:
    ranking, _ = answered("qwen2.5-7b gpus=8 context=1M layout.kvp=4")
    assert {c.name for c in ranking.choices} == {"helix kvp=4 tpa=2", "medha kvp=4 tpa=2"}
    assert ranking.verdict == "Helix is not compared here: layout.kvp=4 is given."
    assert [c.name for c in answered("qwen2.5-7b gpus=8 context=1M -tp 8")[0].choices] == ["tp tpa=8"]
    with pytest.raises(ValueError, match=r"modes=tp layout.tpa=4 have no layout of 8 GPUs for this workload$"):
        answered("qwen2.5-7b gpus=8 context=1M -tp 4")
    off = answered("qwen2.5-7b gpus=8 context=1M hopb.chunks=none")[0]
    assert off.query.chunks == (1,) and {c.chunks for c in off.choices} == {1}


@pytest.mark.parametrize(
    "question, error",
    [
        ("qwen2.5-7b attention=block_sparse attention.choice=global hopb=on", "attention.choice=global communicates"),
        ("qwen2.5-7b attention=block_sparse attention.local_blocks=1 speculation=ngram acceptance=.8", "at least 2"),
        ("qwen2.5-7b speculation=sparse acceptance=.9 kv.page_size=8", "needs kv.page_size=1 or a power of two"),
        ("qwen2.5-7b kv.host_snapshots=4", "needs a model with recurrent states or with sliding windows"),
        ("deepseek-r1 speculation=sparse acceptance=.9 speculation.policy=quest", "does not support latents"),
        ("qwen3-30b-a3b modes=tp,dp hopb=on", "modes=tp,dp: mode dp does not support hopb=on"),
        ("qwen3-30b-a3b layout=dp kv.prefix_host_bytes=1e9", "mode dp does not support kv.prefix_host_bytes"),
        ("glm-5.2 modes=dp kv.offload=host", "dp needs at least .* kv.offload=none"),
        ("qwen2.5-7b modes=tp attention=block_sparse attention.choice=global", "modes=tp have no layout of 8 GPUs"),
    ],
)
def test_what_the_runtime_refuses_is_not_planned(question: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        answered(f"{question} gpus=8 context=128K batch=8")


def test_keys_of_a_run_mean_what_they_mean_there() -> None:
    ranking, _ = answered("llama-3.1-8b gpus=1 context=128K -q fp8 kv.dtype=k16v8 kv.memory_fraction=.5")
    options = ranking.query.options
    assert (options.stored("weights"), options.kv, options.memory_fraction) == (E4M3, "k16v8", 0.5)
    sparse = answered("qwen2.5-7b gpus=1 context=1M attention=quest attention.num_blocks=7")[0].query.options.sparse
    assert sparse == Sparse(7, 1, 32, 16)
    drafts = answered("qwen2.5-7b gpus=8 context=1M speculation=sparse speculation.sparsity=0.1 acceptance=0.9")
    assert drafts[0].query.sparsity == 0.1 and "speculation.sparsity=0.1" in drafts[1].runtime_overrides(
        drafts[0].choices[0]
    )
    late = answered("qwen2.5-7b gpus=1 context=1M attention=block_sparse attention.from_tokens=4M")
    assert late[0].query.options.sparse.from_tokens == 4 * M  # type: ignore[union-attr]
    assert not any("speculation" in word for word in answered("demo gpus=1 context=1K speculation=ngram acceptance=0")[
        1
    ].runtime_overrides(answered("demo gpus=1 context=1K")[0].choices[0]))  # fmt: skip
    offloaded, _ = answered(
        "qwen2.5-7b gpus=1 context=1M attention=block_sparse kv.offload=host hits=.8 kv.offload_host_bytes=9e10"
    )
    choice = offloaded.choices[0]
    at = replace(offloaded.query.options, append_block=choice.append_block)

    def largest(length: int) -> int:
        return int(memory_of(offloaded.query.spec, H200, Points.of("tp"), length, at).largest_batch[0])

    assert choice.largest_batch == 1 and choice.host_bytes == pytest.approx(60.1e9, rel=0.01)
    assert (
        largest(choice.longest_context) == 1
        and largest(choice.longest_context + 1) == 0
        and 1.4 * M < choice.longest_context < 1.6 * M
    )


@pytest.mark.parametrize("old", sorted(PlanConfig.RENAMED.keys() - Config.RENAMED))
def test_an_old_key_is_refused_with_its_new_name(old: str) -> None:
    new = PlanConfig.RENAMED[old].format("1")
    with pytest.raises(SystemExit, match=re.escape(f"error: {old}=1 is now {new}")):
        main(["demo", "gpus=1", "context=1K", f"{old}=1"])
    known = {"--json", *PLAN.settings.groups, *(key for key, _, _, _ in keys(PlanConfig))}
    assert {word.partition("=")[0] for word in new.split() if word != "1"} <= known


# ---- tables, sentences and files


def test_the_table_on_terminals_of_80_and_100_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("80", "100"):
        monkeypatch.setenv("COLUMNS", width)
        main(QUESTIONS[0].split())
        shown = capsys.readouterr().out
        assert shown.startswith(shown_as("plan")) and shown.endswith(shown_as("plan-command"))
        main(["qwen2.5-7b", "gpus=8", "context=1M", "ttl_ms=20"])
        assert (shown_as("plan-late") in capsys.readouterr().out) == (width == "80"), (
            "a wider terminal has more columns"
        )


@pytest.mark.parametrize("question", QUESTIONS)
def test_everything_is_shown_and_fits(question: str) -> None:
    ranking, checked = answered(question)
    for width in (80, 100):
        shown = as_text(ranking, checked, width)
        assert [line for line in shown.splitlines() if len(line) > width] == []
        for choice in ranking.choices:
            sizes = (choice.weight_bytes, choice.kv_bytes, choice.free_bytes)
            numbers = f"{choice.longest_context:,}", *(f"{size / 1e9:.1f}" for size in sizes)
            assert all(text in shown for text in (choice.name, choice.provenance, *numbers))
        words = " ".join(shown.split())
        assert ranking.reason in words and ranking.verdict in words
        assert " ".join(checked.command(ranking.choices[0])) in words.replace("\\ ", "")


def test_tables() -> None:
    columns = {"name": ["a", "b"], "unit\ns": ["1.0", "10.0"], "same\nGB": ["2", "2"], "word": ["x", "-"]}
    assert table(columns, 80).splitlines() == [
        "In every row: same 2 GB.", "", "name  unit  word", "         s", "────────────────",
        "a      1.0  x", "b     10.0  -",
    ]  # fmt: skip
    parts = table({"name": ["a", "b"], **{f"n{i}": ["1", "2"] for i in range(4)}}, 15).split("\n\n")
    assert [part.splitlines()[0].split() for part in parts] == [["name", "n0", "n1"], ["name", "n2", "n3"]], "evenly"
    assert table({"name": ["a"], "n": ["1"]}, 80).splitlines()[0] == "name  n", "one row is no column of equals"
    assert command_line(["helix", "a=1", "b=22"], 14) == "  helix a=1 \\\n    b=22"


def test_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    asked = "qwen2.5-7b gpus=4 context=128K ttl_ms=5.1 batch=8 attention=block_sparse attention.num_blocks=32"
    question = asked.split()
    main([*question, "--json", str(path), "--plot", str(picture)])
    out, found = " ".join(capsys.readouterr().out.split()), json.loads(path.read_text())
    for choice in found["choices"]:
        assert choice["command"].startswith("helix serve DIR attention=block_sparse attention.num_blocks=32 ")
        assert f" attention.from_tokens={choice['pays_from']} " in choice["command"]
        assert f" {1e3 * choice['ttl_s']:.2f} " in out and choice["meets_ttl"] == (choice["ttl_s"] <= 5.1e-3)
        assert f" {1e3 * choice['dense_ttl_s']:.2f} " in out and choice["dense_ttl_s"] > choice["ttl_s"]
    assert all(found[key] in out for key in ("reason", "verdict", "compared", "hardware"))
    assert 10_000 < picture.stat().st_size < 150_000
    main([*question, "--json", "-"])
    assert json.loads(capsys.readouterr().out) == found
    main(["demo", "gpus=1", "context=1K", "--cfg", "job", "--package", "kv"])
    assert "dtype: auto" in capsys.readouterr().out
    main(["--help"])
    assert {f"  {example}" for example in PLAN.examples} <= {*capsys.readouterr().out.splitlines()}


def test_pictures() -> None:
    fixed = answered("qwen3-30b-a3b gpus=8 context=128K batch=8 modes=tp,helix,dp ttl_ms=6")[0]
    bars = plots.times(fixed, "qwen3-30b-a3b")
    (axes,) = bars.axes
    assert axes.get_xlabel() == "time per token (ms)" and "ttl_ms=6" in _legend(bars)
    assert [label.get_text() for label in axes.get_yticklabels()] == [c.name for c in fixed.choices]
    longest = max(bar.get_x() + bar.get_width() for bar in axes.patches if bar.get_y() < 0.5)
    assert longest == pytest.approx(1e3 * fixed.choices[0].ttl_s), "phases add up"
    found = answered("qwen2.5-7b gpus=8 context=1M ttl_ms=20")[0]
    fronts = plots.fronts(found, "qwen2.5-7b")
    (axes,) = fronts.axes
    assert axes.get_xlabel().startswith("tokens/s of one user") and axes.get_ylabel() == "tokens/s of one GPU"
    for choice, (line, star) in zip(found.choices, zip(axes.lines[::2], axes.lines[1::2], strict=False), strict=False):
        at = int((abs(line.get_xdata() - choice.tokens_per_s_user)).argmin())  # type: ignore[operator, union-attr]
        assert line.get_ydata()[at] == pytest.approx(choice.tokens_per_s_gpu) == star.get_ydata()[0]  # type: ignore[index]
    few = plots.fronts(answered("qwen3-30b-a3b gpus=8 context=64K ttl_ms=40 modes=tp,helix,dp")[0], "qwen3-30b-a3b")
    assert {"dp dp=8 (and 3 equal)", "tp tpa=8 (and 3 equal)"} <= {*_legend(few)}
    for figure in (bars, fronts, few):
        assert not illegible(figure)
        plots.plt.close(figure)


def _legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# ---- what would fit


def test_what_would_fit_fits() -> None:
    checked = check_query(["model=qwen3-30b-a3b", "gpus=1", "context=128K", "batch=8"])
    found = {" ".join(change): ranking for change, ranking in remedies(checked)}
    least = list(found)
    assert least == [
        "kv.dtype=fp8", "model.weights=fp8", "gpus=2", "kv.offload=host attention=block_sparse", "batch=6",
        "context=98K",
    ]  # fmt: skip
    for change, ranking in found.items():
        same, _ = answered(f"qwen3-30b-a3b gpus=1 context=128K batch=8 {change}")
        assert ranking.choices == same.choices
    for more in ("batch=7", "context=99K"):
        with pytest.raises(NoLayoutFits):
            answered(f"qwen3-30b-a3b gpus=1 context=128K batch=8 {more}")
    both = check_query(["model=llama-3.1-70b", "gpus=2", "context=128K", "batch=3", "hardware=h100"])
    assert remedies(both)[0][0] == ["kv.dtype=fp8", "model.weights=fp8"], "neither alone"
    large = check_query(["model=llama-3.1-405b", "gpus=1", "context=1M", "hardware=h200"])
    assert [change for change, _ in remedies(large)] == [["kv.dtype=fp8", "model.weights=fp8", "gpus=8"]]


def test_where_nothing_fits_it_is_said_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as refused:
        main(["qwen2.5-7b", "gpus=1", "context=1M", "batch=8"])
    message = str(refused.value)
    assert max(map(len, message.splitlines())) <= 80 and f"{message}\n".endswith(shown_as("plan-fit"))
    assert " ".join(message.split()).startswith("error: no layout of 1 x NVIDIA H200 (149 GB each) has memory for 8 ")
    monkeypatch.delenv("COLUMNS")
    with pytest.raises(SystemExit, match="FP8, more GPUs, host memory or less work would not help either"):
        main(["deepseek-r1", "gpus=8", "context=1M", "hardware=h100"])
