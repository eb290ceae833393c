"""Jobs that fail under a front end: what becomes of the requests, and what the log says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from comm.loopback import LoopbackWorld, run_ranks
from helix.config import ServeConfig
from helix.engine.inbox import Inbox
from helix.engine.request import Request, RequestUpdate
from helix.engine.scheduler_output import SchedulerOutput
from helix.layout import HelixLayout
from launch.client import supervisor
from launch.client.engine_client import EngineClient
from launch.client.engine_messages import HEAD, Failed, Queued, encode
from launch.client.supervisor import HangDetector, Supervisor
from launch.job.serve import EngineServer, engine_stats, serve
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import build_engine
from tests.sequences import generated
from tests.serving.api_server import DEMO, READY, FakeJob, Serve, counting, until
from tests.serving.chats import COMPLETIONS
from tests.serving.engine import EngineJob, alone


class LoadingJob(FakeJob):
    """A job whose second start fails before it is ready."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.starts == 1:
            self.starts += 1
            writer.transport.abort()
        else:
            await super()._serve(reader, writer)


@pytest.mark.parametrize("kind", [FakeJob, LoadingJob])
async def test_a_job_that_dies_is_a_pause(kind: type[FakeJob], monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """Requests continue from the tokens they have, and get the same tokens as without the death.

    The log cannot be written meanwhile. A start that fails is no request's fault.
    """
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)

    async def dying(job: FakeJob, submit: Request) -> None:
        if submit.num_prior_output_tokens:
            await counting(job, submit)
            return
        await job.emit(submit, [100 + len(submit.prompt), 101 + len(submit.prompt)])
        await until(
            lambda: (
                not job.writers
                or sum(len(f.output_token_ids) for f in api_server.engine_client.generations.values()) == 4
            )
        )
        if job.writers:
            job.die()

    api_server = await serve(kind(dying))
    answers = await asyncio.gather(
        *(api_server.post(COMPLETIONS, {"prompt": [1] * n, "max_tokens": 6, "seed": n}) for n in (1, 2))
    )
    for n, answer in zip((1, 2), answers, strict=True):
        ids = [100 + n + i for i in range(6)]
        assert answer.json()["choices"][0]["text"] == api_server.session.tokenizer.decode(ids)
        assert answer.json()["usage"]["completion_tokens"] == 6
    again = [submit for submit in api_server.job.submits if submit.num_prior_output_tokens]
    assert all(
        s.num_prior_output_tokens == 2 and s.max_tokens == 4 and s.prompt.tolist()[-1] == 101 + len(s.prompt) - 2
        for s in again
    )
    assert {s.sampling.seed for s in again} == {1, 2}
    assert api_server.job.starts == (3 if kind is LoadingJob else 2)


async def test_a_request_that_sees_two_deaths_is_given_up(serve: Serve) -> None:
    """One that decodes, beside which nothing is new."""

    async def deadly(job: FakeJob, submit: Request) -> None:
        await job.emit(submit, [100])
        job.die()

    api_server = await serve(FakeJob(deadly))
    answer = await api_server.post(COMPLETIONS, {"prompt": [1]})
    assert answer.status_code == 500 and "failed 2 times" in answer.json()["error"]["message"]
    health = await api_server.get("/health")
    assert health.status_code == 503 and health.json()["state"] == "restarting"
    refused = await api_server.post(COMPLETIONS, {"prompt": [1]})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert (await api_server.get("/livez")).status_code == 200
    await until(lambda: api_server.engine_client.state == "ready")


