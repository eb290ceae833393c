"""The front end over a job that a test writes: what clients get, and what becomes of their requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from helix.engine.request import PromptLogprobs, Request, RequestUpdate
from helix.sampling_params import SamplingParams
from launch.client.tokens import read_defaults
from launch.serving.routes import PAGE, PAGE_TYPES
from tests.serving.chats import CHATS, COMPLETIONS
from tests.serving.front import READY, ROOT, FakeJob, Serve, pieces, saying, silent, until, without_template


async def test_prompts_are_texts_ids_or_lists_of_them(serve: Serve) -> None:
    front = await serve()
    for prompt, prompts in ("def f", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1, 2], [3]], 2):
        front.job.got.clear()
        answer = (await front.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "n": 2})).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * prompts))
        for choice, submit in zip(answer["choices"], front.job.submits, strict=True):
            begin = 100 + len(submit.prompt)
            assert choice["text"] == front.session.tokens.decode([begin, begin + 1, begin + 2])
            assert choice["finish_reason"] == "length"
        lengths = sum(len(submit.prompt) for submit in front.job.submits[::2])
        assert answer["usage"]["prompt_tokens"] == lengths
        assert answer["usage"]["completion_tokens"] == 6 * prompts


async def test_unset_fields_are_the_checkpoints_and_then_openais(serve: Serve) -> None:
    front = await serve()
    front.session.defaults = {"temperature": 0.7, "top_k": 20}
    await front.post(COMPLETIONS, {"prompt": [1], "top_k": -1})
    (first,) = front.job.submits
    assert first.max_tokens == 16
    assert first.sampling == SamplingParams(temperature=0.7, seed=first.sampling.seed)
    body = {"prompt": [1], "temperature": 0, "seed": 5, "logit_bias": {"7": -100, "3": 1.5}, "min_tokens": 2}
    body |= {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "ignore_eos": True}
    await front.post(COMPLETIONS, body | {"priority": 3, "cache_salt": "x", "max_tokens": 2})
    second = front.job.submits[1]
    assert second.sampling == SamplingParams(
        top_k=20, logit_bias={3: 1.5, 7: -100}, min_tokens=2, presence_penalty=1, frequency_penalty=-0.5,
        repetition_penalty=1.1, ignore_eos=True,
    )  # fmt: skip
    assert second.priority == -3 and second.salt == '[null, "x"]'
    await front.post(COMPLETIONS, {"prompt": [1], "n": 3, "seed": 9, "max_tokens": 1})
    assert [s.sampling.seed for s in front.job.submits[2:]] == [9, 10, 11]


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"temperature": "hot"}', "temperature='hot'"),
        ('{"top_k": [5]}', "top_k="),
        ('{"repetition_penalty": -1}', "repetition_penalty=-1"),
        ('{"min_p": NaN}', "NaN"),
        ("{", "not JSON"),
        ("[]", "a JSON object"),
    ],
)
def test_defaults_that_no_request_could_set_are_told_at_the_start(content: str, words: str, tmp_path: Path) -> None:
    """Each request would fail of them."""
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"generation_config\.json.*" + re.escape(words)):
        read_defaults(str(tmp_path))


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_texts_and_stop_ids_end_it_and_the_engine_is_told(stream: bool, serve: Serve) -> None:
    front = await serve(FakeJob(saying("def f(x):\n# end\nmore", None)))
    client = AsyncOpenAI(base_url=f"{front.url}/v1", api_key="-")
    early: Any = {"extra_body": {"min_tokens": 2}}  # "def" and " f"
    for more, text in (
        ({"stop": ["f", "x", "("]} | early, "def f"),
        ({"stop": ["\n#", "never"]}, "def f(x):"),
        ({"stop": "f"}, "de"),
    ):
        answer = await client.completions.create(model="demo-model", prompt="x", stream=stream, max_tokens=500, **more)
        choices = [piece.choices[0] async for piece in answer] if stream else [answer.choices[0]]
        assert "".join(choice.text for choice in choices) == text
        assert choices[-1].finish_reason == "stop"
    await until(lambda: front.job.aborts == [1, 2, 3])  # its end of the socket reads them when it can
    assert front.core.flights == {}
    ids = front.session.tokens._whole("(", True).tolist()
    await front.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5, "stop_token_ids": ids, "stop": "f"})
    assert front.job.submits[-1].sampling.stop_token_ids == tuple(ids), "the engine ends at them"


async def test_an_end_token_is_no_text_even_if_it_has_one(serve: Serve) -> None:
    """The model's own, and such as one of `stop_token_ids`: the engine ends with it."""
    front = await serve(FakeJob(saying("hello", end=101)))
    assert front.session.tokens.decode([101])
    answer = (await front.post(COMPLETIONS, {"prompt": "x", "max_tokens": 99, "echo": True})).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xhello", "stop")
    assert answer["usage"]["completion_tokens"] == len(front.session.tokens.encode("hello", 9)) + 1
    assert front.job.aborts == []


