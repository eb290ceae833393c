"""Prompt files and result files."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helix.config import AttentionConfig, Config, DecodeConfig, KVConfig, LayoutConfig, ModelConfig
from helix.errors import RankError
from launch.client.answer import CompletionOutput, RequestOutput
from launch.client.options import LINE_OPTIONS
from launch.client.sampling import make_sampling_params
from launch.client.schemas import Chat, Completion
from launch.inputs.prompt_files import PromptFile, PromptLine, RequestDigests, ResultFile, existing_results, make_body
from tests.unit.test_files import largest_file

BATCH = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 4}}


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_ids_default_to_the_number_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, "", {"prompt_ids": [1, 2], "id": "x"}, {"prompt": "", "temperature": None})
    prompts = PromptFile(path)
    assert [p.id for p in prompts] == [0, "x", 2]
    assert [(p.text, p.ids) for p in prompts] == [("a", None), (None, (1, 2)), ("", None)]
    assert prompts[2].options == {}


def test_a_request_takes_the_line_before_the_config() -> None:
    defaults = DecodeConfig(max_tokens=9, temperature=0.5, stop=["\n"], seed=3)
    body = make_body(PromptLine("a", None, (1, 2), {"temperature": 0, "top_k": 5, "stop": "x"}), defaults)
    assert (body.max_tokens, body.stop, body.prompt.tolist()) == (9, ["x"], [1, 2])  # type: ignore[union-attr]
    assert (body.temperature, body.top_k, body.seed) == (0, 5, 3)
    plain = make_body(PromptLine("a", None, (1,), {}), defaults)
    assert plain.stop == ["\n"] and plain.temperature == 0.5
    chat = make_body(
        PromptLine("a", None, None, {"logprobs": 2}, {"messages": [{"role": "user", "content": "x"}]}), defaults
    )
    assert isinstance(chat, Chat) and (chat.logprobs, chat.top_logprobs, chat.max_tokens) == (True, 2, 9)


def test_what_a_line_wants_of_the_logits(tmp_path: Path) -> None:
    sampling_params = {
        "logit_bias": {"5": -100, "07": 0.5}, "min_tokens": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.1,
        "presence_penalty": -1, "stop_token_ids": [4, 9], "ignore_eos": True, "logprobs": 2,
    }  # fmt: skip
    (prompt,) = PromptFile(write(tmp_path, {"prompt_ids": [1], **sampling_params}))
    sampling = make_sampling_params(make_body(prompt, DecodeConfig()), {}, 4096, 0)
    assert {key: getattr(sampling, key) for key in sampling_params} == sampling_params | {
        "logit_bias": {5: -100, 7: 0.5}, "stop_token_ids": (4, 9)
    }  # fmt: skip


def output(name: str | int, reason: str = "length", text: str = "text") -> tuple[str | int, RequestOutput]:
    answer = CompletionOutput(f"{text} of {name}", (4, 5), reason)
    return name, RequestOutput(3, 0, (answer,), "why" if reason == "error" else None)


def prompts(*names: str | int) -> list[PromptLine]:
    return [PromptLine(name, "x", None, {}) for name in names]


def begun(config: Config, prompts: Sequence[PromptLine]) -> ResultFile:
    """A result file whose prompts are read."""
    results = ResultFile(config, prompts)
    assert results.count + len([*results.remaining]) == len(prompts)
    return results


def ids(path: Path) -> list[Any]:
    return [json.loads(line)["id"] for line in path.read_text().split("\n") if line]


def test_lines_come_as_requests_finish_and_are_ordered_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = begun(Config(decode=DecodeConfig(output=str(path))), prompts("a", "b", "c"))
    assert path.read_text() == ""
    results.add(*output("c"))
    assert ids(path) == ["c"], "on disk before the run ends"
    results.add(*output("a", "error"))
    results.add(*output("b"))
    assert ids(path) == ["c", "a", "b"]
    results.close()
    assert ids(path) == ["a", "b", "c"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    keys = ["id", "prompt_tokens", "token_ids", "text", "finish_reason", "request"]
    assert list(lines[1]) == keys and list(lines[0]) == [*keys, "reason"]


def test_ids_with_the_same_hash_are_different(tmp_path: Path) -> None:
    asked = Config(decode=DecodeConfig(output=str(tmp_path / "out.jsonl")))
    names = prompts(-1, -2, 0, (1 << 61) - 1, "0")
    assert hash(-1) == hash(-2)
    results = begun(asked, names)
    for prompt in names:
        results.add(*output(prompt.id))
    results.close()
    again = begun(replace(asked, decode=replace(asked.decode, resume=True)), names)
    assert [*again.remaining] == []


def test_results_of_block_sparse_attention_say_so_and_are_no_others(tmp_path: Path) -> None:
    """What decides which keys are read, and how they are rounded, is part of a request's digest; the rest is not."""
    path = tmp_path / "out.jsonl"
    dense = Config(decode=DecodeConfig(output=str(path)))
    sparse = replace(dense, attention=AttentionConfig("block_sparse"))
    results = begun(sparse, prompts("a"))
    results.add(*output("a"))
    results.close()
    assert json.loads(path.read_text())["attention"] == "block_sparse (lossy)"
    four = LayoutConfig(kvp=4)
    over_all = replace(sparse, attention=AttentionConfig("block_sparse", choice="global"))
    others = [
        dense, sparse, replace(sparse, attention=AttentionConfig("block_sparse", num_blocks=8)),
        replace(sparse, layout=four),
        replace(sparse, kv=KVConfig(page_size=16)), over_all,
        *(replace(dense, kv=KVConfig(dtype=dtype)) for dtype in ("fp8", "k16v8")),
    ]  # fmt: skip
    (prompt,) = prompts("a")
    assert len({RequestDigests(config).digest(prompt) for config in others}) == len(others)
    assert RequestDigests(replace(over_all, layout=four)).digest(prompt) == RequestDigests(over_all).digest(prompt)
    assert RequestDigests(replace(dense, layout=four)).digest(prompt) == RequestDigests(dense).digest(prompt)
    with pytest.raises(ValueError, match="other settings"):
        ResultFile(replace(dense, decode=replace(dense.decode, resume=True)), prompts("a"))


