"""Offline batches: submits the prompts of a file to the ranks and writes each result when its request finishes."""

from __future__ import annotations

import asyncio
import sys
from asyncio import Semaphore, Task
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from helix.checks import check
from helix.config import Config
from helix.errors import RankError
from helix.log import STDOUT_CLOSED, print_error
from launch.client.answer import Answer, RequestOutput, to_request_output
from launch.client.choice import Delta
from launch.client.engine_client import EngineClient
from launch.client.errors import REFUSED, ApiError
from launch.client.schemas import Chat, Completion
from launch.client.session import Session
from launch.client.supervisor import Supervisor
from launch.inputs.prompt_files import SERVED, PromptFile, PromptLine, ResultFile, check_defaults, make_body
from launch.inputs.terminal import PromptsTerminal
from launch.serving.openai import OpenAIAnswer

OPEN_PER_SLOT = 2  # open requests per row of the batch: the next ones are tokenized while the batch runs
POLL_S = 0.2  # interval of progress updates


def decode_attached(config: Config) -> int:
    """Decodes the prompts of a config over ranks that were started separately and listen at `serve.attach`.

    Returns:
        The exit code: 0, REFUSED, or 1 after printing an error on one line.

    Raises:
        ValueError: the config or the prompt file is wrong.
    """
    check(config)
    check_defaults(config.decode)
    if config.decode.prompts is None:
        raise ValueError(f"serve.attach={config.serve.attach} has no prompts to run: set decode.prompts=FILE.jsonl")
    return asyncio.run(decode(config, PromptFile(Path(config.decode.prompts)), Path(str(config.serve.attach))))


async def decode(config: Config, prompts: Sequence[PromptLine], socket: Path) -> int:
    """Decodes prompts over ranks that serve a socket, then ends the ranks; if cancelled, keeps the results so far.

    Returns:
        The exit code, as in `decode_attached`.
    """
    try:
        runner = BatchRunner(config, prompts, socket)
        return REFUSED if await runner.run() else 0
    except (ValueError, RankError) as error:
        print_error(error)
    except SystemExit:  # rich raises it on a broken pipe
        print_error(STDOUT_CLOSED)
    return 1


class BatchRunner:
    """Decodes a prompt file over a session.

    Args:
        socket: Unix socket of the ranks.

    Raises:
        ValueError: the result file is not writable.
    """

    def __init__(self, config: Config, prompts: Sequence[PromptLine], socket: Path) -> None:
        self._config, self._prompts = config, prompts
        self._results = ResultFile(config, prompts)
        self._terminal = PromptsTerminal(config.decode.stream)
        serve = replace(config.serve, attach=str(socket))
        self._engine_client = EngineClient(sys.maxsize)
        self._supervisor = Supervisor(self._engine_client, serve, [], socket.parent)
        self._session = Session(serve, self._engine_client)
        self._answers: set[Answer] = set()
        self._prompt_tokens = 0  # of finished answers
        self._refused = 0

    async def run(self) -> int:
        """Decodes the prompts that have no result yet; returns the number of refused ones.

        Raises:
            RankError: results cannot be written.
            ValueError: the checkpoint's tokenizer cannot be read.
        """
        supervision = asyncio.create_task(self._supervisor.run())
        decoding = asyncio.create_task(self._work())
        try:
            await asyncio.wait((supervision, decoding), return_when=asyncio.FIRST_COMPLETED)
            if not decoding.done():
                await supervision
            await decoding
            await self._supervisor.stop()
            self._engine_client.stop()
            await supervision
        finally:
            for task in (decoding, supervision):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
            await self._session.close()
        self._results.close()
        self._terminal.finish(self._results.count - self._refused, self._refused)
        return self._refused

    async def _work(self) -> None:
        await asyncio.to_thread(self._session.load, self._config.model.path)  # while the ranks load the model
        engine_info = await self._engine_client.wait_ready()
        window = Semaphore(OPEN_PER_SLOT * engine_info.max_batch)
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt in self._results.remaining:
                    await window.acquire()
                    answer = await self._submit(prompt)
                    if answer is None:
                        window.release()
                    else:
                        task: Task[None] = tasks.create_task(self._finish(prompt, answer))
                        task.add_done_callback(lambda _: window.release())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            watching.cancel()

    async def _submit(self, prompt: PromptLine) -> Answer | None:
        """Submits a prompt; if it is refused, writes that as its result and returns None."""
        batch = prompt.url is not None
        try:
            body = self._body(prompt)
            answer = await self._session.open(body, defaults=None if batch else {}, parse_output=batch)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # includes panics of tokenizers and llguidance: other prompts continue
            refusal = error if isinstance(error, ApiError) else _to_api_error(error)
            if batch:
                self._respond(prompt, refusal.status, refusal.body())
            else:
                self._add(prompt, RequestOutput.refused(refusal.message, self._length(prompt)))
            return None
        self._answers.add(answer)
        return answer

    async def _finish(self, prompt: PromptLine, answer: Answer) -> None:
        try:
            if prompt.url is None:
                output = await to_request_output(answer, partial(self._show, prompt, 1))
                self._add(prompt, output)
            else:
                try:
                    show = partial(self._show, prompt, len(answer.choices))
                    status, response = SERVED, await OpenAIAnswer(answer).collect(show)
                except ApiError as error:
                    status, response = error.status, error.body()
                self._respond(prompt, status, response)
        finally:
            answer.close()
            self._answers.discard(answer)
            self._prompt_tokens += answer.prompt_tokens

    def _body(self, prompt: PromptLine) -> Chat | Completion:
        body = make_body(prompt, self._config.decode)
        if prompt.url is not None:
            if body.stream:
                raise ApiError(400, "stream=true: batch responses are not streamed: leave it out", param="stream")
            self._session.check_model(body.model)
        elif body.stop and self._session.tokenizer.backend is None:
            raise ValueError(f"stop={body.stop!r:.60} needs a tokenizer, but the model has none: leave it out")
        return body

    def _show(self, prompt: PromptLine, count: int, index: int, delta: Delta) -> None:
        name = prompt.id if count == 1 else f"{prompt.id}[{index}]"
        self._terminal.show(name, delta.text, delta.finish_reason is not None)

    def _add(self, prompt: PromptLine, output: RequestOutput) -> None:
        if output.reason is not None:
            self._refused += 1
            self._terminal.refuse(prompt.id, output.reason)
        self._results.add(prompt.id, output)
        self._terminal.count(self._results.count, len(self._prompts))

    def _respond(self, prompt: PromptLine, status: int, body: dict[str, Any]) -> None:
        self._refused += status != SERVED
        self._results.add_response(prompt.id, status, body)
        self._terminal.count(self._results.count, len(self._prompts))

    def _length(self, prompt: PromptLine) -> int:
        """Returns the number of tokens of a refused prompt; 0 if it cannot be tokenized."""
        if prompt.ids is not None:
            return len(prompt.ids)
        if prompt.text is None:
            return 0
        with suppress(ApiError):
            return len(self._session.tokenizer.encode(prompt.text, sys.maxsize))
        return 0

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            done = sum(choice.generation.progress or 0 for answer in self._answers for choice in answer.choices)
            total = sum(len(choice.generation.request.prompt) for answer in self._answers for choice in answer.choices)
            self._terminal.prefill(self._prompt_tokens + done, self._prompt_tokens + total)


def _to_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ValueError):
        return ApiError(400, f"{' '.join(str(error).split()):.300}")
    return ApiError(
        500, f"the prompt could not be processed: {type(error).__name__}: {' '.join(str(error).split()):.300}"
    )
