"""Around all routes: ids, the log, CORS; and what the server says of itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helix.checks import check
from helix.engine.request import Request, RequestUpdate
from launch.client.frames import Stats
from launch.client.schemas import Chat, Completion
from launch.inputs.compose import composed
from tests.serving.front import READY, FakeJob, Front, metrics_of, run, silent, until

pytestmark = pytest.mark.timeout(120)
HEX = "[0-9a-f]{32}"


async def cached(job: FakeJob, submit: Request) -> None:
    job.send(RequestUpdate(submit.id, 3, 2, 0))
    await job.say(submit, [100], cached_tokens=2)
    await job.say(submit, [101], "error" if submit.prompt[0] == 9 else "length", reason="planted")


@pytest.mark.parametrize("given, kept", [("ours-1", True), ("two words", False), ("x" * 129, False), (None, False)])
def test_ids_are_given_back_and_are_in_answers_and_errors(given: str | None, kept: bool, tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        headers = {} if given is None else {"x-request-id": given}
        for path, body, status in (
            ("/v1/completions", {"prompt": [1]}, 200),
            ("/v1/completions", {"prompt": [1], "stream": True}, 200),
            ("/v1/completions", {"prompt": 1}, 400),
            ("/v1/nowhere", {}, 404),
        ):
            answer = await front.post(path, body, headers=headers)
            assert answer.status_code == status
            (found,) = answer.headers.get_list("x-request-id")
            assert found == given if kept else re.fullmatch(HEX, found)
            assert (f'"cmpl-{found}"' if status == 200 else f'"request_id":"{found}"') in answer.text
        answer = await front.post("/v1/completions", {"prompt": [9], "stream": True}, headers=headers)
        assert f'"request_id":"{answer.headers["x-request-id"]}"' in answer.text

    run(check, tmp_path, FakeJob(cached))


def test_the_log_has_a_line_for_each_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it took, and nothing of what it said; probes are not logged."""
    keys = tmp_path / "keys"
    keys.write_text("ada key-1\n")

    async def check(front: Front) -> None:
        for body in ({"prompt": [1, 2, 3], "n": 2}, {"prompt": [1, 2, 3], "stream": True}, {"prompt": [9]}, {"n": 0}):
            headers = {"authorization": "Bearer key-1", "x-request-id": "its-id"}
            await front.post("/v1/completions?a=b", body, headers=headers)
        for path in ("/health", "/livez", "/metrics", "/v1/loads", "/v1/models", "/a%0Ab"):
            await front.get(path, headers={"x-request-id": "i"})

    run(check, tmp_path, FakeJob(cached), api_keys=str(keys))
    seconds = r"\d+\.\d{3}s"
    expected = (
        f"its-id ada POST /v1/completions 200 in=3 cached=2 out=4 end=length,length first={seconds} total={seconds}",
        f"its-id ada POST /v1/completions 200 in=3 cached=2 out=2 end=length first={seconds} total={seconds}",
        f"its-id ada POST /v1/completions 500 in=1 cached=2 out=2 end=error first={seconds} total={seconds}",
        f"its-id ada POST /v1/completions 400 total={seconds}",
        f"i - GET /v1/models 401 total={seconds}",
        f"i - GET /a%0Ab 404 total={seconds}",
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} " + pattern, line), (line, pattern)


def test_a_client_that_left_is_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def check(front: Front) -> None:
        for stream in (False, True):
            _reader, writer = await front.connect("/v1/completions", {"prompt": [1], "stream": stream})
            await until(lambda: front.core.flights)
            writer.close()
            await until(lambda: not front.core.flights)

    run(check, tmp_path, FakeJob(silent))
    said = capsys.readouterr().out
    assert [line.split()[4:9] for line in said.splitlines()] == [
        ["/v1/completions", status, "in=1", "cached=0", "out=0"] for status in ("499", "200")
    ]
    assert said.count("end=abort") == 2


ORIGIN = "https://chat.example"


def test_pages_of_other_origins_may_use_it_where_they_are_listed(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origin, status, allowed in ((ORIGIN, 200, ORIGIN), ("https://other.example", 400, None)):
            answer = await front.options("/v1/completions", headers={"origin": origin} | wanted)
            assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, allowed)
            assert answer.headers["access-control-allow-headers"] == "authorization"
        for body, status in (({"prompt": [1], "stream": True}, 200), ({}, 400)):
            answer = await front.post("/v1/completions", body, headers={"origin": ORIGIN})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()

    run(check, tmp_path, cors=[ORIGIN])


