"""A cache in host memory: what comes early, once or late, what waits, and who writes where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import pytest
import torch

from benchmarks.ranks.synthetic import repeat_selected_blocks
from comm.loopback import LoopbackWorld
from helix.attention import offloaded
from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.kv_placement import BlockBudget
from helix.layout import HelixLayout
from helix.worker.offloaded_cache import OffloadedCache
from tests.e2e.checkpoints import checkpoint
from tests.e2e.masked_attention import MaskedAttention
from tests.e2e.parity import Sparse, build_engine, on_loopback
from tests.sequences import generated, generated_ids

PAGE = 16
BUDGET = BlockBudget(sink_blocks=1, local_blocks=4, topk=5, from_tokens=0)
LENGTHS = (7, 60, 260, 128, 33)
NEW_TOKENS = 18
SHORT_WINDOW = replace(BUDGET, local_blocks=1)

Tokens = dict[int, tuple[int, ...]]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    gen = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 257, (n,), generator=gen).tolist()) for n in lengths]


def generate(engine: Engine) -> Tokens:
    requests = [Request(i, prompt, NEW_TOKENS) for i, prompt in enumerate(prompts())]
    return generated_ids(engine, requests)


def tokens(
    family: str,
    layout: HelixLayout,
    sparse: Sparse | None,
    tamper: Callable[[Engine], None] = lambda engine: None,
) -> Tokens:
    def run(engine: Engine) -> Tokens:
        tamper(engine)
        with closing(engine):
            return generate(engine)

    return on_loopback(checkpoint(family), layout, PAGE, run, page_size=PAGE, sparse=sparse)[0]


@cache
def wanted(family: str, budget: BlockBudget) -> Tokens:
    def masks(engine: Engine) -> None:
        engine.runner.policy = MaskedAttention(budget)

    return tokens(family, HelixLayout.create(), None, masks)


# Hot places of a KV head: no more than five sequences choose at once on a rank of so many; and for every page there is.
FEW, ALL = {1: 25, 2: 17}, 40


def on_late_streams(monkeypatch: pytest.MonkeyPatch, *ops: str) -> Callable[[Engine], None]:
    """Lets operations on side streams wait until somebody waits for them: on a GPU, streams run beside each other."""
    waiting: dict[object, list[Callable[[], None]]] = defaultdict(list)
    sides: list[object] = [None]

    def deferred(op: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **more: Any) -> None:
            if sides[-1] is None:
                op(*args, **more)
            else:
                waiting[sides[-1]].append(partial(op, *args, **more))

        return call

    @contextmanager
    def beside(side: object) -> Iterator[None]:
        sides.append(side)
        yield
        sides.pop()

    def join(side: object) -> None:
        while waiting[side]:
            waiting[side].pop(0)()

    def on_streams(engine: Engine) -> None:
        for name, value in {
            "_side_stream": "side",
            "_prefetch_streams": ["even", "odd"],
            "_on_stream": beside,
            "_wait_stream": join,
        }.items():
            monkeypatch.setattr(engine.runner.policy, name, value)

    for name in ops:
        monkeypatch.setattr(offloaded, name, deferred(getattr(offloaded, name)))
    return on_streams


@pytest.mark.parametrize("late", [("copy_blocks",), ("copy_blocks", "resolve")])
def test_a_guess_may_take_until_its_layer_waits_for_it(late: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, or what it lets come."""
    # Of full pages, the five sequences read 1, 4, 6, 6 and 3 at most.
    sparse = Sparse(SHORT_WINDOW, resident=20, prefetch=True)
    found = tokens("qwen2", HelixLayout.create(), sparse, on_late_streams(monkeypatch, *late))
    assert found == wanted("qwen2", SHORT_WINDOW)


