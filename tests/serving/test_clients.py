"""Programs that others make, installed where somebody wants to run this: clients, coding agents and routers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import httpx
import pytest

from helix.engine.request import Request
from tests.e2e.command_line import Job
from tests.serving.api_server import DEMO, READY, ApiServer, FakeJob, Serve, tokens_of
from tests.serving.chats import END, USER, Talk
from tests.serving.test_adapters import OWN, SAYS
from tests.serving.test_server import Server, served

pytestmark = pytest.mark.clients


async def test_anthropic(model: Path, talk: Talk) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    api_server = await talk(SAYS)
    client = anthropic.AsyncAnthropic(base_url=api_server.url, api_key="-", max_retries=0)
    wanted: dict[str, Any] = {"model": model.name, "max_tokens": 200, "messages": [USER], "tools": [OWN]}
    wanted["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = await client.messages.create(**wanted)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[2].input == {"city": "Paris"} and answer.stop_reason == "tool_use"
    async with client.messages.stream(**wanted) as stream:
        text = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Looking." and final.content[2].input == {"city": "Paris"}
    assert final.usage == answer.usage
    counted = await client.messages.count_tokens(**{k: v for k, v in wanted.items() if k != "max_tokens"})
    assert counted.input_tokens == answer.usage.input_tokens
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "sunny"}
    turn = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    await client.messages.create(**wanted | {"messages": turn})
    assert "<|im_start|>tool\nsunny" in api_server.session.tokenizer.backend.decode(api_server.job.submits[-1].prompt)
    with pytest.raises(anthropic.NotFoundError, match="is not served"):
        await client.messages.create(**wanted | {"model": "x"})


# ---- two servers behind a router: answers are the servers' own, and one of them may die

# In a Python of their own, on PATH: smg 1.13.0 and vllm-router 0.1.17 are what has been tried.
ROUTERS = {
    "smg": ["smg", "launch", "--policy", "power_of_two", "--load-monitor-interval", "1"],
    "vllm-router": ["vllm-router", "--policy", "cache_aware"],
}
OPTIONS = f"model.path={DEMO}", "layout.kvp=1", "decode.max_batch=16"
MODEL, REQUESTS, KILLED_AT, TOKENS = DEMO.name, 24, 8, 40


@dataclass
class Fleet:
    url: str
    servers: list[Server]
    router: Job

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": MODEL, "temperature": 0} | body, timeout=60)


@pytest.fixture(params=ROUTERS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"no {name} on PATH: python -m venv DIR && DIR/bin/pip install {name} && export PATH=$PATH:DIR/bin")
    with ExitStack() as jobs:
        servers = []
        for number in range(2):
            (directory := tmp_path / str(number)).mkdir()
            servers.append(jobs.enter_context(served(directory, *OPTIONS)))
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            port, metrics = one.getsockname()[1], other.getsockname()[1]
        where = ["--host=127.0.0.1", f"--port={port}", "--prometheus-host=127.0.0.1", f"--prometheus-port={metrics}"]
        workers = ["--health-check-interval-secs=1", "--worker-urls", *(server.url for server in servers)]
        router = Job([*ROUTERS[name], *where, *workers], log=tmp_path / "router")
        jobs.callback(router.process.kill)  # smg writes its title over the mark by which a job's processes are found
        fleet = Fleet(f"http://127.0.0.1:{port}", servers, router)
        while not _routes(fleet):
            assert router.process.poll() is None, router.log.read_text()
        yield fleet


def _routes(fleet: Fleet) -> bool:
    with suppress(httpx.HTTPError):
        return fleet.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    return False


def streamed(answer: httpx.Response) -> tuple[str, bool]:
    """A stream's text, and whether it came to its end."""
    text, whole = "", False
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                whole |= choice["finish_reason"] == "length"
    return text, whole


