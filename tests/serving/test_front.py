"""The front end over a job that a test writes: what clients get, and what becomes of their requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from helix.engine.request import Request, RequestUpdate
from helix.sampling_params import SamplingParams
from launch.client.errors import ApiError
from launch.client.frames import Queued, Stats
from launch.client.schemas import REFUSED, Chat, Completion, Detokenize, Tokenize, parsed
from launch.client.tokens import read_defaults
from launch.serving.messages import Count, Messages
from launch.serving.responses import Responses
from launch.serving.routes import PAGE, PAGE_TYPES
from launch.serving.security import Keys
from tests.serving.front import (
    READY,
    ROOT,
    FakeJob,
    Front,
    counting,
    metrics_of,
    run,
    silent,
    until,
    without_template,
)

pytestmark = pytest.mark.timeout(120)


def text_of(front: Front, ids: list[int]) -> str:
    return front.session.tokens.decode(ids)


def saying(text: str, finish: str | None = "stop") -> Any:
    """A job that says a text, a token at a time, and the model's own end."""

    async def script(job: FakeJob, submit: Request) -> None:
        from helix.tokenizer import load_tokenizer

        ids = load_tokenizer(job.ready.model).encode(text)
        for token in ids:
            await job.say(submit, [token])
        if finish:
            await job.say(submit, [0] if finish == "stop" else [], finish)

    return script


def test_prompts_are_texts_ids_or_lists_of_them(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        for prompt, prompts in (
            ("def f", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1, 2], [3]], 2),
        ):  # fmt: skip
            front.job.got.clear()
            answer = (await front.post("/v1/completions", {"prompt": prompt, "max_tokens": 3, "n": 2})).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(2 * prompts))
            assert len(front.job.submits) == 2 * prompts
            for choice, submit in zip(answer["choices"], front.job.submits, strict=True):
                begin = 100 + len(submit.prompt)
                assert choice["text"] == text_of(front, [begin, begin + 1, begin + 2])
                assert choice["finish_reason"] == "length"
            lengths = sum(len(submit.prompt) for submit in front.job.submits[::2])
            assert answer["usage"]["prompt_tokens"] == lengths
            assert answer["usage"]["completion_tokens"] == 6 * prompts

    run(check, tmp_path)


