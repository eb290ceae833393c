"""IncrementalDetokenizer and Choice: text while it comes is the text of all tokens, up to the first stop text."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helix.engine.request import Request
from launch.answers.answer_parser import Parser
from launch.answers.chat_formats import CHAT_FORMATS
from launch.client.choice import Choice, Delta
from launch.client.detokenizer import MAX_PENDING, IncrementalDetokenizer
from launch.client.engine_client import Generation
from launch.client.schemas import Chat, Completion

DEMO = Path(__file__).parents[2] / "assets" / "demo-model"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def stream(
    tokenizer: Any, tokens: list[int], *stop: str, min_tokens: int = 0, prompt: list[int] | tuple[()] = ()
) -> tuple[str, list[str], bool]:
    """The final text, the deltas, and whether a stop text ended it."""
    text = IncrementalDetokenizer(tokenizer, stop, min_tokens=min_tokens, prompt=prompt)
    deltas = []
    for token in tokens:
        delta, stopped = text.push(token)
        deltas.append(delta)
        if stopped:
            return text.text, deltas, True
    rest, stopped = text.finish()
    return text.text, [*deltas, rest], stopped


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x\n", "naïve café — 日本語 🙂🙃", "12345", " leading", "tab\t and\n\n\nlines"]
)
def test_deltas_add_up_to_the_text(tokenizer: Any, text: str) -> None:
    tokens = ids(tokenizer, text)
    whole, deltas, stopped = stream(tokenizer, tokens)
    assert whole == "".join(deltas) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert not stopped


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A tokenizer with a token for each byte that is in no other, as Llama 2's and Gemma's."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "x": 257, "▁y": 258}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(
    "tokens, text",
    [
        ([0x0A, 0xF0, 257, 258, 0x0A, 258], "\n\ufffdx y\n y"),
        ([0x0A, 0xF0, 0x9F, 258, 0xF0, 257, 257], "\n\ufffd\ufffd y\ufffdxx"),
        ([0x0A, 0xF0], "\n\ufffd"),
        ([0x0A, 0xF0, 0x9F, 0x99, 0x82, 257], "\n🙂x"),
    ],
)
def test_bytes_that_are_no_character_leave_what_is_out(byte_tokenizer: Any, tokens: list[int], text: str) -> None:
    """The tokenizer takes a whole run of such bytes for none: the text before them would be another."""
    whole, deltas, _ = stream(byte_tokenizer, tokens)
    assert whole == "".join(deltas) == text


@pytest.mark.parametrize(
    "prompt, tokens, text",
    [
        ([], [258, 258], "y y"),
        ([257], [258, 258], " y y"),
        ([257, 0xF0, 0x9F, 0x99, 0x82], [258], " y"),
        ([257], [0xF0, 258, 0xF0], "\ufffd y\ufffd"),
        ([257, 0xF0], [0x9F, 258], "\ufffd y"),  # the prompt's own character is not whole
        ([257, 0xF0, 0x9F, 0x99, 0x82], [0xF0], "\ufffd"),
        ([257, 0x0A], [0xF0, 258, 0xF0], "\ufffd y\ufffd"),  # a byte of the prompt's stays what it is
        ([257, 259], [258, 258], " y y"),  # a special token is no text
    ],
)
def test_a_text_that_continues_the_prompt_keeps_its_space(
    byte_tokenizer: Any, prompt: list[int], tokens: list[int], text: str
) -> None:
    """Llama 2's decoder, for one, strips the space before the first word."""
    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    strips = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    whole, deltas, _ = stream(strips, tokens, prompt=prompt)
    assert whole == "".join(deltas) == text
    generation = Generation(Request(0, prompt, 9), None, "", lambda: None)
    generation.output_token_ids, generation.finish_reason = tokens, "length"
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]}
    bodies = Completion(prompt=""), Chat(**chat, continue_final_message=True), Chat(**chat)
    found = [
        Choice(0, generation, SimpleNamespace(backend=strips), body, lambda *of: None, None).poll().text  # type: ignore[arg-type]
        for body in bodies
    ]
    assert found == [text, text, stream(strips, tokens)[0]]


@pytest.mark.parametrize("text", ["\ufffd" * 500, "a\ufffd\ufffdb" + "\ufffd" * 99 + "é🙂"])
def test_replacement_characters_come_as_they_are_drawn(tokenizer: Any, text: str) -> None:
    """They look like characters that lack bytes; nor do they take a time that grows with their number."""
    whole, deltas, _ = stream(tokenizer, ids(tokenizer, text))
    assert whole == "".join(deltas) == text
    assert max(map(len, deltas)) <= MAX_PENDING and not deltas[-1].startswith(MAX_PENDING * "\ufffd")


def test_a_character_behind_broken_bytes_is_whole(byte_tokenizer: Any) -> None:
    for broken in range(40):
        whole, _, _ = stream(byte_tokenizer, [257, *broken * [0x80], 257, 0xF0, 0x9F, 0x99, 0x82, 258])
        assert whole == "x" + broken * "\ufffd" + "x🙂 y"