def test_a_right_guess_leaves_nothing_to_fetch() -> None:
    """A set pattern is guessed to the block: what the first layer fetches, the others have come ahead."""
    runners = list[Any]()

    def repeating(engine: Engine) -> None:
        repeat_selected_blocks(engine.runner, 0.5)
        runners.append(engine.runner)

    sparse = Sparse(SHORT_WINDOW, choice="local", resident=4 * ALL, prefetch=True)
    tokens("qwen2", HelixLayout.create(), sparse, repeating)
    (_, selected), (_, ahead) = runners[0].cache.fetch_counts, runners[0].cache.prefetch_counts
    assert ahead == (len(runners[0].model.spec.full) - 1) * selected > 0


def test_with_places_for_everything_a_block_comes_once() -> None:
    caches = list[Any]()
    for hot in (FEW[1], ALL):
        found = tokens(
            "qwen2", HelixLayout.create(), Sparse(SHORT_WINDOW, resident=hot), lambda e: caches.append(e.runner.cache)
        )
        assert found == wanted("qwen2", SHORT_WINDOW)
    few, most = (int(cache.fetch_counts[1]) for cache in caches)
    full = sum((n + NEW_TOKENS - 1) // PAGE for n in LENGTHS)
    # How many blocks lose one of few places depends on when requests come together, which is a matter of time.
    assert most <= full * caches[1].resident.gpu_block_of[:, :, 0].numel() and most < few


def test_a_set_pattern_of_blocks() -> None:
    """In benchmarks: what the token's position says is read, wherever it lies."""

    def repeating(engine: Engine) -> None:
        repeat_selected_blocks(engine.runner, 0.5)

    local = Sparse(SHORT_WINDOW, choice="local")
    found = [
        tokens("qwen2", HelixLayout.create("helix", 2), sparse, repeating)
        for sparse in (local, replace(local, resident=17))
    ]
    assert found[0] == found[1] != tokens("qwen2", HelixLayout.create("helix", 2), local)


def test_where_memory_is_full_the_next_waits() -> None:
    """Five sequences do not fit together; one that never does is refused; in the end the host has its memory back."""

    def run(engine: Engine) -> tuple[Tokens, str | None]:
        found = generate(engine)
        refused = generated(engine, [Request("huge", (1,) * 450, 5)]).get("huge")
        engine.close()
        assert isinstance(engine.runner.cache, OffloadedCache) and engine.runner.cache.store.tensor is None
        return found, None if refused is None else f"{refused.finish_reason}: {refused.reason}"

    layout, options = HelixLayout.create("helix", 2), dict(page_size=PAGE, pages=12)
    sparse = Sparse(SHORT_WINDOW, resident=FEW[2])
    found, refused = on_loopback(checkpoint("qwen2"), layout, PAGE, run, sparse=sparse, **options)[0]
    assert found == wanted("qwen2", SHORT_WINDOW)
    assert (
        refused is not None and refused.startswith("error: prompt of 450") and "raise kv.offload_host_bytes" in refused
    )


@pytest.mark.parametrize("shared", [True, False], ids=["begins with another's pages", "pages of its own"])
def test_who_is_aborted_before_its_first_token_writes_to_nobodys_pages(shared: bool) -> None:
    """Its slot was somebody's, whose length and unfinished page are still there."""
    everything = Sparse(replace(BUDGET, topk=40), choice="local", resident=ALL)
    long = prompts()[2][:180]
    last = long if shared else long[::-1]

    def served(*names: str) -> list[int]:
        world = LoopbackWorld(1)
        engine = build_engine(
            checkpoint("qwen2"), HelixLayout.create(), world.communicator(0, [0]), PAGE, page_size=PAGE,
            sparse=everything, max_batch=2,
        )  # fmt: skip
        generated(engine, [Request(i, (7 + i,) * 39, 3 + 20 * i) for i in range(2)])  # in both slots
        inbox, found = Inbox(), list[int]()
        for name in names:
            inbox.submit(Request(name, long if name == "stays" else last, 20))
        for update in chain.from_iterable(engine.serve(inbox)):
            found += update.new_token_ids if update.id == "stays" else ()
            if update.num_computed_tokens >= 64:
                inbox.abort("goes")
                inbox.close()
        # What was computed of the other one is right, too.
        found += generated_ids(engine, [Request("again", last, 20)])["again"]
        return found

    assert served("stays", "goes") == served("stays")
