"""Prompt files and result files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helix.config import Config, DecodeConfig, ModelConfig
from helix.request import Output, Request
from launch.prompts import (
    Prompt,
    ResultFile,
    check_record,
    check_writable,
    digest,
    kept_results,
    read_prompts,
    to_request,
)


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_ids_default_to_the_number_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, "", {"prompt_ids": [1, 2], "id": "x"}, {"prompt": "", "temperature": None})
    prompts = read_prompts(path)
    assert [p.id for p in prompts] == [0, "x", 2]
    assert [(p.text, p.ids) for p in prompts] == [("a", None), (None, (1, 2)), ("", None)]
    assert prompts[2].options == {}


@pytest.mark.parametrize(
    "line, words",
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: a prompt is a JSON object"),
        ({"text": "hello"}, "line 2: unknown keys text"),
        ({"id": 5}, 'line 2: needs "prompt"'),
        ({"prompt": "a", "prompt_ids": [1]}, "one of the two"),
        ({"prompt": 5}, '"prompt" must be text'),
        ({"prompt_ids": [1, "2"]}, "list of integers"),
        ({"prompt_ids": [True]}, "list of integers"),
        ({"prompt": "a", "id": 1.5}, "id 1.5"),
        ({"prompt": "a", "id": "first"}, "was used on line 1"),
        ({"prompt": "a", "stop": 3}, '"stop"'),
        ({"prompt": "a", "temprature": 1}, "unknown keys temprature; known: id, prompt"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: Any, words: str) -> None:
    path = write(tmp_path, {"prompt": "fine", "id": "first"}, line)
    with pytest.raises(ValueError) as caught:
        read_prompts(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path, "", ""))


def test_a_request_takes_the_line_before_the_config() -> None:
    defaults = DecodeConfig(max_new_tokens=9, temperature=0.5, stop=["\n"], seed=3)
    request = to_request(Prompt("a", None, (1, 2), {"temperature": 0, "top_k": 5, "stop": "x"}), defaults, None)
    assert isinstance(request, Request)
    assert request.max_new_tokens == 9 and request.stop == ("x",) and tuple(request.prompt) == (1, 2)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0, 5, 3)
    plain = to_request(Prompt("a", None, (1,), {}), defaults, None)
    assert isinstance(plain, Request) and plain.stop == ("\n",) and plain.sampling.temperature == 0.5


@pytest.mark.parametrize(
    "options, word",
    [
        ({"temperature": -1}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p = 2"),
        ({"seed": -1}, "seed = -1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": "many"}, "max_new_tokens='many'"),
    ],
)
def test_parameters_out_of_range_refuse_the_request(options: dict[str, Any], word: str) -> None:
    refused = to_request(Prompt("a", None, (1, 2, 3), options), DecodeConfig(), None)
    assert isinstance(refused, Output)
    assert refused.finish_reason == "error" and refused.prompt_tokens == 3
    assert refused.reason is not None and word in refused.reason


def output(name: str | int, reason: str = "length", text: str = "text") -> Output:
    return Output(name, 3, (4, 5), "", f"{text} of {name}", reason, "why" if reason == "error" else None)


def prompts(*names: str | int) -> list[Prompt]:
    return [Prompt(name, "x", None, {}) for name in names]


def ids(path: Path) -> list[Any]:
    return [json.loads(line)["id"] for line in path.read_text().split("\n") if line]


def test_lines_come_as_requests_finish_and_are_ordered_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultFile(Config(decode=DecodeConfig(output=str(path))), prompts("a", "b", "c"))
    assert path.read_text() == ""
    results.add(output("c"))
    assert ids(path) == ["c"], "on disk before the run ends"
    results.add(output("a", "error"))
    results.add(output("b"))
    assert ids(path) == ["c", "a", "b"]
    results.close()
    assert ids(path) == ["a", "b", "c"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    keys = ["id", "prompt_tokens", "output_ids", "text", "finish_reason", "request"]
    assert list(lines[1]) == keys and list(lines[0]) == [*keys, "reason"]


def test_resume_keeps_what_was_done_and_asks_for_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    asked = Config(decode=DecodeConfig(output=str(path)))
    first = ResultFile(asked, prompts(0, 1, 2, 3))
    first.add(output(2))
    first.add(output(0, "error"))
    with path.open("a") as file:
        file.write('{"id": 1, "prompt_tok')  # torn by the interruption
    again = replace(asked, decode=replace(asked.decode, resume=True))
    second = ResultFile(again, prompts(0, 1, 2, 3))
    assert [p.id for p in second.remaining] == [0, 1, 3]
    assert ids(path) == [2]
    for name in (3, 1, 0):
        second.add(output(name, text="a\u2028b"))  # no end of a line to JSON
    second.close()
    assert ids(path) == [0, 1, 2, 3]
    third = ResultFile(again, prompts(0, 1, 2, 3))
    assert third.remaining == [] and len(third.lines) == 4
    third.close()


def test_what_a_run_would_lose_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    asked = Config(model=ModelConfig(path="a"), decode=DecodeConfig(output=str(path)))
    again = replace(asked, decode=replace(asked.decode, resume=True))
    shorter = replace(again, decode=replace(again.decode, max_new_tokens=3))
    results = ResultFile(asked, prompts("a", "b"))
    results.add(output("a"))
    results.close()
    held = path.read_text()
    for config, wanted, said in (
        (asked, prompts("a", "b"), "exists: decode.resume=true keeps"),
        (again, prompts("b"), "holds a result 'a', which decode.prompts has not"),
        (again, [Prompt("a", "another", None, {})], "holds a result 'a' of another prompt"),
        (shorter, prompts("a", "b"), "decoded with other settings"),
        (replace(again, model=ModelConfig(path="b")), prompts("a", "b"), "or another model:"),
        (replace(again, model=ModelConfig(path="a", load="random")), prompts("a", "b"), "or another model:"),
    ):
        with pytest.raises(ValueError, match=said):
            kept_results(config, wanted)
        with pytest.raises(ValueError, match=said):
            ResultFile(config, wanted)
        assert path.read_text() == held
    path.write_text("# Something else\n\nof two lines\n")
    with pytest.raises(ValueError, match="line 1, is no result"):
        kept_results(again, prompts("a"))
    path.write_text("")
    assert kept_results(asked, prompts("a")) == {}


def test_only_random_weights_are_told_apart_by_the_seed() -> None:
    (prompt,) = prompts("a")
    for load, same in (("checkpoint", True), ("random", False)):
        first, second = (digest(prompt, Config(model=ModelConfig(load=load), seed=seed)) for seed in (1, 2))
        assert (first == second) is same


def test_without_a_file_results_are_counted_all_the_same() -> None:
    results = ResultFile(Config(), prompts("a"))
    results.add(output("a"))
    results.close()
    assert list(results.lines) == ["a"]


def test_text_of_any_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n{"prompt": "c"}\n')
    assert [p.text for p in read_prompts(path)] == ["a\u2028b", "c"]
    path.write_text('{"prompt": "a\\ud83d"}')
    with pytest.raises(ValueError, match=r"line 1: .*half a character at 1"):
        read_prompts(path)


def test_unwritable_places_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "out.jsonl", tmp_path):
        with pytest.raises(ValueError, match=r"decode\.output=.* cannot be written"):
            check_writable("decode.output", path)
    check_writable("decode.output", tmp_path / "new.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text, fine", [("", True), ('{"versions": {}}', True), ("notes", False), ("[1]", False)])
def test_a_record_overwrites_records_alone(tmp_path: Path, text: str, fine: bool) -> None:
    path = tmp_path / "record.json"
    check_record(path)
    path.write_text(text)
    with nullcontext() if fine else pytest.raises(ValueError, match=r"record\.json exists and is no record"):
        check_record(path)
