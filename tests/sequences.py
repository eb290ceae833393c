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
    """Serves an inbox, a collective call; yields the updates one by one, on rank 0."""
    for updates in engine.serve(inbox):
        yield from updates


def resize(engine: Engine, **sizes: int) -> None:
    """Changes sizes that decisions alone depend on."""
    engine.runner.sizes = replace(engine.runner.sizes, **sizes)


def generated(engine: Engine, requests: Iterable[Request]) -> dict[Any, Generated]:
    """Serves requests, a collective call; returns what came of each by id, on rank 0."""
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
    """Serves requests, a collective call; returns the tokens of each by id, on rank 0."""
    return {name: one.token_ids for name, one in generated(engine, requests).items()}


def new_request(slot: int, start: int, pages: np.ndarray, limit: int, text: np.ndarray, **more: Any) -> NewRequest:
    """Makes the admission of a greedy sequence whose first tokens are `text`, int32 [n]."""
    sampling = more.pop("sampling", SamplingParams())
    return NewRequest(f"of slot {slot}", slot, len(text), text, start, pages, limit, limit, sampling, **more)


def with_windows(spec: DecoderSpec, *windows: int | None) -> DecoderSpec:
    """Gives a model as many layers, its first ones, with sliding windows of these tokens; None for no window."""
    layers = []
    for layer, window in zip(spec.layers, windows, strict=False):
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, window=window)))
    assert len(layers) == len(windows), f"{len(spec.layers)} layers have no {len(windows)} windows"
    return replace(spec, layers=tuple(layers))
