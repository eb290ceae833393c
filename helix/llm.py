"""Decoding from Python: `LLM("DIR", kvp=2).generate(["text"])`, inside ranks or from an ordinary process.

If a launcher has started this process as a rank (`RANK` is set), every rank creates an LLM and calls `generate` alike.
Otherwise the LLM starts the ranks itself: processes of this host, which end with it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from numbers import Integral
from operator import index
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from comm.torch_dist import TorchDistCommunicator
from helix.build.engine import build_engine
from helix.config import Config, ModelConfig
from helix.control.engine import Engine
from helix.events.request import Output, Request
from helix.events.sampling_params import SamplingParams
from helix.layout import HelixLayout
from helix.library import import_transformers
from helix.models import Decoder, DecoderSpec, spec_from_config
from helix.models.loading import Checkpoint, read_config
from helix.place import KINDS, Place, choose_backend, gpu_facts, take_device
from helix.tokenizer import load_tokenizer

Prompt = str | Sequence[int]
START_S = 300.0  # time limit for all ranks to load the model
LOOK_S = 0.2  # interval between checks that the ranks are alive


@dataclass(frozen=True)
class LLMSettings:
    """Settings that every rank gets; attributes as in `LLM`, and the spec of the checkpoint's config."""

    path: str
    spec: DecoderSpec
    layout: HelixLayout
    dtype: str
    max_batch: int
    max_length: int
    timeout_s: float


class LLM:
    """A checkpoint over the ranks of a layout; usable as a context, which closes it.

    Args:
        path: Hugging Face checkpoint directory.
        kvp, tpa, ep: widths of the layout, as in `HelixLayout`; kvp x tpa ranks, on GPUs if there are enough.
        dtype: float32, bfloat16, float16, or auto: the checkpoint's on GPUs, float32 on CPUs.
        max_batch: most sequences at a time; further prompts wait.
        max_length: most tokens of one sequence, prompt and new ones; at most the model's context.
        timeout_s: deadline of each collective, seconds.

    Raises:
        ValueError: the checkpoint, the layout and this machine do not fit each other.
        RuntimeError: a rank could not start.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        kvp: int = 1,
        tpa: int = 1,
        ep: int = 1,
        dtype: str = "auto",
        max_batch: int = 8,
        max_length: int = 8192,
        timeout_s: float = 300.0,
    ) -> None:
        if max_batch < 1 or max_length < 1:
            raise ValueError(f"max_batch={max_batch} and max_length={max_length} must be positive")
        layout = HelixLayout.create("helix", kvp, tpa, ep=ep)
        spec = spec_from_config(read_config(Path(path)))
        layout.check_heads(spec.attention.q_heads, spec.attention.kv_heads)
        max_length = min(max_length, spec.max_positions)
        settings = LLMSettings(str(path), spec, layout, dtype, max_batch, max_length, timeout_s)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._local: Rank | None = None
        if (place := Place.from_environment()) is not None:
            if (world := place.world_size) != layout.world_size:
                raise ValueError(f"kvp*tpa = {kvp}*{tpa} = {layout.world_size} ranks, but {world} were started")
            self._local = Rank(settings)
            return
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # while the ranks live
        root = str(Path(__file__).resolve().parent.parent)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        for rank in range(layout.world_size):
            # Separate programs: multiprocessing would run the caller's script again in each rank.
            ours, theirs = Pipe()
            command = [sys.executable, "-c", "from helix.llm import serve; serve()", str(theirs.fileno())]
            self._ranks.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
            theirs.close()
            ours.send((settings, rank, self._store.port))
            self._connections.append(ours)
        atexit.register(self.close)
        self._answer(START_S)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> list[Output]:
        """Continues prompts, texts or lists of token ids; greedily at temperature 0.

        Args:
            prompts: one or several: a single text is one prompt, and so is a list of token ids.
            stop: one or several texts that end a continuation.

        Returns:
            An output for each prompt, in order, with `output_ids`, `text` and `finish_reason`; a refused one has
            `finish_reason="error"` and a `reason`. Inside ranks: on rank 0 only, an empty list on the others.

        Raises:
            ValueError: a prompt is neither a text nor token ids, or a sampling parameter is out of range.
            RuntimeError: a rank failed; the LLM is closed.
        """
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        request = as_prompts(prompts), max_new_tokens, sampling, (stop,) if isinstance(stop, str) else tuple(stop)
        if self._local is not None:
            return self._local.generate(*request)
        if not self._ranks:
            raise RuntimeError("this LLM is closed: make a new one")
        self._connections[0].send(request)
        outputs: list[Output] = self._answer(None)
        return outputs

    def close(self) -> None:
        """Ends the ranks, or this rank's part; a second call does nothing."""
        if self._local is not None:
            self._local.close()
            self._local = None
        atexit.unregister(self.close)
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._ranks, self._connections = [], []

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, timeout_s: float | None) -> Any:
        """Waits for rank 0's answer and returns it; raises RuntimeError if a rank fails or ends."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._connections[0].poll(LOOK_S):
                ended = {r: code for r, p in enumerate(self._ranks) if (code := p.poll()) is not None}
                if ended:
                    raise EOFError(", ".join(f"rank {r} ended with exit code {code}" for r, code in ended.items()))
                if deadline is not None and time.monotonic() > deadline:
                    raise EOFError(f"they did not start within {timeout_s:.0f} s")
            failed, answer = self._connections[0].recv()
        except (EOFError, ConnectionError) as error:
            failed, answer = True, str(error) or "rank 0 ended"
        if not failed:
            return answer
        self.close()
        raise RuntimeError(f"the LLM's ranks failed: {answer}")


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Converts one prompt or several to a list.

    Raises:
        ValueError: a prompt is neither a text nor token ids.
    """
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
    raise ValueError(f"prompt {number} is {prompt!r:.60}: give a text or a list of token ids")


