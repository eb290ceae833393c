"""The papers' items: each has a command that works, and the page and the terminal show the same of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.bench import BENCHMARKS
from benchmarks.papers import count
from benchmarks.papers.__main__ import PAGE, PAPERS, main, with_items
from benchmarks.papers.items import NOT_RECORDED, Item, lines_of, span
from benchmarks.papers.verification_figures import CAPTIONS, drawable
from benchmarks.records import sparse_criteria, style
from benchmarks.records.rows import results
from benchmarks.records.tables import TABLES
from launch import cli
from launch.inputs.compose import ROOT
from tests.figure_legibility import illegible

HERE = ("done", "partly", "out of reach", "not done", "simulated", "not in the paper")


def test_the_page_has_the_items_of_the_records() -> None:
    assert with_items(PAGE.read_text(encoding="utf-8")) == PAGE.read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("name", PAPERS)
def test_every_item_says_what_is_here_and_names_a_command(name: str) -> None:
    items, tables = PAPERS[name].items(), PAPERS[name].tabled()
    assert len({item.what for item in items}) == len(items) > 20
    for item in items:
        assert item.here.startswith(HERE) and item.ours and "|" not in "".join(item), item
    for command in [item.command for item in items] + [table.command for table in tables.values()]:
        words = command.split()
        if words[0] == "pytest":
            assert (ROOT / words[1]).is_file(), command
        elif words[0] == "python":
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), command
        else:
            assert words[0] == "helix" and words[1] in cli.COMMANDS | cli.LABORATORY, command
        known = {"bench": [*BENCHMARKS], "tables": [*TABLES], "papers": [*PAPERS]}.get(words[1], [])
        assert not known or len(words) == 2 or words[2] in known, command


def test_a_paper_is_printed_with_its_tables_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(style.plt, "close", figures.append)
    main(["verification", f"figures={tmp_path}"])
    monkeypatch.undo()
    said = capsys.readouterr().out
    assert "| Figure 2, F2: divergence over alpha |" in said
    for title, table in PAPERS["verification"].tabled().items():
        assert f"{title}: `{table.command}`" in said
    plotted = drawable(PAPERS["verification"].records())
    assert {png.stem for png in tmp_path.iterdir()} == {f"verify-{name}" for name in plotted}
    assert {*plotted} == {*CAPTIONS}
    for figure in figures:
        assert not illegible(figure)
        assert any("better" in f"{panel.get_xlabel()} {panel.get_ylabel()}" for panel in figure.axes)
        style.plt.close(figure)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["vega"], "vega is unknown; known: helix, .* did you mean vegas"),
        (["figures=here"], "figures=here needs a paper"),
    ],
)
def test_a_wrong_name_is_answered_with_what_is_known(arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words.replace(" did", r" \(did")):
        main(arguments)


def test_the_count_is_no_kinder_than_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """167 items, 109 as described, 45 partly, 13 not; a verdict is better today only by a command that shows it."""
    total, items = count.counted()
    assert [*count.totals()["was"].values()] == [109, 45, 13] and total == 167
    assert len({item.name for item in items}) == len(items) and {item.paper for item in items} == {*PAPERS}
    for item in items:
        better = count.VERDICTS.index(item.now) < count.VERDICTS.index(item.was)
        assert better == bool(item.by) and item.now in count.VERDICTS, item
        assert item.now == "described" or item.why != "-", item
        if better:
            words = item.by.split()
            assert words[0] == "helix" and words[2] in [*BENCHMARKS, *PAPERS], item
    main(["--count"])
    assert capsys.readouterr().out.splitlines() == count.lines()


def test_cells_of_what_is_not_recorded() -> None:
    assert span([], ".1f") == NOT_RECORDED and span([1, 1], ".1f", "us") == "1.0 us"
    assert span([2, 1], ".1f", "x") == "1.0 to 2.0 x"
    assert lines_of([Item("a", "done", "1", "helix papers")])[2] == "| a | done | 1 | `helix papers` |"


def test_a_gate_passes_from_what_it_asks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By planted steps: twice as fast passes at 128K and not at 1M, and parts that are not recorded are not judged."""

    def verdicts(over: float) -> dict[str, list[bool]]:
        monkeypatch.setattr(sparse_criteria, "over_dense", lambda *_: over)
        monkeypatch.setattr(sparse_criteria, "parts_over_dense", lambda *_: None)
        return {gate.name: [passed for _, passed in gate.ours] for gate in sparse_criteria.listed()}

    short, long = "GATE-3: steps at 128K at least 2 x", "GATE-3: steps at 1M at least 5 x"
    assert verdicts(2.0)[short] == [True] * 4 and verdicts(2.0)[long] == [False] * 2
    assert verdicts(1.99)[short] == [False] * 4 and verdicts(5.0)[long] == [True] * 2


def test_rows_of_fp8_are_not_those_of_bf16() -> None:
    """A key without `kv` is refused on what is recorded, and the item has a range for each."""
    key = "batch", "length", "topk", "repeat", "prefetch"
    with pytest.raises(ValueError, match=r"offload-steps.jsonl: lines of .* have kv=auto and kv=fp8"):
        results("offload-steps", *key, kind="offload-steps", offload="host", commit="0e072b03182d")
    (item,) = [item for item in PAPERS["gather"].items() if "24 GB card" in item.what]
    assert re.fullmatch(r"\d+ to \d+ tokens/s in bf16, \d+ to \d+ in FP8, 1 x 1M", item.ours), item


def test_the_readme_has_recorded_times_and_their_ratios() -> None:
    """Its table is hand-written from generated ones; ratios of one commit differ by up to 1% from the newest times'."""
    text = (ROOT / "README.md").read_text("utf-8")
    shown = text[text.index("| model | KV heads |") : text.index("\n\nWith one KV head")].splitlines()[2:]
    recorded = {time for name in ("headline", "best-steps-1m") for line in TABLES[name]() for time in times_in(line)}
    ratios = {ratio for line in TABLES["over-tp"]() for ratio in re.findall(r"\d\.\d\d", line)} | {"1.00"}
    for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in shown):
        (helix,), tp, over_tp, vllm, over_vllm = times_in(row[2]), times_in(row[3]), row[4], times_in(row[5]), row[6]
        assert {helix, *tp, *vllm} <= recorded, row
        assert not tp or over_tp.strip("*") in ratios, row
        for other, ratio in ((tp, over_tp), (vllm, over_vllm)):
            assert bool(other) == (ratio != "-"), row
            for time in other:
                expected = float(time[:-3]) / float(helix[:-3])
                assert float(ratio.strip("*§ ")) == pytest.approx(expected, rel=0.01), row


def times_in(text: str) -> list[str]:
    return re.findall(r"\d+\.\d\d ms", text)


def test_the_readme_has_the_whole_range_of_loads_beside_vllm() -> None:
    """It covers every row of the tables, single prompts too, offline with the default goal."""
    said = re.search(r"\| scheduling \|.*", (ROOT / "README.md").read_text("utf-8"))
    assert said is not None
    ranges = re.findall(r"(\d\.\d\d) to (\d\.\d\d)", said[0])
    recorded = []
    for name, column in (
        ("compare-servers", "ratio"), ("compare-servers.1gpu", "ratio"), ("throughput.8gpu", "over vLLM's, balance")
    ):  # fmt: skip
        head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in TABLES[name]() if line.startswith("|"))
        over = [row[head.index(column)] for row in rows]
        recorded.append((min(over), max(over)))
    assert ranges == recorded