@pytest.mark.parametrize("admitted", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_the_only_new_request_is_not_tried_again(
    admitted: bool, n: int, caplog: pytest.LogCaptureFixture, serve: Serve
) -> None:
    """Nor do those suffer for it that decode, or wait to be admitted; the log says the cause and whose it is."""

    async def reading(job: FakeJob, submit: Request) -> None:
        known = submit.prompt[0]
        job.send(Queued(submit.id)) if known != 3 or admitted else None
        if known == 3:
            if admitted:
                job.send(RequestUpdate(submit.id, 1, 0, 0))
            job.send(Failed("MemoryError: of this one"))
            await until(lambda: len(job.submits) == 2 + n)
            if job.writers:
                job.die()
        elif known == 1 and not submit.num_prior_output_tokens:
            await job.emit(submit, [100])
        elif known == 1 or len(job.submits) > 2 + n:  # again
            await counting(job, submit)

    api_server = await serve(FakeJob(reading))
    others = []
    for known in (1, 2):
        body = {"prompt": [known], "max_tokens": 3}
        others.append(asyncio.create_task(api_server.post(COMPLETIONS, body)))
        await until(lambda: len(api_server.job.submits) == len(others))
    await until(lambda: api_server.engine_client.waiting == 1)
    refused = await api_server.post(
        COMPLETIONS, {"prompt": [3], "n": n, "max_tokens": 5, "top_k": 7}, headers={"x-request-id": "its-id"}
    )
    assert refused.status_code == 500
    message = refused.json()["error"]["message"]
    assert "while it started this request" in message and "MemoryError: of this one" in message
    assert [(await other).status_code for other in others] == [200, 200]
    assert sum(submit.prompt[0] == 3 for submit in api_server.job.submits) == n
    log = caplog.text
    assert "the ranks failed: MemoryError: of this one" in log
    described = "request its-id, a prompt of 1 tokens, max_tokens=5, grammar: none, sampling: temp"
    assert f"not retrying the only new request: {described}" in log


async def test_of_several_new_requests_each_is_tried_again(serve: Serve) -> None:
    async def reading(job: FakeJob, submit: Request) -> None:
        if len(job.submits) == 2:
            job.die()
        elif len(job.submits) > 2:
            await counting(job, submit)

    api_server = await serve(FakeJob(reading))
    body = {"prompt": [1], "max_tokens": 3}
    answers = await asyncio.gather(*(api_server.post(COMPLETIONS, body) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]


class HungJob(EngineJob):
    """Ranks of which one stands still at the first request, until it is released; its other threads go on."""

    def __init__(self, ranks: int, hung: int, idle: bool) -> None:
        self._layout, self._hung, self._idle = HelixLayout.create("helix", ranks), hung, idle
        self._inbox, self.released = Inbox(), Event()

    async def close(self) -> None:
        self.released.set()
        await super().close()

    def _run(self, path: Path) -> None:
        link = EngineServer(path, self._inbox)
        run_ranks(self._layout.world_size, partial(self._rank, link), timeout_s=110)

    def _rank(self, link: EngineServer, world: LoopbackWorld, rank: int) -> None:
        comm = world.communicator(rank, self._layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen2"), self._layout, comm, 4, page_size=4, timeout_s=110)
        execute, wait = engine.runner.execute, self._inbox.wait

        def standing(decision: SchedulerOutput) -> Any:
            assert not decision.prefill_chunks or self.released.wait(100)
            return execute(decision)

        def forgetting(seconds: float) -> bool:
            return wait(seconds) and self.released.wait(100)

        if self._idle:
            self._inbox.wait = forgetting  # type: ignore[method-assign]
        elif rank == self._hung:
            engine.runner.execute = standing  # type: ignore[method-assign]
        serve(engine, self._inbox if rank == 0 else Inbox(), link if rank == 0 else None, DEMO)


@pytest.mark.parametrize("ranks, hung, idle", [(1, 0, False), (2, 1, False), (1, 0, True)])
async def test_a_job_without_progress_is_started_again(ranks: int, hung: int, idle: bool, serve: Serve) -> None:
    """Its statistics still come, and receipts of new requests do."""
    job = HungJob(ranks, hung, idle)
    api_server = await serve(job, hang_s=1)
    request = asyncio.create_task(api_server.post(COMPLETIONS, {"prompt": [1], "max_tokens": 2}))
    await until(lambda: api_server.engine_client.state == "restarting")
    api_server.supervisor._serve.hang_s = 600  # a busy machine may stop for seconds
    job.released.set()
    assert (await request).status_code == 200


def test_silence_is_time_without_progress_of_ranks_that_have_work() -> None:
    """Looks one after another: work, decisions and layers so far, predicted seconds of a chunk, and what is silence."""
    looks = [
        (False, None, 0.0, 0.0),  # nothing was asked
        (True, None, 0.0, 1.0),  # asked, and no statistics yet
        (True, 5, 0.0, 0.0),
        (True, 5, 0.0, 1.0),
        (True, 6, 0.0, 0.0),  # layers of a chunk that was not predicted
        (True, 6, 30.0, -29.0),  # a chunk that says it takes so long
        (True, 6, 30.0, -28.0),
        (True, 0, 0.0, 0.0),  # another job, which counts from 0
        (True, 0, 0.0, 1.0),
        (True, 0, 0.0, 2.0),
        (False, 0, 0.0, 0.0),  # an idle server is silent for ever
        (True, 0, 0.0, 1.0),
    ]
    silence = HangDetector()
    for busy, progress, chunk_s, expected in looks:
        stats = {} if progress is None else {"progress": float(progress), "chunk_s": chunk_s}
        assert silence.check(busy, stats) == expected, (busy, progress, chunk_s)


def test_a_long_chunk_shows_its_layers_and_announces_its_time() -> None:
    """Each layer of it is progress, also of the first one, whose time is unknown; nothing is announced afterwards."""
    engine = alone("qwen2", prefill_chunk=8)
    found: list[dict[str, float]] = []
    for layer in engine.runner.model.layers:
        feed = layer.run_ffn

        def noting(*given: Any, feed: Callable[..., Any] = feed) -> Any:
            found.append(engine_stats(engine))
            return feed(*given)

        layer.run_ffn = noting  # type: ignore[method-assign]
    for request in (Request("a", [1] * 20, 1), Request("b", [2] * 8, 1)):
        assert [one.finish_reason for one in generated(engine, [request]).values()] == ["length"]
        assert engine_stats(engine)["chunk_s"] == 0.0
    progress, seconds = [stats["progress"] for stats in found], [stats["chunk_s"] for stats in found]
    layers = len(engine.runner.model.layers)
    first, second = progress[: 3 * layers], progress[3 * layers :]
    assert len(second) == layers and all(a < b for of in (first, second) for a, b in pairwise(of))
    assert not any(seconds[:layers]) and all(seconds[3 * layers :])


def test_ranks_that_hang_do_not_keep_a_server_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := tmp_path / "ranks.py").write_text(
        "import socket, sys, time\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[-1].removeprefix('serve.socket='))\n"
        "listener.listen()\n"
        "peer, _ = listener.accept()\n"
        f"peer.sendall({encode(READY)!r})\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(supervisor, "ENTRY", program)

    async def ended() -> None:
        engine_client = EngineClient(1)
        job = Supervisor(engine_client, replace(ServeConfig(), hang_s=1), [], tmp_path)
        keeping = asyncio.create_task(job.run())
        await until(lambda: engine_client.connected)
        await job.stop()
        await asyncio.wait_for(keeping, 60)

    asyncio.run(ended())


async def test_a_socket_that_cannot_be_used_is_not_waited_for(tmp_path: Path) -> None:
    serve = replace(ServeConfig(), attach=f"{Path(__file__)}/ranks.sock")
    with pytest.raises(ValueError, match=r"serve.attach=.*ranks.sock cannot be used: Not a directory"):
        await asyncio.wait_for(Supervisor(EngineClient(1), serve, [], tmp_path).run(), 10)


async def test_ranks_that_say_what_nobody_reads_are_started_again(
    caplog: pytest.LogCaptureFixture, serve: Serve
) -> None:
    """The request of a message fails alone; behind what is no frame, all is lost."""

    async def babbling(job: FakeJob, submit: Request) -> None:
        if submit.prompt[0] == 1:
            job.writers[-1].write(HEAD.pack(2, 0, submit.id) + b"{}")
        elif len(job.submits) == 2:
            await job.emit(submit, [100])
            job.writers[-1].write(HEAD.pack(1 << 31, 0, submit.id))
        else:
            await counting(job, submit)

    api_server = await serve(FakeJob(babbling))
    answer = await api_server.post(COMPLETIONS, {"prompt": [1]})
    assert answer.status_code == 500 and "malformed message" in answer.json()["error"]["message"]
    assert api_server.engine_client.state == "ready"
    assert (await api_server.post(COMPLETIONS, {"prompt": [2], "max_tokens": 2})).status_code == 200
    assert "the ranks sent data that cannot be decoded: not a frame: a header of 2147483648 bytes" in caplog.text