def test_answers_come_through(fleet: Fleet) -> None:
    """Completions and chats, whole and streamed, as they come without the router; both servers have work."""
    request_body = {"messages": [{"role": "user", "content": "def f"}]}
    for path, more in (("/v1/completions", {"prompt": "def f"}), ("/v1/chat/completions", request_body)):
        body = {"model": MODEL, "temperature": 0, "max_tokens": 12} | more
        straight = httpx.post(f"{fleet.servers[0].url}{path}", json=body, timeout=60).json()["choices"][0]
        text = straight["text"] if "text" in straight else straight["message"]["content"]
        through = fleet.post(path, **body).json()
        assert through["choices"] == [straight] and through["usage"]["completion_tokens"] == 12, through
        with httpx.stream("POST", f"{fleet.url}{path}", json=body | {"stream": True}, timeout=60) as stream:
            assert streamed(stream) == (text, True)
    refused = fleet.post("/v1/completions", prompt="x", max_tokens=1, best_of=2)
    assert refused.status_code == 400 and "best_of is not supported" in refused.json()["error"]["message"]
    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(lambda i: fleet.post("/v1/completions", prompt=f"{i} {i}", max_tokens=30), range(16)):
            assert answer.status_code == 200
    assert all(" POST /v1/completions 200 " in server.log.read_text() for server in fleet.servers)


def test_a_server_that_dies_takes_only_what_it_had_begun(fleet: Fleet) -> None:
    """Streams under way there; all other answers come from the other server, and later ones too."""
    together, killed = Barrier(KILLED_AT + 1), Event()  # those before the death, and the death

    def complete(number: int) -> tuple[bool, bool]:
        """Tells whether an answer came whole, and whether it is a stream that had begun."""
        body = {"model": MODEL, "prompt": f"def f{number}(", "max_tokens": TOKENS, "ignore_eos": True}
        body["stream"], begun = number % 2 == 0, False
        together.wait(60) if number <= KILLED_AT else killed.wait(60)
        if number == KILLED_AT:
            os.kill(fleet.servers[1].process.pid, signal.SIGKILL)
            killed.set()
        with suppress(httpx.HTTPError), httpx.stream("POST", f"{fleet.url}/v1/completions", json=body) as answer:
            begun = body["stream"] and answer.status_code == 200  # the server sends headers at once
            if begun:
                return streamed(answer)[1], begun
            return json.loads(answer.read()).get("usage", {}).get("completion_tokens") == TOKENS, begun
        return False, begun

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = [*pool.map(complete, range(REQUESTS))]
    for number, (whole, begun) in enumerate(answers):
        assert whole or (begun and number <= KILLED_AT), (number, answers, fleet.router.log.read_text()[-2000:])
    assert sum(whole for whole, _ in answers) > REQUESTS // 2


# ---- coding agents, over a scripted model: one call of their own tools, its result, and an answer

