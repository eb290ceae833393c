"""The front end over a job that a test writes: what clients get, and what becomes of their requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
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
from launch.client.chat_tokenizer import read_defaults
from launch.serving.routes import PAGE, PAGE_TYPES
from tests.serving.api_server import (
    READY,
    ROOT,
    FakeJob,
    Serve,
    pieces,
    scripted_reply,
    silent,
    until,
    without_template,
)
from tests.serving.chats import CHATS, COMPLETIONS


async def test_prompts_are_texts_ids_or_lists_of_them(serve: Serve) -> None:
    api_server = await serve()
    for prompt, prompts in ("def f", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1, 2], [3]], 2):
        api_server.job.received.clear()
        answer = (await api_server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "n": 2})).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * prompts))
        for choice, submit in zip(answer["choices"], api_server.job.submits, strict=True):
            begin = 100 + len(submit.prompt)
            assert choice["text"] == api_server.session.tokenizer.decode([begin, begin + 1, begin + 2])
            assert choice["finish_reason"] == "length"
        lengths = sum(len(submit.prompt) for submit in api_server.job.submits[::2])
        assert answer["usage"]["prompt_tokens"] == lengths
        assert answer["usage"]["completion_tokens"] == 6 * prompts


@pytest.mark.parametrize("other", [None, "tiktoken.model"])
async def test_without_a_tokenizer_prompts_are_ids(other: str | None, serve: Serve, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if other is not None:
        (model / other).write_text("IQ== 0")
    api_server = await serve(FakeJob(ready=replace(READY, model=str(model))))
    answer = await api_server.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
    why = "no tokenizer.json" + (f" ({other} cannot be read)" if other is not None else "")
    for path, body in (
        (COMPLETIONS, {"prompt": "def f"}),
        (CHATS, {"messages": [{"role": "user", "content": "def f"}]}),
        ("/tokenize", {"prompt": "def f"}),
    ):
        refused = await api_server.post(path, body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "no_tokenizer")
        assert error["message"] == f"the model has {why}: pass prompts as token ids"


async def test_unset_fields_are_the_checkpoints_and_then_openais(serve: Serve) -> None:
    api_server = await serve()
    api_server.session.defaults = {"temperature": 0.7, "top_k": 20}
    await api_server.post(COMPLETIONS, {"prompt": [1], "top_k": -1})
    (first,) = api_server.job.submits
    assert first.max_tokens == 16
    assert first.sampling == SamplingParams(temperature=0.7, seed=first.sampling.seed)
    body = {"prompt": [1], "temperature": 0, "seed": 5, "logit_bias": {"7": -100, "3": 1.5}, "min_tokens": 2}
    body |= {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "ignore_eos": True}
    await api_server.post(COMPLETIONS, body | {"priority": 3, "cache_salt": "x", "max_tokens": 2})
    second = api_server.job.submits[1]
    assert second.sampling == SamplingParams(
        top_k=20, logit_bias={3: 1.5, 7: -100}, min_tokens=2, presence_penalty=1, frequency_penalty=-0.5,
        repetition_penalty=1.1, ignore_eos=True,
    )  # fmt: skip
    assert second.priority == -3 and second.cache_salt == '[null, "x"]'
    await api_server.post(COMPLETIONS, {"prompt": [1], "n": 3, "seed": 9, "max_tokens": 1})
    assert [s.sampling.seed for s in api_server.job.submits[2:]] == [9, 10, 11]


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
    api_server = await serve(FakeJob(scripted_reply("def f(x):\n# end\nmore", None)))
    client = AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="-")
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
    await until(lambda: api_server.job.aborts == [1, 2, 3])  # its end of the socket reads them when it can
    assert api_server.engine_client.generations == {}
    ids = api_server.session.tokenizer._encode("(", True).tolist()
    await api_server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5, "stop_token_ids": ids, "stop": "f"})
    assert api_server.job.submits[-1].sampling.stop_token_ids == tuple(ids), "the engine ends at them"


async def test_an_end_token_is_no_text_even_if_it_has_one(serve: Serve) -> None:
    """The model's own, and such as one of `stop_token_ids`: the engine ends with it."""
    api_server = await serve(FakeJob(scripted_reply("hello", end=101)))
    assert api_server.session.tokenizer.decode([101])
    answer = (await api_server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 99, "echo": True})).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xhello", "stop")
    assert answer["usage"]["completion_tokens"] == len(api_server.session.tokenizer.encode("hello", 9)) + 1
    assert api_server.job.aborts == []


