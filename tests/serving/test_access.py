"""Around all routes: keys, ids, the log, CORS; and what the server says of itself."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from helix.checks import check
from helix.engine.request import Request, RequestUpdate
from launch.client.engine_messages import Stats
from launch.client.errors import ApiError
from launch.client.schemas import Chat, Completion
from launch.inputs.compose import compose_config
from launch.serving.security import ApiKeys
from tests.serving.api_server import READY, FakeJob, Serve, api_server, pieces, silent, until
from tests.serving.chats import CHATS, COMPLETIONS

HEX = "[0-9a-f]{32}"
ORIGIN = "https://chat.example"


async def cached(job: FakeJob, submit: Request) -> None:
    job.send(RequestUpdate(submit.id, 3, 2, 0))
    await job.emit(submit, [100], cached_tokens=2)
    await job.emit(submit, [101], "error" if submit.prompt[0] == 9 else "length", reason="planted")


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (path := tmp_path / "keys").write_text("# ours\nada key-1\nbob key-2\neve clé-à\n", encoding="utf-8")
    return str(path)


async def test_keys_and_their_owners(keys: str, serve: Serve) -> None:
    api_server = await serve(api_keys=keys)
    body = {"prompt": [1], "max_tokens": 1}
    for header in ({}, {"authorization": "Bearer key-3"}, {"authorization": "Basic key-1"}):
        answer = await api_server.post(COMPLETIONS, body, headers=header)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    answer = await api_server.post("/v1/messages", body, headers={"x-api-key": "key-3"})
    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    assert (await api_server.get("/v1/models")).status_code == 401
    assert (await api_server.get("/health")).status_code == (await api_server.get("/livez")).status_code == 200
    for key, more in ("key-1", {}), ("key-2", {}), ("key-1", {"cache_salt": "s"}), ("key-1", {"cache_salt": "bob"}):
        answer = await api_server.post(COMPLETIONS, body | more, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    assert len({submit.cache_salt for submit in api_server.job.submits}) == 4
    request_body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert (await api_server.post("/v1/messages", request_body, headers={"x-api-key": "key-1"})).status_code == 200


@pytest.mark.parametrize("other", ["", "Bearer", "Bearer ", "Bearer undefined", "Basic cHJveHk6eA=="])
def test_a_right_key_in_one_header_is_enough(other: str, keys: str) -> None:
    """Clients of Anthropic's interface send an empty `Authorization` too, or proxies put theirs there."""
    known = ApiKeys(keys)
    assert known.owner({"authorization": other, "x-api-key": "key-1"}) == "ada"
    assert known.owner({"authorization": "Bearer key-1", "x-api-key": ""}) == "ada"
    for wrong in ("", "key-3", "cle-a"):
        with pytest.raises(ApiError, match="send an API key"):
            known.owner({"authorization": other, "x-api-key": wrong})


def test_a_key_may_have_any_letters(keys: str) -> None:
    """Clients send UTF-8, and the server sees its bytes one by one."""
    sent = "clé-à".encode().decode("latin-1")
    assert ApiKeys(keys).owner({"authorization": f"Bearer {sent}"}) == ApiKeys(keys).owner({"x-api-key": sent}) == "eve"


def test_a_file_without_keys_is_refused_beside_an_empty_key_too(tmp_path: Path) -> None:
    """HELIX_API_KEY may be set to nothing: a server of other hosts would be everybody's."""
    (empty := tmp_path / "empty").write_text("# none yet\n")
    for key in (None, "", "key-1"):
        with pytest.raises(ValueError, match="has no keys"):
            ApiKeys(str(empty), key)


