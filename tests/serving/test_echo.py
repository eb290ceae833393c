"""Completions that repeat their prompt with log-probabilities, as evaluation harnesses ask for them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from helix.engine.request import PromptLogprobs, Request, RequestUpdate
from tests.serving.chats import COMPLETIONS
from tests.serving.front import FakeJob, Serve

PROMPT = [300, 301, 302, 303]


def score(job: FakeJob, submit: Request, begin: int, end: int) -> None:
    """Sends the log-probability -p of the token at each position p, and 100 + p as the likeliest with 0."""
    at = np.arange(begin, end, dtype=np.int32)
    values = np.stack([-at, 0 * at], 1).astype(np.float32)
    ids = np.stack([submit.prompt[begin:end], 100 + at], 1).astype(np.int32)
    job.send(RequestUpdate(submit.id, scored=PromptLogprobs(begin, ids, values)))


async def scoring(job: FakeJob, submit: Request) -> None:
    if submit.sampling.prompt_logprobs is not None and len(submit.prompt) > 1:
        score(job, submit, 1, 3)
        score(job, submit, 2, len(submit.prompt))  # again, as after a preemption
    last = submit.max_tokens - 1
    for n in range(submit.max_tokens):
        more = {"logprobs": ((-0.5, ((400 + n, -0.5),)),)} if submit.sampling.logprobs is not None else {}
        await job.say(submit, [400 + n], "length" if n == last else None, **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("new", [0, 2])
async def test_a_prompt_is_told_with_its_logprobs(new: int, stream: bool, serve: Serve) -> None:
    front = await serve(FakeJob(scoring))
    text = front.session.tokens.token_text
    body = {"prompt": [PROMPT, [300]], "max_tokens": new, "echo": True, "logprobs": 1, "stream": stream}
    answer = await front.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = [{}, {}]
    pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    for piece in pieces if stream else [answer.json()]:
        for choice in piece["choices"]:
            told = found[choice["index"]]
            for name, part in choice["logprobs"].items():
                told[name] = told.get(name, []) + part
            told["text"] = told.get("text", "") + choice["text"]
            told["finish_reason"] = choice["finish_reason"]
    drawn = [400, 401][:new]
    for told, ids in zip(found, (PROMPT, [300]), strict=True):
        texts = [text(token) for token in [*ids, *drawn]]
        assert told["tokens"] == texts and told["text"] == "".join(texts) and told["finish_reason"] == "length"
        assert told["text_offset"] == [len("".join(texts[:at])) for at in range(len(texts))]
        assert told["token_logprobs"] == [None, -1, -2, -3][: len(ids)] + [-0.5] * new
        best = [None, *({text(100 + at): 0} for at in range(1, len(ids)))]
        assert told["top_logprobs"] == best + [{text(token): -0.5} for token in drawn]
    if not stream:
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 2 * new)
    assert [submit.max_tokens for submit in front.job.submits] == [max(new, 1)] * 2


async def test_no_other_request_asks_for_them(serve: Serve) -> None:
    front = await serve(FakeJob(scoring))
    for more in ({"echo": True}, {"logprobs": 1}, {}, {"max_tokens": 0}):
        answer = await front.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1} | more)
        assert answer.status_code == 200 and front.job.submits[-1].sampling.prompt_logprobs is None
        assert answer.json()["usage"]["completion_tokens"] == more.get("max_tokens", 1)
    answer = await front.post("/v1/chat/completions", {"messages": [], "max_tokens": 0})
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]


async def test_of_tokens_with_one_text_the_likeliest_is_told(serve: Serve) -> None:
    """Tokens that are parts of a character share one text, the replacement mark: the likeliest one counts."""

    async def halves(job: FakeJob, submit: Request) -> None:
        await job.say(submit, [130], "length", logprobs=((-0.5, ((130, -0.5), (131, -3.0))),))

    front = await serve(FakeJob(halves))
    assert front.session.tokens.token_text(130) == front.session.tokens.token_text(131)
    answer = await front.post(COMPLETIONS, {"prompt": [1], "max_tokens": 1, "logprobs": 2})
    assert list(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0].values()) == [-0.5]
