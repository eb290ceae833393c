"""Planted mistakes: a row of parity.yaml that is equal without one is not with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from helix.attention import offloaded
from helix.attention.base import AttentionPolicy
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.engine.scheduler_output import NewRequest
from helix.layers.mla import MLA
from helix.models import layer
from helix.worker.offloaded_cache import OffloadedCache
from helix.worker.sequence_observer import Span
from helix.worker.step import SELECTED, DecodeState, Step
from kernels.attention.split_kv import PartialAttention
from kernels.offload.copy_blocks import copy_blocks
from tests.e2e.fuzz import quiet, run_case
from tests.e2e.parity_cases import ROWS, case_of
from tests.sequences import generated

pytestmark = pytest.mark.slow  # continuous integration runs them next to `make test`

Mistake = Callable[[Engine], None]


class ShiftedLSE(AttentionPolicy):
    """One rank believes that its keys weigh 5% more."""

    def __init__(self, inner: AttentionPolicy) -> None:
        self.inner = inner

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self.inner.prepare(step, windows)

    def attend(self, *args: object) -> PartialAttention:  # type: ignore[override]
        found = self.inner.attend(*args)  # type: ignore[arg-type]
        return PartialAttention(found.out, found.lse + 0.05)


def shifts_lse(engine: Engine) -> None:
    if engine.comm.rank == 1:
        engine.runner.dense = ShiftedLSE(engine.runner.dense)


def mixers(engine: Engine) -> list[Any]:
    return [layer.mixer for layer in engine.runner.model.layers]


def has_a_sink_on_every_rank(engine: Engine) -> None:
    for mixer in mixers(engine) if engine.comm.rank == 1 else ():
        mixer.sinks = torch.zeros(16)


def norms_its_own_heads_alone(engine: Engine) -> None:
    for mixer in mixers(engine):
        mixer._squares.sharded = False


def adds_experts_up_twice(engine: Engine) -> None:
    if engine.comm.rank == 1:
        engine.runner.model.layers[-1].ffn.down.mul_(2)


def forgets_temperature(engine: Engine) -> None:
    for mixer in mixers(engine):
        mixer.scale = mixer.spec.query**-0.5


def takes_the_next_heads_values(engine: Engine) -> None:
    for mixer in mixers(engine):
        mixer.local_w_uv = mixer.w_uv[-mixer.local_w_uv.shape[0] :]


def rotates_neighbors_as_halves(engine: Engine) -> None:
    """The order in which the checkpoint has them, for the keys alone."""
    for mixer in mixers(engine):
        rows = mixer.down.weight[-8:]
        rows.copy_(torch.stack((rows[:4], rows[4:]), 1).flatten(0, 1))


def indexers(engine: Engine) -> list[Any]:
    return [mixer.indexer for mixer in mixers(engine) if mixer.indexer is not None]


def rotates_index_keys_otherwise(engine: Engine) -> None:
    for indexer in indexers(engine):
        rows = indexer.down.weight[:8]
        rows.copy_(torch.stack((rows[:4], rows[4:]), 1).flatten(0, 1))


def forgets_the_bias(engine: Engine) -> None:
    for indexer in indexers(engine):
        indexer.bias.zero_()


def forgets_signs(engine: Engine) -> None:
    for indexer in indexers(engine):
        indexer.down.weight[indexer.spec.width :].abs_()


def reads_one_token_more(engine: Engine) -> None:
    for indexer in indexers(engine):
        indexer.topk += 1


def keeps_no_bounds_of_new_text(engine: Engine) -> None:
    """Pages that generated tokens fill keep what their former owners left."""
    fold = engine.runner.cache.fold

    def only_prompts(span: Span) -> None:
        if span.max_tokens != 1:  # a decode step of one token
            fold(span)

    engine.runner.cache.fold = only_prompts  # type: ignore[method-assign]


def keeps_bounds_of_an_unfinished_page(engine: Engine) -> None:
    """A page gets its bounds with its first token that is certain."""
    fold, page = engine.runner.cache.fold, engine.runner.placement.page_size

    def early(span: Span) -> None:
        fold(replace(span, before=span.before + page - 1, after=span.after + page - 1))

    engine.runner.cache.fold = early  # type: ignore[method-assign]


def chooses_a_block_less(engine: Engine) -> None:
    policy: Any = engine.runner.policy
    policy.budget = replace(policy.budget, topk=policy.budget.topk - 1)


def has_a_candidate_less(engine: Engine) -> None:
    policy: Any = engine.runner.policy
    policy.budget = replace(policy.budget, candidates=policy.budget.candidates - 1)


def writes_nothing_back(engine: Engine) -> None:
    cache = engine.runner.cache
    cache.on_step = lambda step: cache.fold(step.span)  # type: ignore[method-assign]


def keeps_places_of_other_sequences(engine: Engine) -> None:
    """A page of a new sequence is looked up where the one before, of another sequence, has its place."""
    cache = engine.runner.cache
    assert isinstance(cache, OffloadedCache)
    layer_of = cache.layer

    def forgetful(index: int, prefill: bool = False) -> object:
        found: Any = layer_of(index, prefill)
        return (
            replace(found, resident=replace(found.resident, gpu_block_of=found.resident.gpu_block_of.clone()))
            if prefill
            else found
        )

    cache.layer = forgetful  # type: ignore[method-assign, assignment]
    for turn in range(5):  # until no page is left that nobody had
        texts = [tuple((turn + 3 * i + 7 * k) % 257 for k in range(length)) for i, length in enumerate((60, 190, 128))]
        generated(engine, [Request(i, text, 18) for i, text in enumerate(texts)])


def judges_by_bounds_of_other_pages(engine: Engine) -> None:
    """Beginnings are found in pages, and judged by the bounds of others."""
    cache: Any = engine.runner.cache
    admit = cache.admit

    def shifted(*admissions: NewRequest) -> None:
        admit(*admissions)
        cache.bounds.copy_(cache.bounds.roll(1, 1))

    cache.admit = shifted


def resumes_without_the_state(engine: Engine) -> None:
    """Keys are found, and the state that belongs to them is left at zero."""
    admit = engine.runner.cache.admit
    engine.runner.cache.admit = lambda *them: admit(*(replace(a, snapshot_index=-1) for a in them))  # type: ignore[method-assign]


def moves_no_snapshot(engine: Engine) -> None:
    """Its place in host memory has what was there."""
    snap = engine.runner.cache._snap
    engine.runner.cache._snap = lambda slot, place, moves: snap(slot, place, -1)  # type: ignore[method-assign]


def takes_a_snapshot_before_the_one_in_its_place_has_moved(engine: Engine) -> None:
    snap = engine.runner.cache._snap

    def late(slot: int, place: int, moves: int) -> None:
        snap(slot, place, -1)
        if moves >= 0:
            snap(slot, moves, -1)

    engine.runner.cache._snap = late  # type: ignore[method-assign]


def takes_a_snapshot_for_the_one_before(engine: Engine) -> None:
    snap = engine.runner.cache._snap
    engine.runner.cache._snap = lambda slot, place, moves: snap(slot, place ^ 1, moves)  # type: ignore[method-assign]


def keeps_no_ring_in_a_snapshot(engine: Engine) -> None:
    """It lacks the rows that the next convolution reads."""
    cache = engine.runner.cache
    admit = cache.admit

    def forgets(*admissions: NewRequest) -> None:
        admit(*admissions)
        for group in cache.groups:
            if "qkv" in group.tensors:
                group.tensors["qkv"][:, [a.slot for a in admissions]] = 0

    cache.admit = forgets  # type: ignore[method-assign]


def applies_no_accepted_row(engine: Engine) -> None:
    engine.runner.cache.observes_step = lambda kind: False  # type: ignore[method-assign]


def counts_rows_of_refused_drafts(engine: Engine) -> None:
    cache = engine.runner.cache
    taken = cache.on_step

    def all_of_them(step: Any) -> None:
        taken(step)
        count = step.span.after - step.span.before
        cache.accepted[: step.kind.rows] = torch.where(count > 0, 1 + step.kind.drafts, 0)

    cache.on_step = all_of_them  # type: ignore[method-assign]


def begins_with_what_the_slot_had(engine: Engine) -> None:
    engine.runner.cache.admit = lambda *admissions: None  # type: ignore[method-assign]
    for group in engine.runner.cache.groups:
        if "state" in group.tensors:
            group.tensors["state"].fill_(0.1)


def has_a_ring_too_short(engine: Engine) -> None:
    """The oldest row that the convolution reads is overwritten before it is read."""
    for group in engine.runner.cache.groups:
        if "qkv" in group.tensors:
            group.tensors["qkv"] = group.tensors["qkv"][:, :, :3]


def gives_padding_to_the_last_prompt(engine: Engine) -> None:
    """Its last token is another."""
    state, packed = engine.runner.state, engine.runner.state.packed

    def wrong(chunks: Any, size: Any) -> torch.Tensor:
        made = packed(chunks, size)
        made[-size.sequences - 1 + len(chunks) :] = size.tokens
        return made

    state.packed = wrong  # type: ignore[method-assign]


MISTAKES: list[tuple[str, Mistake]] = [
    ("two ranks", shifts_lse),
    ("latents", shifts_lse),
    ("latents", forgets_temperature),
    ("latents", takes_the_next_heads_values),
    ("latents", rotates_neighbors_as_halves),
    ("sinks", has_a_sink_on_every_rank),
    ("norms over all heads", norms_its_own_heads_alone),
    *((name, adds_experts_up_twice) for name in ROWS if name.startswith("experts of ")),
    *(
        (f"chosen tokens of {family}", mistake)
        for family in ("deepseek-v32", "glm-5", "glm-5-shared")
        for mistake in (rotates_index_keys_otherwise, forgets_the_bias, forgets_signs, reads_one_token_more)
    ),
    ("chosen blocks", keeps_no_bounds_of_new_text),
    ("chosen blocks", keeps_bounds_of_an_unfinished_page),
    ("chosen blocks", chooses_a_block_less),
    ("chosen parts", has_a_candidate_less),
    ("blocks in host memory", writes_nothing_back),
    ("blocks in host memory", keeps_places_of_other_sequences),
    ("blocks beside states", judges_by_bounds_of_other_pages),
    ("blocks beside states", resumes_without_the_state),
    ("snapshots in host memory", moves_no_snapshot),
    ("snapshots in host memory", takes_a_snapshot_before_the_one_in_its_place_has_moved),
    ("snapshots", takes_a_snapshot_for_the_one_before),
    ("snapshots", keeps_no_ring_in_a_snapshot),
    ("states with drafts", applies_no_accepted_row),
    ("states with drafts", counts_rows_of_refused_drafts),
    ("states with drafts", begins_with_what_the_slot_had),
    ("states with drafts", has_a_ring_too_short),
    ("padded chunks", gives_padding_to_the_last_prompt),
]


def is_caught(name: str, mistake: Mistake | None = None) -> None:
    quiet()
    found = run_case(case_of(name), "cpu", 240.0, mistake)
    assert found.kind == "otherwise" and "refuse" not in found.reason, found


@pytest.mark.parametrize(
    "name, mistake", [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}") for each in MISTAKES]
)
def test_a_mistake_is_caught(name: str, mistake: Mistake) -> None:
    """In logits, or by memory that nobody has written, which is NaN."""
    is_caught(name, mistake)


def adds_up_for_another_rank(right: Callable[..., Any]) -> Callable[..., Any]:
    """Rank 1's prompts get the sums of rank 0's."""
    return lambda ffn, x, counts, comm: right(ffn, x, counts[::-1], comm)


def chooses_for_each_layer(right: Callable[..., Any]) -> Callable[..., Any]:
    def forgets(self: MLA, *args: Any) -> Any:
        if self.indexer is None:
            args[-1].shared.pop(SELECTED, None)
        return right(self, *args)

    return forgets


def takes_queries_for_the_other_half_s(right: Callable[..., Any]) -> Callable[..., Any]:
    def mistaken(step: Step) -> tuple[Step, Step]:
        first, second = right(step)
        return first, replace(second, positions=second.positions - 1)

    return mistaken


def takes_a_draft_unseen(right: Callable[..., Any]) -> Callable[..., Any]:
    def trusting(self: DecodeState, rows: int, drawn: Any, drafts: Any = None, outcome: Any = None) -> Any:
        if drafts is not None:
            first = drawn.pairs[:, :: 1 + drafts.shape[1], 1]
            first[:] = torch.where(drafts[:, 0] >= 0, drafts[:, 0].double(), first)
        return right(self, rows, drawn, drafts, outcome)

    return trusting


def copies_numbers_alone(scales: int) -> Callable[..., Any]:
    """Leaves out the scales, words at the end of a block."""

    def of(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda source, target, blocks: copy_blocks(source[..., :-scales], target[..., :-scales], blocks)

    return of


FUNCTIONS: list[tuple[str, object, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
    ("experts over the ranks of dp", layer, "dp_ffn", adds_up_for_another_rank),
    ("chosen tokens of glm-5-shared", MLA, "project", chooses_for_each_layer),
    ("halves", Step, "micro_batches", takes_queries_for_the_other_half_s),
    ("drafts by lookup", DecodeState, "commit", takes_a_draft_unseen),
    ("blocks in host memory in fp8", offloaded, "copy_blocks", copies_numbers_alone(32)),
    ("blocks in host memory in k16v8", offloaded, "copy_blocks", copies_numbers_alone(16)),
]


@pytest.mark.parametrize("name, owner, attribute, mistake", FUNCTIONS, ids=[name for name, *_ in FUNCTIONS])
def test_a_mistake_of_a_function_is_caught(
    name: str, owner: object, attribute: str, mistake: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    with patch.object(owner, attribute, mistake(getattr(owner, attribute))):
        is_caught(name)