async def test_a_stream_byte_by_byte(serve: Serve) -> None:
    """Headers before the first token, heartbeats in silence, usage at the end, and DONE."""
    released = asyncio.Event()

    async def late(job: FakeJob, submit: Request) -> None:
        job.send(RequestUpdate(submit.id, 3, 1, 0))
        await released.wait()
        job.send(RequestUpdate(submit.id, 3, 0, 2))
        await job.emit(submit, [100], cached_tokens=1)
        await job.emit(submit, [101], "length")

    api_server = await serve(FakeJob(late), heartbeat_s=0.1)
    body = {"prompt": [5, 6, 7], "stream": True, "stream_options": {"include_usage": True}, "x\n": 1}
    reader, _writer = await api_server.connect(COMPLETIONS, body | {"return_progress": True})
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"content-type: text/event-stream" in head
    assert b"x-ignored-fields: x \r\n" in head
    assert b": \n\n" in await reader.readuntil(b"\n\n\r\n")
    while b'"text":""' not in await reader.readuntil(b"\n\n\r\n"):
        pass
    released.set()
    events = [line for line in (await reader.read()).decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    received = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert all(piece["object"] == "text_completion" for piece in received)
    assert all(piece["usage"] is None for piece in received[:-1])
    cached = {"cached_tokens": 1}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": cached}
    assert received[-1]["usage"] == usage and received[-1]["choices"] == []
    texts = "".join(choice["text"] for piece in received for choice in piece["choices"])
    assert texts == api_server.session.tokenizer.decode([100, 101])
    progress = [piece["prompt_progress"] for piece in received if "prompt_progress" in piece]
    assert [(p["processed"], p["total"]) for p in progress][-1] in ((2, 3), (3, 3))


async def test_no_heartbeat_follows_the_end_of_its_choice(serve: Serve) -> None:
    async def one_late(job: FakeJob, submit: Request) -> None:
        await asyncio.sleep(0.5 * (submit.id != job.submits[0].id))
        await job.emit(submit, [100], "length")

    api_server = await serve(FakeJob(one_late), heartbeat_s=0.1)
    answer = await api_server.post(COMPLETIONS, {"prompt": [5], "n": 2, "stream": True})
    choices = [choice for piece in pieces(answer) for choice in piece["choices"]]
    ends = [[choice["finish_reason"] for choice in choices if choice["index"] == index] for index in range(2)]
    assert ends[0][-1] == "length" and ends[1][-2:] == [None, "length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    stream: bool, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted, and in the log."""
    caplog.set_level(logging.INFO, "helix.access")
    api_server = await serve(FakeJob(silent))
    body = {"prompt": [1], "n": 2, "max_tokens": 1000, "stream": stream}
    _reader, writer = await api_server.connect(COMPLETIONS, body)
    await until(lambda: len(api_server.job.submits) == 2)
    writer.close()
    await until(lambda: len(api_server.job.aborts) == 2)
    assert api_server.engine_client.generations == {}
    values = await api_server.metrics()
    assert values['request_success_total{finished_reason="abort"}'] == 2
    assert values["e2e_request_latency_seconds_count"] == 2
    await until(lambda: COMPLETIONS in caplog.text)
    (message,) = (record.getMessage() for record in caplog.records if COMPLETIONS in record.getMessage())
    assert message.split()[3:8] == [COMPLETIONS, "200" if stream else "499", "in=1", "cached=0", "out=0"]
    assert "end=abort,abort" in message


async def test_other_routes(serve: Serve) -> None:
    api_server = await serve()
    assert (await api_server.get("/livez")).json() == {"state": "alive"}
    assert (await api_server.get("/health")).json() == {"state": "ready", "reason": ""}
    assert (await api_server.get("/version")).json() == {"version": version("helix-runtime")}
    assert (await api_server.get("/v1/models/demo-model")).json()["id"] == "demo-model"
    refused = await api_server.get("/v1/models/gpt-9")
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    ids = (await api_server.post("/tokenize", {"prompt": "def f(x):"})).json()
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == READY.max_length
    assert (await api_server.post("/detokenize", {"tokens": ids["tokens"]})).json() == {"prompt": "def f(x):"}
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        answer = await api_server.post(path, body | {"return_token_strs": True})
        assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "return_token_strs")


@pytest.mark.parametrize("state", ["starting", "draining"])
async def test_a_server_that_is_not_ready_says_when_to_try_again(state: str, serve: Serve) -> None:
    api_server = await serve()
    api_server.engine_client.draining, api_server.engine_client._state = state == "draining", state
    if state == "starting":
        del api_server.session.tokenizer  # it comes with the model, as does the model's name
        api_server.engine_client.engine_info = None
    for path in [path for path, method, _, _ in api_server.api._routes if method == "POST"]:
        refused = await api_server.post(path, {})
        assert refused.status_code == 503 and refused.json()["error"]["message"].startswith(f"{state}: "), path
        assert int(refused.headers["retry-after"]) > 0
    assert (await api_server.get("/v1/models")).status_code == (503 if state == "starting" else 200)
    health = await api_server.get("/health")
    assert (health.status_code, health.json()["state"]) == (503, state)
    assert (await api_server.get("/livez")).status_code == 200


HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    "path, body, kind, event",
    [
        (COMPLETIONS, {"prompt": [1]}, "service_unavailable_error", "error"),
        ("/v1/responses", {"input": "x"}, "service_unavailable_error", "response.failed"),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 9}, "overloaded_error", "error"),
    ],
)
async def test_what_a_drain_cuts_off_may_be_tried_elsewhere(
    path: str, body: dict[str, Any], kind: str, event: str, serve: Serve
) -> None:
    api_server = await serve(FakeJob(silent))
    asked = [asyncio.create_task(api_server.post(path, body | {"stream": stream})) for stream in (False, True)]
    await until(lambda: len(api_server.job.submits) == 2)
    api_server.engine_client.draining = True
    api_server.engine_client.fail("the server has shut down")
    whole, stream = await asyncio.gather(*asked)
    assert (whole.status_code, whole.json()["error"]["type"]) == (503, kind), whole.text
    assert "the server has shut down" in whole.json()["error"]["message"] and int(whole.headers["retry-after"]) > 0
    assert f"event: {event}\n" in stream.text and "the server has shut down" in stream.text
    assert event != "error" or f'"type":"{kind}"' in stream.text