def test_a_stop_text_before_a_torn_character_ends_the_text() -> None:
    """Its token is held back, and there is no other: nor does the answer end by its length."""
    made = Tokenizer(models.BPE({"x": 0, "y\u00f0": 1}, []))  # a letter for the byte 0xF0
    made.decoder = decoders.ByteLevel()
    torn = PreTrainedTokenizerFast(tokenizer_object=made)
    assert stream(torn, [0, 1], "y") == ("x", ["x", "", ""], True)
    generation, tokens = Generation(Request(0, (), 2), None, "", lambda: None), SimpleNamespace(backend=torn)
    generation.output_token_ids, generation.finish_reason = [0, 1], "length"
    choice = Choice(0, generation, tokens, Completion(prompt="", stop="y"), lambda *of: None, None)  # type: ignore[arg-type]
    news = choice.poll()
    assert (news.text, news.finish_reason, choice.matched_stop) == ("x", "stop", "y")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_tokens_after_the_only_call_do_not_count(tokenizer: Any, step: int) -> None:
    """However many come at a time, as they do with drafts; nor does a stop text among them count."""
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    told = ids(tokenizer, call)
    generation = Generation(Request(0, (), 99), None, "", lambda: None)
    tools = [{"function": {"name": "now"}}]
    parser = Parser(next(one for one in CHAT_FORMATS if one.name == "qwen").fields, "", tools, many=False)
    body = Chat(messages=[{"role": "user", "content": "x"}], stop=["#"])
    choice = Choice(0, generation, SimpleNamespace(backend=tokenizer), body, lambda *of: None, parser)  # type: ignore[arg-type]
    more = [*told, *ids(tokenizer, " and # more")]
    pieces = []
    for at in range(0, len(more), step):
        generation.output_token_ids += more[at : at + step]
        pieces.append(choice.poll())
    news = Delta.concat([one for one in pieces if one])
    assert [(part.kind, part.name, part.text) for part in news.parts] == [("call", "now", "{}")]
    assert (news.token_ids, choice.num_tokens) == (told, len(told))
    assert (news.finish_reason, choice.matched_stop) == ("tool_calls", None)


def test_special_tokens_are_not_text(tokenizer: Any) -> None:
    assert stream(tokenizer, [*ids(tokenizer, "abc"), tokenizer.eos_token_id])[0] == "abc"


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("return x\nnext line", ("\n",), "return x"),
        ("value = 12345 end", ("234",), "value = 1"),
        ("one two three", ("three", "two"), "one "),  # the earliest in the text, not in the list
        ("return", ("urn", "ret"), ""),  # both in one token
        ("aaab", ("aab",), "a"),  # overlaps itself
        ("stop here", ("stop",), ""),
        ("never", ("x", "evil"), None),
        ("ends with a beginn", ("beginning",), None),  # held back, then released at the end
    ],
)
def test_stop_texts(tokenizer: Any, text: str, stop: tuple[str, ...], expected: str | None) -> None:
    whole, deltas, stopped = stream(tokenizer, ids(tokenizer, text), *stop)
    assert stopped == (expected is not None)
    assert whole == "".join(deltas) == (text if expected is None else expected)


@pytest.mark.parametrize(
    "stop, min_tokens, expected",
    [
        (("b",), 1, "a"),
        (("b",), 2, "abcde"),
        (("b", "d"), 2, "abc"),
        (("bc",), 2, "a"),  # begins early, is complete in time
        (("cde", "bc"), 3, "ab"),  # what is held for the longer one contains the shorter one, too early
        (("abcde",), 9, "abcde"),
    ],
)
def test_stop_texts_within_min_tokens_do_not_count(
    tokenizer: Any, stop: tuple[str, ...], min_tokens: int, expected: str
) -> None:
    tokens = [i for letter in "abcde" for i in ids(tokenizer, letter)]
    whole, deltas, stopped = stream(tokenizer, tokens, *stop, min_tokens=min_tokens)
    assert whole == "".join(deltas) == expected and stopped == (expected != "abcde")


def test_the_stop_text_that_counts_is_named(tokenizer: Any) -> None:
    """Messages report it as `stop_sequence`; "c" begins where "cd" does, but within min_tokens."""
    text = IncrementalDetokenizer(tokenizer, ("c", "cd"), min_tokens=3)
    assert any(text.push(i)[1] for letter in "abcde" for i in ids(tokenizer, letter))
    assert (text.text, text.matched_stop) == ("ab", "cd")


def test_what_may_become_a_stop_text_is_held_back(tokenizer: Any) -> None:
    text = IncrementalDetokenizer(tokenizer, ("\n# The end",))
    streamed = "".join(text.push(t)[0] for t in ids(tokenizer, "x\n# The"))
    assert streamed == "x"
    assert streamed + text.finish()[0] == "x\n# The"


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = IncrementalDetokenizer(None)
    assert text.push(5) == ("", False) and text.finish() == ("", False) and text.text == ""


def test_a_prompt_of_a_million_tokens_travels_as_bytes() -> None:
    request = Request(0, list(range(100)) * 10_000, 1)
    assert list(request.prompt[5:8]) == [5, 6, 7] and len(request.prompt) == 1_000_000
    assert len(pickle.dumps(request)) < 4_010_000
    assert (pickle.loads(pickle.dumps(request)).prompt == request.prompt).all()
