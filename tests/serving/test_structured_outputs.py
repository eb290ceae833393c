"""Answers of a form that a request wants, over HTTP: a model of random weights draws them, and each has its form."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.speculation import SuffixDrafter
from launch.answers.grammar_matcher import GrammarMatcherFactory
from tests.serving.api_server import ApiServer, Serve, read, until
from tests.serving.chats import CHATS, COMPLETIONS
from tests.serving.engine import EngineJob, alone

END = 256
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x = ["},
    CHATS: {"messages": [{"role": "user", "content": "x"}]},
}

FORMS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("forms.yaml").read_text(encoding="utf-8"))


def fits(row: dict[str, Any], text: str) -> bool:
    if "full" in row:
        return re.fullmatch(row["full"], text) is not None
    if "spaces" in row and re.search(r"\s", text):
        return False
    found = json.loads(text.replace("_", "") if row.get("spaces") else text)
    return set(found) == {"a", "b"} and found["a"] in ("x", "yes") and all(type(one) is bool for one in found["b"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are bytes, and an end."""
    directory = tmp_path_factory.mktemp("bytes")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return directory


@pytest.fixture
def served(model: Path, serve: Serve) -> Serve:
    """`await served(**options)` is a front end over an engine."""

    async def start(**options: Any) -> ApiServer:
        make = partial(alone, "qwen2", eos=END, max_length=192, max_batch=8, **options)
        return await serve(EngineJob(make, model))

    return start


async def sample_answers(
    api_server: ApiServer, route: str, stream: bool, seed: int, wanted: dict[str, Any], n: int = 1
) -> list[str]:
    """The answers to one request, each of which has ended by itself."""
    body = PROMPTS[route] | {"max_tokens": 150, "temperature": 1, "seed": seed, "stream": stream, "n": n} | wanted
    answer = await api_server.post(route, body)
    received = [read(answer, index) for index in range(n)]
    assert [one.ends for one in received] == ["stop"] * n, (wanted, received)
    return [one.content for one in received]


@pytest.mark.parametrize("options", [{}, {"drafter": SuffixDrafter(4, 2), "adaptive": False}], ids=["plain", "drafts"])
async def test_answers_have_their_form(options: dict[str, Any], served: Serve) -> None:
    """On both routes, in streams, several at a time, beside one that is free."""
    made = await served(**options)
    free = {"prompt": "x = [1, 2, 1, 2, 1, 2", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    alone = read(await made.post(COMPLETIONS, free)).content
    others = [asyncio.create_task(made.post(COMPLETIONS, free)) for _ in range(2)]
    kinds = [(route, stream) for route in PROMPTS for stream in (False, True)]
    answers = await asyncio.gather(
        *(sample_answers(made, *kinds[at % len(kinds)], at, row["wanted"], n=2) for at, row in enumerate(FORMS))
    )
    for row, texts in zip(FORMS, answers, strict=True):
        assert all(fits(row, text) for text in texts), (row, texts)
    assert [read(await one).content for one in others] == [alone, alone]


async def test_an_answer_that_leaves_its_form_is_an_error(served: Serve) -> None:
    """And no short answer: what follows the first letter is no text, which is found only there."""
    dead = {"structured_outputs": {"grammar": 'start: "a" X\nX: /[^\\s\\S]/'}}
    made = await served()
    answer = await made.post(COMPLETIONS, PROMPTS[COMPLETIONS] | dead)
    assert answer.status_code == 500 and "the grammar cannot be followed further: no text matches it" in answer.text
    assert await sample_answers(made, COMPLETIONS, False, 1, {"guided_choice": ["a"]}) == ["a"]


async def test_who_leaves_while_a_form_is_compiled_is_forgotten(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0, where others do not wait for it."""
    entered, go_on, submitted = Event(), Event(), list[Request]()
    compile, submit = GrammarMatcherFactory._compile, Inbox.submit

    def slow(self: GrammarMatcherFactory, grammar: str) -> LLMatcher:
        entered.set()
        assert go_on.wait(60)
        return compile(self, grammar)

    def noted(self: Inbox, request: Request) -> None:
        submitted.append(request)
        submit(self, request)

    monkeypatch.setattr(GrammarMatcherFactory, "_compile", slow)
    monkeypatch.setattr(Inbox, "submit", noted)
    made = await served()
    leaving = asyncio.create_task(made.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"guided_regex": "a"}))
    assert await asyncio.to_thread(entered.wait, 60)
    free = await made.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"max_tokens": 3})
    assert free.status_code == 200 and not leaving.done()
    leaving.cancel()
    await until(lambda: made.engine_client.generations == {})
    await made.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"max_tokens": 3})  # behind the abort
    go_on.set()
    assert await sample_answers(made, COMPLETIONS, False, 1, {"guided_choice": ["b"]}) == ["b"]
    assert [request.grammar is not None for request in submitted] == [False, False, True]