@pytest.mark.parametrize("given, kept", [("ours-1", True), ("two words", False), ("x" * 129, False), (None, False)])
async def test_ids_are_given_back_and_are_in_answers_and_errors(given: str | None, kept: bool, serve: Serve) -> None:
    api_server = await serve(FakeJob(cached))
    headers = {} if given is None else {"x-request-id": given}
    for path, body, status in (
        (COMPLETIONS, {"prompt": [1]}, 200),
        (COMPLETIONS, {"prompt": [1], "stream": True}, 200),
        (COMPLETIONS, {"prompt": 1}, 400),
        ("/v1/nowhere", {}, 404),
    ):
        answer = await api_server.post(path, body, headers=headers)
        assert answer.status_code == status
        (found,) = answer.headers.get_list("x-request-id")
        assert found == given if kept else re.fullmatch(HEX, found)
        assert (f'"cmpl-{found}"' if status == 200 else f'"request_id":"{found}"') in answer.text
    answer = await api_server.post(COMPLETIONS, {"prompt": [9], "stream": True}, headers=headers)
    assert f'"request_id":"{answer.headers["x-request-id"]}"' in answer.text
    assert pieces(answer)[-1]["error"]["message"] == "planted" and "event: error\n" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_the_log_has_a_line_for_each_request(keys: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With what it took, and nothing of what it said; probes are not logged."""
    caplog.set_level(logging.INFO, "helix.access")
    async with api_server(tmp_path, FakeJob(cached), api_keys=keys) as made:
        for body in ({"prompt": [1, 2, 3], "n": 2}, {"prompt": [1, 2, 3], "stream": True}, {"prompt": [9]}, {"n": 0}):
            headers = {"authorization": "Bearer key-1", "x-request-id": "its-id"}
            await made.post("/v1/completions?a=b", body, headers=headers)
        for path in ("/health", "/livez", "/metrics", "/v1/loads", "/v1/models", "/a%0Ab"):
            await made.get(path, headers={"x-request-id": "i"})
    first, total = r"first_s=\d+\.\d+", r"total_s=\d+\.\d+"
    expected = (
        f"its-id ada POST /v1/completions 200 in=3 cached=2 out=4 end=length,length {first} {total}",
        f"its-id ada POST /v1/completions 200 in=3 cached=2 out=2 end=length {first} {total}",
        f"its-id ada POST /v1/completions 500 in=1 cached=2 out=2 end=error {first} {total}",
        f"its-id ada POST /v1/completions 400 {total}",
        f"i - GET /v1/models 401 {total}",
        f"i - GET /a%0Ab 404 {total}",
    )  # fmt: skip
    lines = [record.getMessage() for record in caplog.records if record.name == "helix.access"]
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    fields = caplog.records[0].__dict__["fields"]
    assert {"id": "its-id", "owner": "ada", "status": 200, "in": 3, "cached": 2, "out": 4}.items() <= fields.items()


async def test_pages_of_other_origins_may_use_it_where_they_are_listed(serve: Serve) -> None:
    """By default none may."""
    api_server, plain = await serve(cors=[ORIGIN]), await serve()
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, status, allowed in ((ORIGIN, 200, ORIGIN), ("https://other.example", 400, None)):
        answer = await api_server.client.options(COMPLETIONS, headers={"origin": origin} | wanted)
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, allowed)
        assert answer.headers["access-control-allow-headers"] == "authorization"
    for body, status in (({"prompt": [1], "stream": True}, 200), ({}, 400)):
        answer = await api_server.post(COMPLETIONS, body, headers={"origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    assert (await plain.client.options(COMPLETIONS, headers={"origin": ORIGIN} | wanted)).status_code == 405
    answer = await plain.post(COMPLETIONS, {"prompt": [1]}, headers={"origin": ORIGIN})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=f"serve.cors has '{origin}', which is not an origin"):
        check(compose_config([f"serve.cors=['{origin}']"]))
    check(compose_config(["serve.cors=[https://chat.example:8443,app://notes,*]"]))


async def test_loads_are_what_routers_read(serve: Serve) -> None:
    api_server = await serve(FakeJob(silent))
    body = {"prompt": [1, 2, 3], "max_tokens": 9}
    connections = [await api_server.connect(COMPLETIONS, body) for _ in range(3)]
    await until(lambda: len(api_server.job.submits) == 3)
    api_server.job.send(RequestUpdate(1, 3, 0, 0))
    api_server.job.send(RequestUpdate(2, 3, 2, 0))
    api_server.job.send(RequestUpdate(2, new_token_ids=(1, 2, 3)))
    api_server.job.send(Stats({"pages": 64, "pages_used": 16, "pages_cached": 32, "pages_free": 16}))
    await until(lambda: api_server.engine_client.stats)
    loads = (await api_server.get("/v1/loads?include=core,queues")).json()
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
    values = await api_server.metrics()
    assert (values["num_requests_running"], values["num_requests_waiting"]) == (2, 1)
    for _reader, writer in connections:
        writer.close()
    api_server.engine_client.draining = True
    assert (await api_server.get("/v1/loads")).status_code == 503


async def test_the_description_is_complete(serve: Serve) -> None:
    """Each route is in it, each reference leads somewhere, and fields are those of the schemas."""
    api_server = await serve()
    openapi = (await api_server.get("/openapi.json")).json()
    assert openapi["openapi"].startswith("3.1") and "security" not in openapi
    assert {(path, method.upper()) for path, of in openapi["paths"].items() for method in of} == {
        (path.replace(":path", ""), method) for path, method, *_ in api_server.api._routes
    }
    schemas = openapi["components"]["schemas"]
    assert references(openapi) <= {f"#/components/schemas/{name}" for name in schemas}
    for schema in (Chat, Completion):
        assert schemas[schema.__name__]["properties"].keys() == schema.model_fields.keys()
        assert all("description" in of for of in schemas[schema.__name__]["properties"].values())
    chat = openapi["paths"][CHATS]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Chat")
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert all(of["summary"] != "None" for path in openapi["paths"].values() for of in path.values())


async def test_the_description_says_what_answers_are_and_which_need_a_key(keys: str, serve: Serve) -> None:
    api_server = await serve(api_keys=keys)
    openapi = (await api_server.get("/openapi.json")).json()
    for path in ("/", "/page/{name}", "/health", "/livez", "/openapi.json", "/metrics", "/v1/models", "/v1/loads"):
        operation, url = openapi["paths"][path]["get"], path.format(name="page.css")
        needed = operation.get("security", openapi["security"]) != []
        assert (await api_server.get(url)).status_code == (401 if needed else 200), path
        answer = await api_server.get(url, headers={"authorization": "Bearer key-1"})
        (kind,) = operation["responses"]["200"]["content"]
        assert kind in ("*/*", answer.headers["content-type"].partition(";")[0]), path


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()