def test_unset_fields_are_the_checkpoints_and_then_openais(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        front.session.defaults = {"temperature": 0.7, "top_k": 20}
        await front.post("/v1/completions", {"prompt": [1], "top_k": -1})
        (first,) = front.job.submits
        assert first.max_tokens == 16
        assert first.sampling == SamplingParams(temperature=0.7, seed=first.sampling.seed)
        body = {"prompt": [1], "temperature": 0, "seed": 5, "logit_bias": {"7": -100, "3": 1.5}, "min_tokens": 2}
        body |= {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "ignore_eos": True}
        await front.post("/v1/completions", body | {"priority": 3, "cache_salt": "x", "max_tokens": 2})
        second = front.job.submits[1]
        assert second.sampling == SamplingParams(
            top_k=20, logit_bias={3: 1.5, 7: -100}, min_tokens=2, presence_penalty=1, frequency_penalty=-0.5,
            repetition_penalty=1.1, ignore_eos=True,
        )  # fmt: skip
        assert second.priority == -3 and second.salt == '[null, "x"]'
        await front.post("/v1/completions", {"prompt": [1], "n": 3, "seed": 9, "max_tokens": 1})
        assert [s.sampling.seed for s in front.job.submits[2:]] == [9, 10, 11]

    run(check, tmp_path)


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
def test_stop_texts_and_stop_ids_end_it_and_the_engine_is_told(stream: bool, tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        client = AsyncOpenAI(base_url=f"{front.url}/v1", api_key="-")
        early: Any = {"extra_body": {"min_tokens": 2}}  # "def" and " f"
        for more, text in (
            ({"stop": ["f", "x", "("]} | early, "def f"),
            ({"stop": ["\n#", "never"]}, "def f(x):"),
            ({"stop": "f"}, "de"),
        ):
            answer = await client.completions.create(
                model="demo-model", prompt="x", stream=stream, max_tokens=500, **more
            )
            choices = [piece.choices[0] async for piece in answer] if stream else [answer.choices[0]]
            assert "".join(choice.text for choice in choices) == text
            assert choices[-1].finish_reason == "stop"
        assert front.job.aborts == [1, 2, 3] and front.core.flights == {}
        ids = front.session.tokens._whole("(", True).tolist()
        await front.post("/v1/completions", {"prompt": "x", "max_tokens": 5, "stop_token_ids": ids, "stop": "f"})
        assert front.job.submits[-1].sampling.stop_token_ids == tuple(ids), "the engine ends at them"

    run(check, tmp_path, FakeJob(saying("def f(x):\n# end\nmore", None)))


def test_an_end_token_is_no_text_even_if_it_has_one(tmp_path: Path) -> None:
    """Such as one of `stop_token_ids`: the engine ends with it."""

    async def ending(job: FakeJob, submit: Request) -> None:
        await job.say(submit, [100])
        await job.say(submit, [101], "stop")

    async def check(front: Front) -> None:
        answer = (await front.post("/v1/completions", {"prompt": "x", "max_tokens": 9})).json()
        assert text_of(front, [101]) and answer["choices"][0]["text"] == text_of(front, [100])
        assert answer["usage"]["completion_tokens"] == 2

    run(check, tmp_path, FakeJob(ending))


def test_the_models_end_is_no_text(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        choice = (await front.post("/v1/completions", {"prompt": "x", "max_tokens": 99, "echo": True})).json()[
            "choices"
        ][0]
        assert choice["text"] == "xhello" and choice["finish_reason"] == "stop"
        assert front.job.aborts == []

    run(check, tmp_path, FakeJob(saying("hello")))


def test_a_stream_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers before the first token, comments in silence, usage at the end, and DONE."""
    released = asyncio.Event()

    async def late(job: FakeJob, submit: Request) -> None:
        job.send(RequestUpdate(submit.id, 3, 1, 0))
        await released.wait()
        job.send(RequestUpdate(submit.id, 3, 0, 2))
        await job.say(submit, [100], cached_tokens=1)
        await job.say(submit, [101], "length")

    async def check(front: Front) -> None:
        body = {"prompt": [5, 6, 7], "stream": True, "stream_options": {"include_usage": True}, "x\n": 1}
        reader, _writer = await front.connect("/v1/completions", body | {"return_progress": True})
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
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert told[-1]["usage"] == usage and told[-1]["choices"] == []
        assert "".join(c["text"] for piece in told for c in piece["choices"]) == text_of(front, [100, 101])
        progress = [piece["prompt_progress"] for piece in told if "prompt_progress" in piece]
        assert [(p["processed"], p["total"]) for p in progress][-1] in ((2, 3), (3, 3))

    monkeypatch.setattr("launch.client.answer.SILENCE_S", 0.1)
    run(check, tmp_path, FakeJob(late))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool, tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        _reader, writer = await front.connect(
            "/v1/completions", {"prompt": [1], "n": 2, "max_tokens": 1000, "stream": stream}
        )
        await until(lambda: len(front.job.submits) == 2)
        writer.close()
        await until(lambda: len(front.job.aborts) == 2, 2)
        assert front.core.flights == {}

    run(check, tmp_path, FakeJob(silent))


def test_the_time_in_the_queue_ends_with_admission(tmp_path: Path) -> None:
    """Not with the first token, behind a prompt that takes long; one that is refused was in no queue."""

    async def slow(job: FakeJob, submit: Request) -> None:
        if submit.prompt[0] == 1:
            job.send(RequestUpdate(submit.id, finish_reason="error", reason="planted"))
            return
        job.send(Queued(submit.id))
        await asyncio.sleep(0.3)
        job.send(RequestUpdate(submit.id, 1, 0, 0))
        await asyncio.sleep(0.7)
        await counting(job, submit)

    async def check(front: Front) -> None:
        for first in (1, 2):
            await front.post("/v1/completions", {"prompt": [first], "max_tokens": 1})
        values = metrics_of((await front.get("/metrics")).text)
        assert values["request_queue_time_seconds_count"] == 1
        # Timers of the loop come a millisecond early.
        assert 0.29 <= values["request_queue_time_seconds_sum"] < 0.7
        assert values["time_to_first_token_seconds_sum"] >= 0.99

    run(check, tmp_path, FakeJob(slow))


def test_other_routes(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        assert (await front.get("/livez")).json() == {"state": "alive"}
        assert (await front.get("/health")).json() == {"state": "ready", "reason": ""}
        assert (await front.get("/version")).json() == {"version": version("helix-runtime")}
        assert (await front.get("/v1/models/demo-model")).json()["id"] == "demo-model"
        refused = await front.get("/v1/models/gpt-9")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        ids = (await front.post("/tokenize", {"prompt": "def f(x):"})).json()
        assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == READY.max_length
        assert (await front.post("/detokenize", {"tokens": ids["tokens"]})).json() == {"prompt": "def f(x):"}

    run(check, tmp_path)


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_a_server_that_is_not_ready_says_when_to_try_again(state: str, tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        front.core.draining, front.core._state = state == "draining", state
        for path, body in (("/v1/completions", {"prompt": [1]}), ("/tokenize", {"prompt": "x"})):
            refused = await front.post(path, body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == state
            assert int(refused.headers["retry-after"]) > 0
        health = await front.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, state)
        assert (await front.get("/livez")).status_code == 200

    run(check, tmp_path)


def test_the_queue_has_an_end(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        first = asyncio.create_task(front.post("/v1/completions", {"prompt": [1], "n": 2}))
        await until(lambda: len(front.job.submits) == 2)
        refused = await front.post("/v1/completions", {"prompt": [1]})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0
        for submit in front.job.submits:  # admitted, so that they wait no more
            front.job.send(RequestUpdate(submit.id, 1, 0, 0))
        await until(lambda: all(not flight.waits for flight in front.core.flights.values()))
        second = asyncio.create_task(front.post("/v1/completions", {"prompt": [1], "n": 2}))
        await until(lambda: len(front.job.submits) == 4)
        for task in (first, second):
            task.cancel()

    run(check, tmp_path, FakeJob(silent), waiting=2)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1], "n": 3}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 3}, "n"),
    ],
)
def test_more_continuations_than_may_ever_wait_are_not_to_be_tried_again(
    path: str, body: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async def check(front: Front) -> None:
        refused = await front.post(path, body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "retry-after" not in refused.headers

    run(check, tmp_path, waiting=2)


def test_the_page_needs_no_other_host(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
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

    run(check, tmp_path)


def test_a_chat_template_comes_with_the_model_or_the_server(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "max_tokens": 1}
    answers: list[dict[str, Any]] = []

    async def check(front: Front) -> None:
        answers.append((await front.post("/v1/chat/completions", body)).json())
        if front.job.submits:
            answers[-1] = {"prompt": text_of(front, front.job.submits[-1].prompt)}

    plain = FakeJob(ready=replace(READY, model=str(without_template(tmp_path))))
    for job, settings in ((None, {}), (plain, {}), (None, {"chat_template": str(tmp_path / "template.jinja")})):
        (directory := tmp_path / str(len(answers))).mkdir()
        run(check, directory, job, **settings)
    assert answers[0] == {"prompt": "a\nb"} and answers[2] == {"prompt": "<a><b>"}
    assert answers[1]["error"]["code"] == "no_chat_template"


def test_metrics_count_what_went_through(tmp_path: Path) -> None:
    async def cached(job: FakeJob, submit: Request) -> None:
        job.send(Stats({"pages_used": 3, "pages_free": 5}))
        await job.say(submit, [100], cached_tokens=2)
        await job.say(submit, [101, 102], "length")

    async def check(front: Front) -> None:
        await front.post("/v1/completions", {"prompt": [1, 2, 3], "n": 2, "max_tokens": 3})
        values = metrics_of((await front.get("/metrics")).text)
        expected = {
            "time_to_first_token_seconds_count": 2, "inter_token_latency_seconds_count": 2,
            "request_queue_time_seconds_count": 2, "e2e_request_latency_seconds_count": 2,
            "request_prefill_time_seconds_count": 2, "request_decode_time_seconds_count": 2,
            "request_prompt_tokens_sum": 6, "request_generation_tokens_sum": 6,
            "prefix_cache_queries_total": 6, "prefix_cache_hits_total": 4,
            "prompt_tokens_total": 6, "generation_tokens_total": 6,
            'request_success_total{finished_reason="length"}': 2, "num_requests_running": 0,
            "num_requests_waiting": 0, "kv_pages_used": 3, "kv_pages_free": 5, "restarts_total": 0,
        }  # fmt: skip
        assert {name: values[name] for name in expected} == expected

    run(check, tmp_path, FakeJob(cached))


def test_cached_tokens_of_several_prompts_are_added_up(tmp_path: Path) -> None:
    async def cached(job: FakeJob, submit: Request) -> None:
        await job.say(submit, [100], "length", cached_tokens=2)

    async def check(front: Front) -> None:
        body = {"prompt": [[1, 2, 3], [1, 2, 4]], "n": 2, "max_tokens": 1}
        usage = (await front.post("/v1/completions", body)).json()["usage"]
        assert usage["prompt_tokens"] == 6 and usage["prompt_tokens_details"] == {"cached_tokens": 4}

    run(check, tmp_path, FakeJob(cached))


def test_every_documented_metric_moves(tmp_path: Path) -> None:
    """The page names all that there are, and none of them stays at 0 whatever happens."""
    documented = set(re.findall(r"`helix:(\w+)`", (ROOT / "docs" / "serving.md").read_text()))
    moved: set[str] = set()

    async def look(front: Front) -> dict[str, float]:
        values = metrics_of((await front.get("/metrics")).text)
        names = {name: re.sub(r"(_bucket|_count|_sum)?(\{.*)?$", "", name) for name in values}
        # These come with the engine's first gauges.
        assert {*names.values(), "cache_config_info", "spec_decode_num_accepted_tokens_per_pos_total"} == documented
        moved.update(names[name] for name, value in values.items() if value)
        return values

    async def check(front: Front) -> None:
        request = asyncio.create_task(front.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}))
        await until(lambda: front.job.submits)
        assert (await look(front))["num_requests_waiting"] == 1
        front.job.send(RequestUpdate(1, 3, 2, 0))
        gauges = {"pages": 9, "pages_used": 2, "pages_cached": 3, "pages_free": 4, "preemptions": 5}
        front.job.send(Stats(gauges | {"drafts": 3, "drafts_kept_0": 2}))
        await until(lambda: front.core.stats)
        assert (await look(front))["num_requests_running"] == 1
        (submit,) = front.job.submits
        await front.job.say(submit, [7, 7])
        await until(lambda: front.core.flights[1].drawn)
        front.job.die()
        await until(lambda: len(front.job.submits) == 2)
        await front.job.say(submit, [7, 7], "length")
        assert (await request).status_code == 200
        front.job.send(Stats({"pages": 9, "preemptions": 2}))  # the new job's own
        await until(lambda: front.core.stats["preemptions"] == 2)
        values = await look(front)
        assert (values["num_preemptions_total"], values["restarts_total"]) == (7, 1)
        assert moved == documented

    run(check, tmp_path, FakeJob(silent))


def test_a_request_that_is_given_up_is_counted_too(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        _reader, writer = await front.connect("/v1/completions", {"prompt": [1], "max_tokens": 9})
        await until(lambda: front.job.submits)
        writer.close()
        await until(lambda: front.job.aborts)
        values = metrics_of((await front.get("/metrics")).text)
        assert values['request_success_total{finished_reason="abort"}'] == 1
        assert values["e2e_request_latency_seconds_count"] == 1

    run(check, tmp_path, FakeJob(silent))


def test_keys_and_their_owners(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nada key-1\nbob key-2\n")

    async def check(front: Front) -> None:
        body = {"prompt": [1], "max_tokens": 1}
        for header in ({}, {"authorization": "Bearer key-3"}, {"authorization": "Basic key-1"}):
            answer = await front.post("/v1/completions", body, headers=header)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert (await front.get("/v1/models")).status_code == 401
        assert (await front.get("/health")).status_code == (await front.get("/livez")).status_code == 200
        for key, more in (
            ("key-1", {}),
            ("key-2", {}),
            ("key-1", {"cache_salt": "s"}),
            ("key-1", {"cache_salt": "bob"}),
        ):
            answer = await front.post("/v1/completions", body | more, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert len({submit.salt for submit in front.job.submits}) == 4

    run(check, tmp_path, api_keys=str(keys))


@pytest.mark.parametrize("other", ["", "Bearer", "Bearer ", "Bearer undefined", "Basic cHJveHk6eA=="])
def test_a_right_key_in_one_header_is_enough(other: str, tmp_path: Path) -> None:
    """Clients of Anthropic's interface send an empty `Authorization` too, or proxies put theirs there."""
    (path := tmp_path / "keys").write_text("ada key-1\n")
    keys = Keys(str(path))
    assert keys.owner({"authorization": other, "x-api-key": "key-1"}) == "ada"
    assert keys.owner({"authorization": "Bearer key-1", "x-api-key": ""}) == "ada"
    for wrong in ("", "key-2"):
        with pytest.raises(ApiError, match="a key is needed"):
            keys.owner({"authorization": other, "x-api-key": wrong})


def test_a_key_may_have_any_letters(tmp_path: Path) -> None:
    """Clients send UTF-8, and the server sees its bytes one by one."""
    (path := tmp_path / "keys").write_text("ada clé-à\n", encoding="utf-8")
    keys = Keys(str(path))
    assert keys.owner({"authorization": "Bearer clé-à".encode().decode("latin-1")}) == "ada"
    assert keys.owner({"x-api-key": "clé-à".encode().decode("latin-1")}) == "ada"
    with pytest.raises(ApiError):
        keys.owner({"x-api-key": "cle-a"})


def test_a_file_without_keys_is_refused_beside_an_empty_key_too(tmp_path: Path) -> None:
    """HELIX_API_KEY may be set to nothing: a server of other hosts would be everybody's."""
    (keys := tmp_path / "keys").write_text("# none yet\n")
    for key in (None, "", "key-1"):
        with pytest.raises(ValueError, match="holds no key"):
            Keys(str(keys), key)


BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", b"{", 400, "not JSON"),
    ("/v1/completions", b"\xff", 400, "not JSON"),
    ("/v1/completions", b"[]", 400, "object"),
    ("/v1/completions", {}, 400, "prompt is required"),
    ("/v1/completions", {"prompt": 3}, 400, "prompt=3"),
    ("/v1/completions", {"prompt": []}, 400, "empty"),
    ("/v1/completions", {"prompt": [[]]}, 400, "empty"),
    ("/v1/completions", {"prompt": [4096]}, 400, "[0, 4096)"),
    ("/v1/completions", {"prompt": [-1]}, 400, "greater than or equal to 0"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature=-1"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature='hot'"),
    ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p=0"),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n=0"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens=-1"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 5000}, 400, "4096 tokens"),
    ("/v1/completions", {"prompt": [1] * 4096}, 400, "4096 tokens"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [9999]}, 400, "stop_token_ids has 9999"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "not a token id"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"9999": 1}}, 400, "logit_bias has 9999"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"0" * 5000: 1}}, 400, "not a token id"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"1": 101}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): "x" for i in range(301)}}, 400, "301 keys"),
    ("/v1/completions", {"prompt": [[1]] * 300}, 400, "300 continuations"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
    ("/v1/completions", {"prompt": "x", "best_of": 2}, 400, "best_of is not supported"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1}, 400, "prompt_logprobs is not supported"),
    ("/v1/completions", {"prompt": "x", "stream_options": {}}, 400, "stream"),
    ("/v1/completions", {"prompt": "x", "model": "gpt-9"}, 404, "demo-model"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "x"}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "chat_template": "y"}, 400, "chat_template is"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400, "messages.0.content",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, 400, "tools"),
    ("/tokenize", {}, 400, "prompt or messages"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens='x'"),
    ("/detokenize", {"tokens": [1, 4096]}, 400, "tokens has 4096"),
    ("/v1/completion", {}, 404, "/v1/completion"),
    ("/v1/models", {}, 405, "Method"),
]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [{}] * 400_000},
        {"prompt": [[{}]] * 200_000},
        {"prompt": "x", "stop": [0] * 400_000},
        {"prompt": "x", "chat_template_kwargs": {str(i): [] for i in range(200_000)}},
    ],
    ids=lambda body: str([*body][-1]),
)
def test_a_large_mistake_costs_no_more_than_a_small_one(body: dict[str, Any]) -> None:
    """Without an end at the first one, each takes seconds in which nobody else is answered."""
    schema = Chat if "chat_template_kwargs" in body else Completion
    content = json.dumps(body).encode()
    begin = time.process_time()
    with pytest.raises(ApiError):
        parsed(schema, content)
    assert time.process_time() - begin < 2.5


@given(st.data())
def test_whatever_a_body_holds_is_read_or_refused_by_name(data: st.DataObject) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
    for schema in (Completion, Chat, Tokenize, Detokenize, Responses, Messages, Count):
        body = data.draw(st.dictionaries(st.sampled_from([*schema.model_fields, *REFUSED, "else"]), values, max_size=6))
        try:
            parsed(schema, json.dumps(body).encode())
            continue
        except ApiError as refused:
            error = refused
        assert error.status == 400 and error.message and "\n" not in error.message, error.message


def test_bad_requests_are_told_what_is_wrong(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        for path, body, status, words in BAD:
            answer = await front.post(path, None, content=body if isinstance(body, bytes) else json.dumps(body))
            error = answer.json()["error"]
            assert (answer.status_code, words in error["message"]) == (status, True), (path, body, answer.text)
            assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
        assert front.job.submits == [] and front.core.flights == {}

    run(check, tmp_path)