def test_a_batch_is_resumed_as_other_prompts_are(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = [BATCH | {"custom_id": name} for name in ("a", "b", "c")]
    given = [*PromptFile(write(tmp_path, *lines)), *prompts("d")]
    assert given[0].options == {"max_tokens": 4} and given[0].schema is Completion
    config = Config(decode=DecodeConfig(output=str(path)))
    first = begun(config, given)
    first.add_response("b", 200, {"choices": []})
    first.add_response("a", 400, {"error": {}})
    first.add(*output("d"))
    del first  # it was killed
    with path.open("a") as file:
        file.write('{"custom_id": "c", "id": "batch_re')  # torn by the interruption
    again = replace(config, decode=replace(config.decode, resume=True))
    second = begun(again, given)
    assert [p.id for p in second.remaining] == ["a", "c"]
    second.add_response("a", 200, {"choices": []})
    second.close()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("custom_id", line["id"]) for line in kept] == ["a", "b", "d"]
    assert list(kept[0]) == ["custom_id", "id", "response", "error"]
    others = PromptFile(write(tmp_path, *lines[:1], lines[1] | {"body": {"prompt": "y"}}, lines[2]))
    with pytest.raises(ValueError, match="has a result 'b' of another prompt"):
        ResultFile(again, [*others, *prompts("d")])


def test_what_a_run_would_lose_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    asked = Config(model=ModelConfig(path="a"), decode=DecodeConfig(output=str(path)))
    again = replace(asked, decode=replace(asked.decode, resume=True))
    shorter = replace(again, decode=replace(again.decode, max_tokens=3))
    results = begun(asked, prompts("a", "b"))
    results.add(*output("a"))
    results.close()
    held = path.read_text()
    for config, wanted, error in (
        (asked, prompts("a", "b"), "exists: set decode.resume=true to keep"),
        (again, prompts("b"), "has a result 'a', but decode.prompts has no such id"),
        (again, [PromptLine("a", "another", None, {})], "has a result 'a' of another prompt"),
        (shorter, prompts("a", "b"), "decoded with other settings"),
        (replace(again, model=ModelConfig(path="b")), prompts("a", "b"), "or another model:"),
        (replace(again, model=ModelConfig(path="a", load="random")), prompts("a", "b"), "or another model:"),
    ):
        with pytest.raises(ValueError, match=error):
            existing_results(config, wanted)
        with pytest.raises(ValueError, match=error):
            ResultFile(config, wanted)
        assert path.read_text() == held
    path.write_text("")
    assert existing_results(asked, prompts("a")).tolist() == [-1]


def test_only_random_weights_are_told_apart_by_the_seed() -> None:
    (prompt,) = prompts("a")
    for load, same in (("checkpoint", True), ("random", False)):
        first, second = (
            RequestDigests(Config(model=ModelConfig(load=load), seed=seed)).digest(prompt) for seed in (1, 2)
        )
        assert (first == second) is same


@pytest.mark.parametrize("key", ["ids", *LINE_OPTIONS])
def test_all_that_a_prompt_asks_for_tells_results_apart(key: str) -> None:
    first = PromptLine("a", None, (1, 2), {})
    other = replace(first, ids=(1, 3)) if key == "ids" else replace(first, options={key: 0.25})
    assert RequestDigests(Config()).digest(first) != RequestDigests(Config()).digest(other)