def test_by_default_no_page_of_another_origin_may_use_it(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
        assert (await front.options("/v1/completions", headers=headers)).status_code == 405
        answer = await front.post("/v1/completions", {"prompt": [1]}, headers=headers)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers

    run(check, tmp_path)


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=f"serve.cors has '{origin}', which is no origin"):
        check(composed([f"serve.cors=['{origin}']"]))
    check(composed(["serve.cors=[https://chat.example:8443,app://notes,*]"]))


def test_loads_are_what_routers_read(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 9}
        connections = [await front.connect("/v1/completions", body) for _ in range(3)]
        await until(lambda: len(front.job.submits) == 3)
        front.job.send(RequestUpdate(1, 3, 0, 0))
        front.job.send(RequestUpdate(2, 3, 2, 0))
        front.job.send(RequestUpdate(2, new_ids=(1, 2, 3)))
        front.job.send(Stats({"pages": 64, "pages_used": 16, "pages_cached": 32, "pages_free": 16}))
        await until(lambda: front.core.stats)
        loads = (await front.get("/v1/loads?include=core,queues")).json()
        (load,) = loads["loads"]
        rate = load.pop("gen_throughput")
        assert rate > 0 and load == {
            "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_total_reqs": 3,
            "num_waiting_uncached_tokens": 3,
            "num_used_tokens": READY.kv_tokens // 4, "num_cached_tokens": READY.kv_tokens // 2,
            "max_total_num_tokens": READY.kv_tokens, "max_running_requests": 8, "token_usage": 0.25,
            "utilization": 0.25, "cache_hit_rate": 2 / 3,
        }  # fmt: skip
        assert loads["dp_rank_count"] == 1 and loads["aggregate"] == {
            "total_running_reqs": 2, "total_waiting_reqs": 1, "total_reqs": 3, "avg_token_usage": 0.25,
            "avg_throughput": rate, "avg_utilization": 0.25,
        }  # fmt: skip
        values = metrics_of((await front.get("/metrics")).text)
        assert (values["num_requests_running"], values["num_requests_waiting"]) == (2, 1)
        for _reader, writer in connections:
            writer.close()
        front.core.draining = True
        assert (await front.get("/v1/loads")).status_code == 503

    run(check, tmp_path, FakeJob(silent))


def test_the_description_is_complete(tmp_path: Path) -> None:
    """Each route is in it, each reference leads somewhere, and fields are those of the schemas."""

    async def check(front: Front) -> None:
        told = (await front.get("/openapi.json")).json()
        assert told["openapi"].startswith("3.1") and "security" not in told
        assert {(path, method.upper()) for path, of in told["paths"].items() for method in of} == {
            (path.replace(":path", ""), method) for path, method, *_ in front.api._routes
        }
        schemas = told["components"]["schemas"]
        assert references(told) <= {f"#/components/schemas/{name}" for name in schemas}
        for schema in (Chat, Completion):
            assert schemas[schema.__name__]["properties"].keys() == schema.model_fields.keys()
            assert all("description" in of for of in schemas[schema.__name__]["properties"].values())
        chat = told["paths"]["/v1/chat/completions"]["post"]
        assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Chat")
        assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
        assert all(of["summary"] != "None" for path in told["paths"].values() for of in path.values())

    run(check, tmp_path)


def test_the_description_says_what_answers_are_and_which_need_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada key-1\n")

    async def check(front: Front) -> None:
        told = (await front.get("/openapi.json")).json()
        for path in ("/", "/page/{name}", "/health", "/livez", "/openapi.json", "/metrics", "/v1/models", "/v1/loads"):
            operation, url = told["paths"][path]["get"], path.format(name="page.css")
            needed = operation.get("security", told["security"]) != []
            assert (await front.get(url)).status_code == (401 if needed else 200), path
            answer = await front.get(url, headers={"authorization": "Bearer key-1"})
            (kind,) = operation["responses"]["200"]["content"]
            assert kind in ("*/*", answer.headers["content-type"].partition(";")[0]), path

    run(check, tmp_path, api_keys=str(keys))


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()