class Rank:
    """Part of an LLM on one rank; it uses the existing process group, or creates that of the environment."""

    def __init__(self, settings: LLMSettings) -> None:
        layout, place = settings.layout, Place.from_environment()
        assert place is not None, "a rank has its place in the environment"
        backend = choose_backend("auto", place, [gpu_facts(place)])
        device, timeout = take_device(backend, place), timedelta(seconds=settings.timeout_s)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            transport, bound = ("gloo", None) if backend == "gloo" else ("nccl", device)
            dist.init_process_group(transport, timeout=timeout, device_id=bound)
        self._comm = KINDS.get(backend, TorchDistCommunicator)(layout.kvp_groups(), device, timeout)
        checkpoint = Checkpoint(Path(settings.path))
        spec = checkpoint.with_head(settings.spec)
        name = settings.dtype if settings.dtype != "auto" else spec.dtype if device.type == "cuda" else "float32"
        model = Decoder(spec, layout, self._comm, getattr(torch, name), device)
        checkpoint.check(model.weights.slices, spec.unused)
        checkpoint.load(model.weights)
        self._tokenizer = load_tokenizer(checkpoint.path) if place.rank == 0 else None
        config = Config(model=ModelConfig(path=settings.path))
        wanted = settings.max_batch * settings.max_length
        self._engine: Engine = build_engine(
            layout, self._comm, model, config, settings.max_batch, wanted, self._tokenizer,
            max_length=settings.max_length,
        )  # fmt: skip

    def generate(
        self, prompts: list[Prompt], max_new_tokens: int, sampling: SamplingParams, stop: tuple[str, ...]
    ) -> list[Output]:
        """Continues prompts as `LLM.generate` does; a collective call, in which only rank 0's prompts count."""
        requests: list[Request] = []
        if self._comm.rank == 0:
            for i, prompt in enumerate(prompts):
                if isinstance(prompt, str):
                    if self._tokenizer is None:
                        raise ValueError("the checkpoint has no tokenizer.json: give token ids instead of text")
                    prompt = self._tokenizer(prompt)["input_ids"]
                requests.append(Request(i, prompt, max_new_tokens, sampling, stop))
        ended = {o.id: o for o in self._engine.generate(requests) if o.finish_reason is not None}
        return [ended[i] for i in range(len(requests))]

    def close(self) -> None:
        """Closes this rank's part, once all ranks have called this."""
        self._engine.close()
        self._comm.barrier()
        self._comm.close()
        if self._owns_group:
            dist.destroy_process_group()


def serve() -> None:
    """Runs a rank that an LLM has started: executes the calls sent to rank 0 until the LLM is closed."""
    connection = Connection(int(sys.argv[1]))
    import_transformers()
    settings, rank, port = connection.recv()
    world = str(settings.layout.world_size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": world}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(world)))
    if rank:  # gets no more messages: the connection ends with the LLM
        Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        mine = Rank(settings)
        while rank:
            mine.generate([], 1, SamplingParams(), ())
        connection.send((False, None))
        while True:
            connection.send((False, mine.generate(*connection.recv())))
    except EOFError:
        os._exit(0)
    except BaseException:
        connection.send((True, traceback.format_exc()))
        os._exit(1)  # at once: closing a process group may wait for peers


def _end_with(connection: Connection) -> None:
    try:
        connection.recv()
    finally:
        os._exit(0)