def test_text_of_any_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n{"prompt": "c"}\n')
    assert [p.text for p in PromptFile(path)] == ["a\u2028b", "c"]
    path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"prompts\.jsonl is not UTF-8 text: byte 13 "):
        PromptFile(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_torn_anywhere_is_resumed(tmp_path: Path, data: st.DataObject) -> None:
    """Whole lines are kept, the line behind them runs again, wherever the write ended."""
    path = tmp_path / "out.jsonl"
    path.unlink(missing_ok=True)
    config = Config(decode=DecodeConfig(output=str(path)))
    names = ["a: 0", 'é"\n', 7]
    first = begun(config, prompts(*names))
    for name in names:
        first.add(*output(name, text="\U0001f600\ud83d"))
    first.close()
    whole = path.read_bytes()
    end = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:end])
    second = begun(replace(config, decode=replace(config.decode, resume=True)), prompts(*names))
    lines = whole.splitlines(keepends=True)
    ends = [sum(map(len, lines[: i + 1])) - 1 for i in range(3)]  # without the end of the line it is whole
    assert [p.id for p in second.remaining] == [name for name, at in zip(names, ends, strict=True) if end < at]
    for prompt in second.remaining:
        second.add(*output(prompt.id, text="\U0001f600\ud83d"))
    second.close()
    assert path.read_bytes() == whole


def test_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    config = Config(decode=DecodeConfig(output=str(path), resume=True))
    by_link = replace(config, decode=replace(config.decode, output=str(link)))
    first = begun(config, prompts("a", "b"))
    for moment in range(2):
        for other in (config, by_link):
            with pytest.raises(ValueError, match=r"decode\.output=.* cannot be written: another run is writing it"):
                ResultFile(other, prompts("a", "b"))
        first.add(*output("ab"[moment]))
    first.close()
    second = begun(by_link, prompts("a", "b"))
    assert [*second.remaining] == [] and link.is_symlink()
    del second  # a run that is killed leaves nothing that stops the next
    ResultFile(config, prompts("a", "b")).close()
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_a_full_disk_says_how_many_results_are_safe(tmp_path: Path) -> None:
    path, copy = tmp_path / "out.jsonl", tmp_path / "copy.jsonl"
    config = Config(decode=DecodeConfig(output=str(path)))
    results = begun(config, prompts("a", "b", "c", "d"))
    results.add(*output("c"))
    results.add(*output("a", "error"))
    results.add(*output("b"))
    held = path.read_bytes()
    error = r"out\.jsonl cannot be written: File too large; 2 of 4 results are complete; decode\.resume=true runs"
    with largest_file(len(held) + 9), pytest.raises(RankError, match=error):
        results.add(*output("d"))
    torn = path.read_bytes()
    assert len(torn) == len(held) + 9 and torn.startswith(held)
    with largest_file(9), pytest.raises(RankError, match=error):
        results.close()
    assert path.read_bytes() == torn and list(tmp_path.iterdir()) == [path]
    copy.write_bytes(torn)  # the first one is this process's
    again = Config(decode=DecodeConfig(output=str(copy), resume=True))
    with largest_file(9), pytest.raises(ValueError, match=r"copy\.jsonl cannot be written: File too large"):
        ResultFile(again, prompts("a", "b", "c", "d"))
    assert copy.read_bytes() == torn
    resumed = begun(again, prompts("a", "b", "c", "d"))
    assert [p.id for p in resumed.remaining] == ["a", "d"] and ids(copy) == ["b", "c"]


def test_memory_does_not_grow_with_prompts_and_results(tmp_path: Path) -> None:
    """Numbers of a prompt are kept, in the arrays of three passes; its text, result, id and digest are not."""
    lines = [{"id": f"prompt {n}", "prompt": "x" * 200} for n in range(5000)]
    path = write(tmp_path, *lines)
    asked = Config(decode=DecodeConfig(output=str(tmp_path / "out.jsonl")))
    again = replace(asked, decode=replace(asked.decode, resume=True))
    PromptFile(path)[0].text, json.dumps(lines[0])  # imports what they need
    tracemalloc.start()
    for config, left in (asked, 5000), (again, 0):
        results = ResultFile(config, PromptFile(path))
        for prompt in results.remaining:
            results.add(*output(prompt.id, text="y" * 200))
            left -= 1
        results.close()
        assert left == 0 and results.count == 5000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 120 * len(lines), peak / len(lines)
    assert ids(tmp_path / "out.jsonl") == [line["id"] for line in lines]


def test_tokens_of_what_is_not_read_yet_are_bounded_by_its_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x" * 100}, {"prompt": "y", "max_tokens": 50}, {"prompt": "z" * 900})
    prompts = PromptFile(path)
    assert prompts.max_total_tokens(16, 512, 1) == 512 and 512 + 150 <= prompts.max_total_tokens(16, 512, 2) < 512 + 200
    chat = PromptFile(write(tmp_path, BATCH | {"url": "/v1/chat/completions", "body": {"messages": []}}))
    assert chat.max_total_tokens(16, 512, 4) == 512, "no limit of its own"
    wrong = (BATCH | {"custom_id": f"{n}", "body": {"prompt": "x", "n": n}} for n in (-5, 0, 3))
    assert PromptFile(write(tmp_path, *wrong)).sequences == 5, "a line that is refused has one result"