async def test_the_queue_has_an_end(serve: Serve) -> None:
    api_server = await serve(FakeJob(silent), max_queue=2)
    first = asyncio.create_task(api_server.post(COMPLETIONS, {"prompt": [1], "n": 2}))
    await until(lambda: len(api_server.job.submits) == 2)
    refused = await api_server.post(COMPLETIONS, {"prompt": [1]})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) > 0
    for submit in api_server.job.submits:  # admitted, so that they wait no more
        api_server.job.send(RequestUpdate(submit.id, 1, 0, 0))
    await until(lambda: all(not generation.is_waiting for generation in api_server.engine_client.generations.values()))
    second = asyncio.create_task(api_server.post(COMPLETIONS, {"prompt": [1], "n": 2}))
    await until(lambda: len(api_server.job.submits) == 4)
    # More than may ever wait need not try again.
    said = {"messages": [{"role": "user", "content": "a"}]}
    for path, body, param in ((COMPLETIONS, {"prompt": [1]}, "prompt"), (CHATS, said, "n")):
        refused = await api_server.post(path, body | {"n": 3})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "retry-after" not in refused.headers
    for task in (first, second):
        task.cancel()


async def test_the_page_needs_no_other_host(serve: Serve) -> None:
    api_server = await serve()
    notice = (ROOT / "NOTICE").read_text()
    for name, file in PAGE.items():
        answer = await api_server.get(f"/page/{name}")
        assert answer.status_code == 200 and answer.content == file.read_bytes()
        assert answer.headers["content-type"].startswith(PAGE_TYPES[file.suffix])
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
        cached = {"if-none-match": answer.headers["etag"]}
        assert (await api_server.get(f"/page/{name}", headers=cached)).status_code == 304
        if name.startswith("vendor/"):  # a library, as its makers publish it, and its licence
            assert file.suffix == ".txt" or hashlib.sha256(answer.content).hexdigest() in notice, name
        else:
            assert not re.search(r"://|[\"'(]//|url\(|@import|innerHTML|outerHTML|eval\(", answer.text), name
            wanted = re.findall(r'(?:src|href)="page/(.*?)"|from "\./(.*?)"', answer.text)
            assert {path or module for path, module in wanted} <= PAGE.keys()
    assert (await api_server.get("/")).text == PAGE["index.html"].read_text()
    fonts = re.findall(r"url\((fonts/\S+?\.woff2)\)", PAGE["vendor/katex.min.css"].read_text())
    assert {f"vendor/{font}" for font in fonts} == {name for name in PAGE if name.endswith(".woff2")}
    for name in ("page/", "page/none.js", "page/..%2froutes.py", "page/vendor", "page/vendor/marked.umd.js/x"):
        assert (await api_server.get(f"/{name}")).status_code == 404
    (described,) = (await api_server.get("/v1/models")).json()["data"]
    assert (described["max_model_len"], described["chat"], described["layout"]) == (4096, True, "helix kvp=2")