# In folders of their own, on PATH: @openai/codex 0.171.0, @qwen-code/qwen-code 0.15.10, opencode-ai 1.18.33 and
# cline 3.0.65 of npm, aider-chat 0.86.2 and openhands 1.16.0 of PyPI are what has been tried.
CODEX = """
model = "{name}"
model_provider = "helix"
[model_providers.helix]
name = "helix"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""
PROVIDER = {"npm": "@ai-sdk/openai-compatible", "name": "helix", "options": {"baseURL": "{url}/v1", "apiKey": "-"}}
PROVIDER["models"] = {"{name}": {"name": "{name}", "limit": {"context": 65536, "output": 4096}}}
OPENCODE = {"provider": {"helix": PROVIDER}, "model": "helix/{name}", "autoupdate": False, "share": "disabled"}
CLINE = {"provider": "openai-compatible", "apiKey": "-", "model": "{name}", "baseUrl": "{url}/v1"}
PROVIDERS = {"openai-compatible": {"settings": CLINE, "updatedAt": "2026-11-29T00:00:00Z", "tokenSource": "manual"}}
CLINE_PROVIDERS = {"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}, "providers": PROVIDERS}
# What each reads in its home.
CONFIGS = {
    ".codex/config.toml": CODEX,
    ".config/opencode/opencode.json": json.dumps(OPENCODE),
    ".cline/settings/providers.json": json.dumps(CLINE_PROVIDERS),
}
COMMAND = "echo $((6 * 7)) > made"
BASH = {"command": COMMAND, "description": "d"}
AIDER = ["--model=openai/{name}", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--message"]
OPENHANDS = ["openhands", "--headless", "--override-with-envs", "--json", "-t"]
CODEX_OPTIONS = ["codex", "exec", "--skip-git-repo-check", "--sandbox=danger-full-access"]
PATCH = "*** Begin Patch\n*** Add File: made\n+42\n*** End Patch"
# The command before the question, and the tool that the model calls.
AGENTS: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "codex": (CODEX_OPTIONS, "exec_command", {"cmd": COMMAND}),
    # Under a name for which Codex offers a custom tool.
    "codex with apply_patch": ([*CODEX_OPTIONS, "--model=gpt-5.5"], "apply_patch", {"input": PATCH}),
    "qwen": (["qwen", "--yolo", "-p"], "run_shell_command", BASH | {"is_background": False}),
    "opencode": (["opencode", "run"], "bash", BASH),
    # Given a data directory, it starts no daemon.
    "cline": (["cline", "--data-dir=../home/.cline"], "run_commands", {"commands": [COMMAND]}),
    "aider": (["aider", *AIDER], "", {}),
    "openhands": (OPENHANDS, "terminal", {"command": COMMAND, "security_risk": "LOW"}),
}
THOUGHT = "Hm.\n</think>\n\n"
EDITS = "made\n```\n42\n```"
Reply = Callable[[str], str]  # from a prompt


@pytest.fixture
def replying(serve: Serve, agent_model: Path) -> Callable[[Reply], Awaitable[ApiServer]]:
    """A factory of front ends with room for what agents send; await it with what the model says."""
    (end,) = tokens_of(END, str(agent_model))

    async def start(reply: Reply) -> ApiServer:
        async def script(job: FakeJob, submit: Request) -> None:
            prompt = api_server.session.tokenizer.decode(submit.prompt)
            for token in tokens_of(f"{THOUGHT}{reply(prompt)}", str(agent_model)):
                await job.emit(submit, [token])
            await job.emit(submit, [end], "stop")

        room = 1 << 17
        ready = replace(
            READY, model=str(agent_model), vocab=4100, eos=(0, end), context=room, max_length=room, kv_tokens=room
        )
        api_server = await serve(FakeJob(script, ready), name="agent-model", aliases=["gpt-*"])
        return api_server

    return start


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_calls_a_tool_and_reads_its_result(
    name: str, replying: Callable[[Reply], Awaitable[ApiServer]], tmp_path: Path
) -> None:
    (program, *options), tool, arguments = AGENTS[name]
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on PATH")
    call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
    api_server = await replying(lambda prompt: "It is 42." if "<|im_start|>tool" in prompt else call if tool else EDITS)
    facts = {"url": api_server.url, "name": "agent-model"}

    def fill(text: str) -> str:
        return text.replace("{url}", facts["url"]).replace("{name}", facts["name"])

    for path, content in CONFIGS.items():
        (file := tmp_path / "home" / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(fill(content))
    (work := tmp_path / "work").mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "OPENAI_MODEL": facts["name"]}
    env |= {f"{name}_API_KEY": "-" for name in ("OPENAI", "LLM")} | {"LLM_MODEL": f"openai/{facts['name']}"}
    env |= dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL"), f"{api_server.url}/v1")
    question = "How much is six times seven? Write it to the file made."
    process = await asyncio.create_subprocess_exec(
        program, *map(fill, options), question, cwd=work, env=env, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(120):
            said, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    assert (work / "made").read_text() == "42\n", said.decode()
    assert not tool or b"It is 42." in said
    if not tool:
        return
    # The second prompt begins with the first one and its answer, which OpenHands returns without reasoning.
    decode, model = api_server.session.tokenizer.decode, str(api_server.job.ready.model)
    prompts = [submit.prompt for submit in api_server.job.submits]
    first, second = (ids.tolist() for ids in prompts if "<tool_call>" in decode(ids))  # others ask for a title
    opened = len(tokens_of("<think>\n", model))
    known = first[:-opened] if name == "openhands" else first + tokens_of(f"{THOUGHT}{call}{END}", model)
    assert second[: len(known)] == known
