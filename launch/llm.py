"""Offline inference from Python: `LLM("DIR", kvp=2).generate("text")`.

The ranks serve a socket, and a thread of this process is their client, as in a server. Under torchrun (`RANK` is set),
every rank constructs an LLM, which runs the rank in another thread.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from numbers import Integral
from operator import index
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkdtemp
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

from tqdm.auto import tqdm

from helix.checks import check
from helix.hub import resolve_hub_models
from helix.log import relay
from helix.rank_info import RankInfo
from helix.schema import unknown_message
from launch.client.answer import Answer, DeltaCallback, RequestOutput, to_request_output
from launch.client.choice import Delta
from launch.client.engine_client import EngineClient
from launch.client.errors import ApiError
from launch.client.options import CALL_OPTIONS, takes_options, with_defaults
from launch.client.schemas import Body, Chat, Completion, parse_body
from launch.client.session import Session
from launch.client.supervisor import SHUTDOWN_S, Supervisor, cause
from launch.inputs.flags import CPU_TOKENS
from launch.inputs.prompt_files import MAX_IDS

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
START_S = 3600.0  # for all ranks to load the model
POLL_S = 0.05  # interval of polling the ranks while they start
SHOWN_S = 1.0  # delay before a call shows its progress
LAST_LINES, KEPT_LINES = 30, 1000  # of the ranks' output: shown when they fail, searched for the cause
LAST_LINES_S = 2.0  # for their last lines to arrive


class LLM:
    """A checkpoint loaded over the ranks of a layout; also a context manager that closes it.

    It belongs to the process that creates it: after `fork`, a child has to create its own.

    Args:
        path: Hugging Face checkpoint directory, or ORG/NAME[@REVISION] on the Hub.
        layout: auto, helix, tp, medha or dp.
        kvp, tpa, ep, dp: widths of the layout.
        hopb: on, off or auto: overlap the exchange of a part of the batch with the attention of the next.
        overrides: other settings, each `KEY=VALUE`.

    Attributes:
        layout: the layout in effect, as text.

    Raises:
        ValueError: a setting is wrong, or checkpoint, layout and machine do not fit each other.
        RuntimeError: a rank failed to start.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        layout: str | None = None,
        kvp: int | None = None,
        tpa: int | None = None,
        ep: int | None = None,
        dp: int | None = None,
        hopb: str | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        widths = {"layout.kvp": kvp, "layout.tpa": tpa, "layout.ep": ep, "layout.dp": dp}
        given = {"layout": layout, **widths, "hopb": hopb}
        settings = [f"{key}={value}" for key, value in given.items() if value is not None]
        settings = [f"model.path={path}", "serve.restarts=0", *settings, *overrides]
        # Imported here so that `import helix` does not import Hydra.
        self._config = import_module("launch.inputs.compose").compose_config(settings)
        resolve_hub_models(self._config)
        if self._config.kv.tokens is None and not Path("/dev/nvidia0").exists():
            settings.append(f"kv.tokens={CPU_TOKENS}")
        check(self._config)
        rank_info = RankInfo.from_environment()
        self._leads = rank_info is None or rank_info.rank == 0
        if rank_info is not None:  # a rank may import torch
            device = import_module("helix.devices").gpu_name(rank_info) if self._config.comm.backend != "gloo" else None
            preflight = import_module("launch.inputs.preflight").preflight
            job_kind = import_module("launch.inputs.job_kinds").SERVE
            preflight(self._config, rank_info.world_size, device, job_kind, writes=False)
        self.layout = ""
        self._closed = False
        self._pid = os.getpid()
        self._directory = Path(mkdtemp(prefix="helix-"))
        self._rank: Thread | None = None
        if rank_info is not None:
            socket = self._directory / "rank.sock"
            self._config.serve.attach = str(socket)
            main = import_module("launch.run").main
            self._rank = Thread(target=main, args=([*settings, f"serve.socket={socket}"],), daemon=True)
            self._rank.start()
        atexit.register(self.close)
        if self._leads:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(target=self._loop.run_forever, name="LLM", daemon=True)
            self._thread.start()
            try:
                self._wait(self._schedule(self._start(settings)))
                self._session.load(self._config.model.path)  # while the ranks load the model
                self._wait(self._schedule(self._wait_ready()))
            except BaseException:
                self.close()
                raise

    @takes_options
    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, **options: Any
    ) -> list[RequestOutput]:
        """Generates completions for a text, a list of token ids, or a list of either.

        Args:
            use_tqdm: show progress if a call with several prompts takes long.

        Returns:
            One output per prompt, in order; a refused prompt has `finish_reason="error"` and a `reason`. Under
            torchrun, only rank 0 gets outputs; the others get an empty list.

        Raises:
            ValueError: a prompt is neither text nor token ids; or an option is unknown, out of range or unsupported.
            RuntimeError: a rank failed, the LLM is closed, or this process is a fork of the one that created it.
        """
        return self._answers([self._completion(prompt, options) for prompt in as_prompts(prompts)], use_tqdm)

    @takes_options
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or a list of them: OpenAI messages, rendered by the chat template.

        Args:
            tools: functions that the answer may call, in OpenAI's format.
            chat_template_kwargs: variables for the chat template.
            use_tqdm: as in `generate`.

        Returns and raises as `generate`.
        """
        extra_fields = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        several = [messages] if _is_conversation(messages) else messages
        return self._answers([self._chat(conversation, options, extra_fields) for conversation in several], use_tqdm)

    @takes_options
    def stream(self, prompt: Prompt | Messages, **options: Any) -> Stream:
        """Streams the completion of one prompt, or the answer to one conversation; raises as `generate`."""
        if (n := options.get("n") or 1) != 1:
            raise ValueError(f"n={n}: a stream has one answer; use n=1, or generate() or chat()")
        if _is_conversation(prompt):
            return Stream(self._streamed(self._chat(prompt, options, {})))
        prompts = as_prompts(prompt)
        if len(prompts) != 1:
            raise ValueError(f"{len(prompts)} prompts: stream() takes one; use generate() for several")
        return Stream(self._streamed(self._completion(prompts[0], options)))

    def close(self) -> None:
        """Ends the ranks; on ranks other than 0, waits until rank 0 closes its LLM.

        Does nothing when called again, or in a child of `fork`: the ranks belong to the parent.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = connected = True
        atexit.unregister(self.close)
        if self._leads:
            connected = asyncio.run_coroutine_threadsafe(self._shutdown(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        if self._rank is not None and connected:
            self._rank.join()  # if another rank is gone, its watchdog ends this process
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- request bodies, as in the HTTP API

    def _completion(self, prompt: Prompt, options: Mapping[str, Any]) -> Completion:
        return checked_body(Completion, self._fields(options) | {"prompt": prompt})

    def _chat(self, messages: Any, options: Mapping[str, Any], extra_fields: Mapping[str, Any]) -> Chat:
        fields = self._fields(options) | {name: value for name, value in extra_fields.items() if value is not None}
        if (best := fields.pop("logprobs", None)) is not None:
            fields |= {"logprobs": True, "top_logprobs": best}
        return checked_body(Chat, fields | {"messages": [*messages]})

    def _fields(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if wrong := [name for name in options if name not in CALL_OPTIONS]:
            raise ValueError(unknown_message(wrong[0], CALL_OPTIONS))
        fields = with_defaults(options, self._config.decode)
        if isinstance(limit := fields["max_tokens"], Integral) and limit < 1:  # over HTTP a completion may have 0
            raise ValueError(f"max_tokens={limit} must be at least 1")
        if "schema" in fields:
            named = {"name": "answer", "schema": fields.pop("schema")}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        return fields

    # ---- the client thread

    def _schedule(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self._check_process()
            if self._closed:
                raise RuntimeError("this LLM is closed: create another")
        except RuntimeError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _check_process(self) -> None:
        """Raises RuntimeError in a child of `fork`, where the client thread does not run."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this LLM belongs to process {self._pid}, and process {os.getpid()} is a fork of it: call it in the "
                "parent, or create another LLM here"
            )

    def _wait(self, future: Future[T]) -> T:
        """Waits for a result; closes this LLM if the ranks have failed."""
        try:
            return future.result()
        except BaseException as error:
            future.cancel()
            if isinstance(error, RuntimeError):
                self.close()
            raise

    def _answers(self, bodies: Sequence[Chat | Completion], use_tqdm: bool) -> list[RequestOutput]:
        if not self._leads:
            return []
        if not use_tqdm or len(bodies) < 2:  # the first tqdm creates locks, which takes 20 ms
            return self._wait(self._schedule(self._outputs(bodies)))
        with tqdm(total=len(bodies), unit="prompt", delay=SHOWN_S) as shown:
            return self._wait(self._schedule(self._outputs(bodies, on_finish=shown.update)))

    def _streamed(self, body: Chat | Completion) -> Generator[str | RequestOutput]:
        if not self._leads:
            return
        deltas: SimpleQueue[Delta | None] = SimpleQueue()
        future = self._schedule(self._outputs([body], lambda _, one: deltas.put(one)))
        future.add_done_callback(lambda _: deltas.put(None))
        try:
            while (one := deltas.get()) is not None:
                parts = [part.text for part in one.parts if part.kind == "content"]
                if piece := "".join(parts) if isinstance(body, Chat) else one.text:
                    yield piece
                    self._check_process()
            yield from self._wait(future)
        finally:
            if os.getpid() == self._pid:  # in a fork, cancelling would wake the parent's loop
                future.cancel()

    async def _start(self, settings: Sequence[str]) -> None:
        read, write = os.pipe()
        self._rank_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._relay = Thread(target=self._log, args=(read,), name="LLM log", daemon=True)
        self._relay.start()
        self._engine_client = EngineClient(sys.maxsize)
        self._session = Session(self._config.serve, self._engine_client)
        self._supervisor = Supervisor(self._engine_client, self._config.serve, settings, self._directory, write)
        self._supervision = asyncio.create_task(self._supervisor.run())
        await asyncio.sleep(0)
        os.close(write)  # the ranks have copies
        self._supervision.add_done_callback(self._on_supervision_end)

    async def _wait_ready(self) -> None:
        """Waits until the ranks are ready; raises ValueError if they refuse the settings, RuntimeError if they fail."""
        deadline = time.monotonic() + START_S
        while self._engine_client.state != "ready":
            if time.monotonic() > deadline:
                self._engine_client.fail(f"the ranks did not start within {START_S:.0f} s")
            if self._engine_client.state == "failed" or not (self._rank is None or self._rank.is_alive()):
                raise self._failure()
            await asyncio.sleep(POLL_S)
        self.layout = self._engine_client.refuse_unless_ready().layout

    def _log(self, read: int) -> None:
        with open(read, errors="replace") as output:
            relay(output, self._rank_lines)

    def _on_supervision_end(self, supervision: asyncio.Task[None]) -> None:
        self._engine_client.fail("the ranks were ended" if supervision.cancelled() else str(supervision.exception()))

    def _failure(self) -> Exception:
        self._relay.join(LAST_LINES_S)
        lines = [*self._rank_lines]
        why = cause(lines) or self._engine_client.why
        if self._supervisor.settings_refused:
            return ValueError(why)
        return RuntimeError("\n".join([f"the LLM's ranks failed: {why}", *lines[-LAST_LINES:]]))

    async def _outputs(
        self,
        bodies: Sequence[Chat | Completion],
        on_delta: DeltaCallback = lambda index, delta: None,
        on_finish: Callable[[], Any] = lambda: None,
    ) -> list[RequestOutput]:
        answers: list[Answer | RequestOutput] = []
        try:
            for body in bodies:
                answers.append(await self._submit(body))
                await asyncio.sleep(0)  # let the client read from the ranks between prompts
            return await asyncio.gather(*(self._output(answer, on_delta, on_finish) for answer in answers))
        finally:
            for answer in answers:
                if isinstance(answer, Answer):
                    answer.close()

    async def _submit(self, body: Chat | Completion) -> Answer | RequestOutput:
        try:
            return await self._session.open(body, defaults={})
        except ApiError as error:
            if self._engine_client.state != "ready":
                raise self._failure() from error
            if error.param not in ("prompt", "messages"):  # it would refuse every prompt
                raise ValueError(error.message) from error
            return RequestOutput.refused(error.message)

    async def _output(
        self, answer: Answer | RequestOutput, on_delta: DeltaCallback, on_finish: Callable[[], Any]
    ) -> RequestOutput:
        output = answer if isinstance(answer, RequestOutput) else await to_request_output(answer, on_delta)
        if output.reason is not None and self._engine_client.state != "ready":
            raise self._failure()
        on_finish()
        return output

    async def _shutdown(self) -> bool:
        """Ends the job and all processes; returns whether the ranks were connected, and so were asked to end."""
        self._engine_client.fail("this LLM is closed")
        connected = self._engine_client.connected
        await self._supervisor.stop()
        if self._rank is not None:
            self._engine_client.stop()
        if connected:
            await asyncio.wait((self._supervision,), timeout=SHUTDOWN_S)
        self._supervision.cancel()
        await asyncio.gather(self._supervision, return_exceptions=True)
        await self._session.close()
        return connected


class Stream:
    """Iterator over the text of an answer; closing or dropping it early aborts the request.

    Attributes:
        output: the complete answer once the iterator is exhausted; under torchrun, on rank 0 only.
    """

    def __init__(self, parts: Generator[str | RequestOutput]) -> None:
        self.output: RequestOutput | None = None
        self._parts = parts

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        part = next(self._parts)
        if isinstance(part, RequestOutput):
            self.output = part
            raise StopIteration
        return part

    def close(self) -> None:
        self._parts.close()


def as_prompts(given: Any) -> list[Prompt]:
    """Converts one prompt or several to a list; raises ValueError if a prompt is neither text nor token ids."""
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise ValueError(f"prompts are {given!r:.60}: pass a text, a list of token ids, or a list of either")
    several: list[Any] = [given] if isinstance(given, str) else list(given)
    if several and all(isinstance(one, Integral) for one in several):
        several = [several]
    return [prompt if isinstance(prompt, str) else _as_ids(i, prompt) for i, prompt in enumerate(several)]


def _as_ids(number: int, prompt: Any) -> list[int]:
    try:
        if not isinstance(prompt, bytes):
            return [index(token) for token in prompt]
    except TypeError:
        pass
    raise ValueError(f"prompt {number} is {prompt!r:.60}: pass a text or a list of token ids")


def _is_conversation(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)


def checked_body(schema: type[Body], fields: Mapping[str, Any]) -> Body:
    """Validates a body as the server does; raises ValueError if it is invalid."""
    try:
        return parse_body(schema, json.dumps(fields, default=_plain, ensure_ascii=False).encode(), MAX_IDS)
    except ApiError as error:
        raise ValueError(error.message) from error
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"the options or messages cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"{value!r:.60} is of type {type(value).__name__}")
    return value.tolist()
