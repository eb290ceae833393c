"""Fixtures of servers, which end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.serving.api_server import (
    READY,
    ApiServer,
    FakeJob,
    Serve,
    api_server,
    scripted_reply,
    text_of,
    tokens_of,
    without_template,
)
from tests.serving.browser import Browse, PageDriver, ScriptedJob, opened, started
from tests.serving.chats import END, Talk, chat_model


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Selects asyncio with uvloop."""
    return "asyncio", {"use_uvloop": True}  # like the server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extends the grammar compiler's timeout."""
    monkeypatch.setattr("launch.client.grammar_compiler.COMPILE_S", 60.0)  # the machine may be busy


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """A factory of front ends, which end with the test; await it with a job and settings."""
    async with AsyncExitStack() as servers:

        async def start(job: Any = None, **settings: Any) -> ApiServer:
            return await servers.enter_async_context(api_server(tmp_path, job, **settings))

        yield start


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer with a chat's special tokens and template."""
    return chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `model`, with a template that has tools, calls and reasoning."""
    return chat_model(tmp_path_factory.mktemp("agent-model"), text_of("agent_with_reasoning.jinja"))


@pytest.fixture
def talk(serve: Serve, model: Path) -> Talk:
    """A factory of front ends whose job emits a text and EOS; await it with the text."""
    (end,) = tokens_of(END, str(model))

    async def start(says: str) -> ApiServer:
        ready = replace(READY, model=str(model), vocab=4100, eos=(0, end), takes_snapshots=True)
        return await serve(FakeJob(scripted_reply(says, end=end), ready))

    return start


@pytest.fixture(scope="module")
async def _guided(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    (end,) = tokens_of(END, str(model))
    job = FakeJob(ready=replace(READY, model=str(model), vocab=4100, eos=(0, end), guided=True))
    async with api_server(tmp_path_factory.mktemp("guided"), job) as made:
        made.session.compiler.workers._work_s = 60
        yield made


@pytest.fixture
def guided(_guided: ApiServer) -> Iterator[ApiServer]:
    """A front end for structured output, whose compiler processes take a second to start: one per test file."""
    tokenizer, dialect = _guided.session.tokenizer.backend, _guided.session.chat_format
    template = tokenizer.chat_templates
    _guided.job.received.clear()
    yield _guided
    tokenizer.chat_templates, _guided.session.chat_format = template, dialect


@pytest.fixture(scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """Starts a browser."""
    async with async_playwright() as driver, await started(driver) as browser:
        yield browser


@pytest.fixture
async def browse(chromium: Browser, model: Path, tmp_path: Path) -> AsyncIterator[Browse]:
    """A factory of front ends with a page, for chats or completions; await it with a look and settings."""
    async with AsyncExitStack() as pages:

        async def start(
            look: Any = None, chat: bool = True, named: str = "", **settings: Any
        ) -> tuple[PageDriver, Page]:
            chat_directory = chat_model(tmp_path / named) if named else model
            scripted_job = ScriptedJob(chat_directory if chat else without_template(tmp_path))
            made = await pages.enter_async_context(opened(chromium, tmp_path, scripted_job, look, **settings))
            if "api_keys" not in settings:
                await made.ready()
            return made, made.page

        yield start
