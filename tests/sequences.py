"""Events and outputs of sequences, and specs of models, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Logprobs, PromptLogprobs, Request, RequestUpdate
from helix.engine.scheduler_output import NewRequest
from helix.layers.specs import AttentionSpec
from helix.models import DecoderSpec
from helix.sampling_params import SamplingParams


@dataclass
class Generated:
    """All updates of a request, joined; attributes as in `RequestUpdate`."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    reason: str | None = None
    logprobs: tuple[Logprobs, ...] = ()
    scored: tuple[PromptLogprobs, ...] = ()


def updates_of(engine: Engine, inbox: Inbox | None) -> Iterator[RequestUpdate]:
    """Serves an inbox and yields the updates on rank 0. Collective."""
    for updates in engine.serve(inbox):
        yield from updates


def resize(engine: Engine, **sizes: int) -> None:
    """Changes sizes that only the scheduler uses."""
    engine.runner.sizes = replace(engine.runner.sizes, **sizes)


def generated(engine: Engine, requests: Iterable[Request]) -> dict[Any, Generated]:
    """Serves requests and returns the results by id, on rank 0. Collective."""
    found: dict[Any, Generated] = {}
    for update in updates_of(engine, Inbox.of(requests)):
        one = found.setdefault(update.id, Generated())
        assert one.finish_reason is None, f"request {update.id} goes on after its end"
        one.token_ids += update.new_token_ids
        one.logprobs += update.logprobs
        one.scored += () if update.prompt_logprobs is None else (update.prompt_logprobs,)
        one.finish_reason, one.reason = update.finish_reason, update.reason
    return found


def generated_ids(engine: Engine, requests: Iterable[Request]) -> dict[Any, tuple[int, ...]]:
    """Serves requests and returns their tokens by id, on rank 0. Collective."""
    return {name: one.token_ids for name, one in generated(engine, requests).items()}


def new_request(slot: int, start: int, pages: np.ndarray, limit: int, text: np.ndarray, **more: Any) -> NewRequest:
    """Makes the `NewRequest` of a greedy sequence whose first tokens are `text`, int32 [n]."""
    sampling = more.pop("sampling", SamplingParams())
    return NewRequest(f"of slot {slot}", slot, len(text), text, start, pages, limit, limit, sampling, **more)


def with_windows(spec: DecoderSpec, *windows: int | None) -> DecoderSpec:
    """Cuts a model to its first layers, with these sliding windows in tokens; None for no window."""
    layers = []
    for layer, window in zip(spec.layers, windows, strict=False):
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, window=window)))
    assert len(layers) == len(windows), f"{len(spec.layers)} layers have no {len(windows)} windows"
    return replace(spec, layers=tuple(layers))