async def test_a_chat_template_comes_with_the_model_or_the_server(serve: Serve, tmp_path: Path) -> None:
    (file := tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "max_tokens": 1}
    for settings, prompt in (({}, "a\nb"), ({"chat_template": str(file)}, "<a><b>")):
        api_server = await serve(**settings)
        assert (await api_server.post(CHATS, body)).status_code == 200
        assert api_server.session.tokenizer.decode(api_server.job.submits[-1].prompt) == prompt
    plain = await serve(FakeJob(ready=replace(READY, model=str(without_template(tmp_path)))))
    assert (await plain.post(CHATS, body)).json()["error"]["code"] == "no_chat_template"


async def test_an_older_client_gets_a_stream_without_chunks(serve: Serve) -> None:
    """The stream ends with its connection: nginx asks so by default."""
    api_server = await serve()
    for stream in (True, False):
        body = json.dumps({"prompt": [1], "max_tokens": 2, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", api_server.port)
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
    job.send(RequestUpdate(submit.id, prompt_logprobs=PromptLogprobs(begin, ids, values)))


async def scoring(job: FakeJob, submit: Request) -> None:
    if submit.sampling.prompt_logprobs is not None and len(submit.prompt) > 1:
        score(job, submit, 1, 3)
        score(job, submit, 2, len(submit.prompt))  # again, as after a preemption
    last = submit.max_tokens - 1
    for n in range(submit.max_tokens):
        more = {"logprobs": ((-0.5, ((400 + n, -0.5),)),)} if submit.sampling.logprobs is not None else {}
        await job.emit(submit, [400 + n], "length" if n == last else None, **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("new", [0, 2])
async def test_a_prompt_is_told_with_its_logprobs(new: int, stream: bool, serve: Serve) -> None:
    api_server = await serve(FakeJob(scoring))
    text = api_server.session.tokenizer.token_text
    body = {"prompt": [PROMPT, [300]], "max_tokens": new, "echo": True, "logprobs": 1, "stream": stream}
    answer = await api_server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = [{}, {}]
    for choice in (choice for piece in pieces(answer) for choice in piece["choices"]):
        received = found[choice["index"]]
        for name, part in choice["logprobs"].items():
            received[name] = received.get(name, []) + part
        received["text"] = received.get("text", "") + choice["text"]
        received["finish_reason"] = choice["finish_reason"]
    output_token_ids = [400, 401][:new]
    for received, ids in zip(found, (PROMPT, [300]), strict=True):
        texts = [text(token) for token in [*ids, *output_token_ids]]
        assert (
            received["tokens"] == texts and received["text"] == "".join(texts) and received["finish_reason"] == "length"
        )
        assert received["text_offset"] == [len("".join(texts[:at])) for at in range(len(texts))]
        assert received["token_logprobs"] == [None, -1, -2, -3][: len(ids)] + [-0.5] * new
        best = [None, *({text(100 + at): 0} for at in range(1, len(ids)))]
        assert received["top_logprobs"] == best + [{text(token): -0.5} for token in output_token_ids]
    if not stream:
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 2 * new)
    assert [submit.max_tokens for submit in api_server.job.submits] == [max(new, 1)] * 2


async def test_no_other_request_asks_for_them(serve: Serve) -> None:
    api_server = await serve(FakeJob(scoring))
    for more in ({"echo": True}, {"logprobs": 1}, {}, {"max_tokens": 0}):
        answer = await api_server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1} | more)
        assert answer.status_code == 200 and api_server.job.submits[-1].sampling.prompt_logprobs is None
        assert answer.json()["usage"]["completion_tokens"] == more.get("max_tokens", 1)
    answer = await api_server.post("/v1/chat/completions", {"messages": [], "max_tokens": 0})
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]


async def test_of_tokens_with_one_text_the_likeliest_is_told(serve: Serve) -> None:
    """Tokens that are parts of a character share one text, the replacement mark: the likeliest one counts."""

    async def halves(job: FakeJob, submit: Request) -> None:
        await job.emit(submit, [130], "length", logprobs=((-0.5, ((130, -0.5), (131, -3.0))),))

    api_server = await serve(FakeJob(halves))
    assert api_server.session.tokenizer.token_text(130) == api_server.session.tokenizer.token_text(131)
    answer = await api_server.post(COMPLETIONS, {"prompt": [1], "max_tokens": 1, "logprobs": 2})
    assert list(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0].values()) == [-0.5]