async def test_a_stream_byte_by_byte(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers before the first token, comments in silence, usage at the end, and DONE."""
    released = asyncio.Event()

    async def late(job: FakeJob, submit: Request) -> None:
        job.send(RequestUpdate(submit.id, 3, 1, 0))
        await released.wait()
        job.send(RequestUpdate(submit.id, 3, 0, 2))
        await job.say(submit, [100], cached_tokens=1)
        await job.say(submit, [101], "length")

    monkeypatch.setattr("launch.client.answer.SILENCE_S", 0.1)
    front = await serve(FakeJob(late))
    body = {"prompt": [5, 6, 7], "stream": True, "stream_options": {"include_usage": True}, "x\n": 1}
    reader, _writer = await front.connect(COMPLETIONS, body | {"return_progress": True})
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"content-type: text/event-stream" in head
    assert b"x-ignored-fields: x \r\n" in head
    for _ in range(3):
        assert b": \n\n" in await reader.readuntil(b"\n\n\r\n")
    released.set()
    events = [line for line in (await reader.read()).decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert all(piece["object"] == "text_completion" for piece in told)
    assert all(piece["usage"] is None for piece in told[:-1])
    cached = {"cached_tokens": 1}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": cached}
    assert told[-1]["usage"] == usage and told[-1]["choices"] == []
    texts = "".join(choice["text"] for piece in told for choice in piece["choices"])
    assert texts == front.session.tokens.decode([100, 101])
    progress = [piece["prompt_progress"] for piece in told if "prompt_progress" in piece]
    assert [(p["processed"], p["total"]) for p in progress][-1] in ((2, 3), (3, 3))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    stream: bool, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is counted, and in the log."""
    front = await serve(FakeJob(silent))
    body = {"prompt": [1], "n": 2, "max_tokens": 1000, "stream": stream}
    _reader, writer = await front.connect(COMPLETIONS, body)
    await until(lambda: len(front.job.submits) == 2)
    writer.close()
    await until(lambda: len(front.job.aborts) == 2)
    assert front.core.flights == {}
    values = await front.metrics()
    assert values['request_success_total{finished_reason="abort"}'] == 2
    assert values["e2e_request_latency_seconds_count"] == 2
    said = ""

    def logged() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return COMPLETIONS in said

    await until(logged)
    assert said.split()[4:9] == [COMPLETIONS, "200" if stream else "499", "in=1", "cached=0", "out=0"]
    assert "end=abort,abort" in said


async def test_other_routes(serve: Serve) -> None:
    front = await serve()
    assert (await front.get("/livez")).json() == {"state": "alive"}
    assert (await front.get("/health")).json() == {"state": "ready", "reason": ""}
    assert (await front.get("/version")).json() == {"version": version("helix-runtime")}
    assert (await front.get("/v1/models/demo-model")).json()["id"] == "demo-model"
    refused = await front.get("/v1/models/gpt-9")
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    ids = (await front.post("/tokenize", {"prompt": "def f(x):"})).json()
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == READY.max_length
    assert (await front.post("/detokenize", {"tokens": ids["tokens"]})).json() == {"prompt": "def f(x):"}


@pytest.mark.parametrize("state", ["starting", "draining"])
async def test_a_server_that_is_not_ready_says_when_to_try_again(state: str, serve: Serve) -> None:
    front = await serve()
    front.core.draining, front.core._state = state == "draining", state
    for path, body in ((COMPLETIONS, {"prompt": [1]}), ("/tokenize", {"prompt": "x"})):
        refused = await front.post(path, body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == state
        assert int(refused.headers["retry-after"]) > 0
    health = await front.get("/health")
    assert (health.status_code, health.json()["state"]) == (503, state)
    assert (await front.get("/livez")).status_code == 200


async def test_the_queue_has_an_end(serve: Serve) -> None:
    front = await serve(FakeJob(silent), waiting=2)
    first = asyncio.create_task(front.post(COMPLETIONS, {"prompt": [1], "n": 2}))
    await until(lambda: len(front.job.submits) == 2)
    refused = await front.post(COMPLETIONS, {"prompt": [1]})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) > 0
    for submit in front.job.submits:  # admitted, so that they wait no more
        front.job.send(RequestUpdate(submit.id, 1, 0, 0))
    await until(lambda: all(not flight.waits for flight in front.core.flights.values()))
    second = asyncio.create_task(front.post(COMPLETIONS, {"prompt": [1], "n": 2}))
    await until(lambda: len(front.job.submits) == 4)
    # More than may ever wait need not try again.
    said = {"messages": [{"role": "user", "content": "a"}]}
    for path, body, param in ((COMPLETIONS, {"prompt": [1]}, "prompt"), (CHATS, said, "n")):
        refused = await front.post(path, body | {"n": 3})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "retry-after" not in refused.headers
    for task in (first, second):
        task.cancel()


async def test_the_page_needs_no_other_host(serve: Serve) -> None:
    front = await serve()
    notice = (ROOT / "NOTICE").read_text()
    for name, file in PAGE.items():
        answer = await front.get(f"/page/{name}")
        assert answer.status_code == 200 and answer.content == file.read_bytes()
        assert answer.headers["content-type"].startswith(PAGE_TYPES[file.suffix])
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
        cached = {"if-none-match": answer.headers["etag"]}
        assert (await front.get(f"/page/{name}", headers=cached)).status_code == 304
        if name.startswith("vendor/"):  # a library, as its makers publish it, and its licence
            assert file.suffix == ".txt" or hashlib.sha256(answer.content).hexdigest() in notice, name
        else:
            assert not re.search(r"://|[\"'(]//|url\(|@import|innerHTML|outerHTML|eval\(", answer.text), name
            wanted = re.findall(r'(?:src|href)="page/(.*?)"|from "\./(.*?)"', answer.text)
            assert {path or module for path, module in wanted} <= PAGE.keys()
    assert (await front.get("/")).text == PAGE["index.html"].read_text()
    fonts = re.findall(r"url\((fonts/\S+?\.woff2)\)", PAGE["vendor/katex.min.css"].read_text())
    assert {f"vendor/{font}" for font in fonts} == {name for name in PAGE if name.endswith(".woff2")}
    for name in ("page/", "page/none.js", "page/..%2froutes.py", "page/vendor", "page/vendor/marked.umd.js/x"):
        assert (await front.get(f"/{name}")).status_code == 404
    (described,) = (await front.get("/v1/models")).json()["data"]
    assert (described["max_model_len"], described["chat"], described["layout"]) == (4096, True, "helix kvp=2")


async def test_a_chat_template_comes_with_the_model_or_the_server(serve: Serve, tmp_path: Path) -> None:
    (file := tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "max_tokens": 1}
    for settings, prompt in (({}, "a\nb"), ({"chat_template": str(file)}, "<a><b>")):
        front = await serve(**settings)
        assert (await front.post(CHATS, body)).status_code == 200
        assert front.session.tokens.decode(front.job.submits[-1].prompt) == prompt
    plain = await serve(FakeJob(ready=replace(READY, model=str(without_template(tmp_path)))))
    assert (await plain.post(CHATS, body)).json()["error"]["code"] == "no_chat_template"


async def test_an_older_client_gets_a_stream_without_chunks(serve: Serve) -> None:
    """The stream ends with its connection: nginx asks so by default."""
    front = await serve()
    for stream in (True, False):
        body = json.dumps({"prompt": [1], "max_tokens": 2, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        if stream:
            events = [json.loads(e[6:]) for e in answer.split(b"\n\n") if e.startswith(b"data: {")]
            assert answer.startswith(b": \n\ndata: ") and answer.endswith(b"\n\ndata: [DONE]\n\n")
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        else:
            assert json.loads(answer)["usage"]["completion_tokens"] == 2
        writer.close()


# ---- prompts that are repeated with log-probabilities, as evaluation harnesses ask for them

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
    for choice in (choice for piece in pieces(answer) for choice in piece["choices"]):
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
