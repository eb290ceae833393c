"""The scheduler against its invariants, over random workloads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.kv_cache import Placement
from helix.layout import HelixLayout
from helix.request import Request
from helix.sampling import SamplingParams
from helix.scheduler import Decision, Scheduler


def pages_of(kvp: int, block: int, page_size: int) -> Callable[[int, int, int], int]:
    return Placement(HelixLayout.create("helix", kvp), 0, block, page_size).pages


def request(name: int, prompt: int, new: int, **sampling: float) -> Request:
    return Request(name, list(range(prompt)), new, SamplingParams(**sampling))  # type: ignore[arg-type]


workload = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12)


@given(
    workload,
    st.integers(1, 4),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 8, 16]),
    st.integers(1, 4),
    st.integers(1, 50),
    st.integers(1, 9),
    st.integers(0, 200),
)
def test_any_workload(
    requests: list[tuple[int, int, int]],
    kvp: int,
    block: int,
    page_size: int,
    max_batch: int,
    chunk: int,
    run_steps: int,
    slack: int,
) -> None:
    """Each request is (prompt, max_new_tokens, tokens after which the model stops)."""
    pages = pages_of(kvp, block, page_size)
    longest = max(p + n for p, n, _ in requests)
    free = [max(pages(longest, s, k) for s in range(kvp)) + slack // 20 for k in range(kvp)]
    budget = longest + slack
    scheduler = Scheduler(pages, free, budget, max_batch, chunk, run_steps)
    for i, (prompt, new, _) in enumerate(requests):
        assert scheduler.submit(request(i, prompt, new)) is None
    admitted: list[int] = []
    slots: dict[int, tuple[int, int, int]] = {}  # slot -> request, tokens prefilled, tokens drawn
    held: dict[int, tuple[int, list[int]]] = {}
    starts: list[int] = []
    ended: set[int] = set()
    number = 0
    while (decision := scheduler.decide()) is not None:
        number += 1
        assert decision.number == number
        for slot in decision.retire:
            assert slots.pop(slot)[0] in ended
            held.pop(slot)
        for a in decision.admit:
            assert a.slot not in slots and 0 <= a.slot < max_batch
            admitted.append(int(a.id))
            starts.append(a.start)
            slots[a.slot] = (int(a.id), 0, 0)
            held[a.slot] = (a.reserved, [pages(a.reserved, a.start, k) for k in range(kvp)])
        assert sum(r for r, _ in held.values()) <= budget
        assert all(sum(p[k] for _, p in held.values()) <= free[k] for k in range(kvp))
        assert sum(s.end - s.begin for s in decision.prefill) <= chunk
        for segment in decision.prefill:
            which, done, drawn = slots[segment.slot]
            prompt = requests[which][0]
            assert segment.begin == done < segment.end <= prompt and segment.last == (segment.end == prompt)
            slots[segment.slot] = (which, segment.end, drawn)
            if segment.last:
                take(scheduler, slots, segment.slot, requests, ended)
        assert 0 <= decision.decode_steps <= run_steps
        assert decision.prefill or decision.decode_steps, "a decision that does nothing"
        for _ in range(decision.decode_steps):
            for slot, (which, done, drawn) in list(slots.items()):
                if done == requests[which][0] and not scheduler.running[slot].finished:
                    assert drawn < requests[which][1], "decoded past max_new_tokens"
                    take(scheduler, slots, slot, requests, ended)
    assert admitted == list(range(len(requests))), "first come, first served"
    assert ended == set(admitted)
    assert starts == [i % kvp for i in range(len(requests))], "the first block goes round"
    assert scheduler._free_pages == free and scheduler._free_tokens == budget


def take(
    scheduler: Scheduler,
    slots: dict[int, tuple[int, int, int]],
    slot: int,
    requests: list[tuple[int, int, int]],
    ended: set[int],
) -> None:
    which, done, drawn = slots[slot]
    _, new, stops = requests[which]
    finished = drawn + 1 >= min(new, stops)
    slots[slot] = (which, done, drawn + 1)
    scheduler.took(slot, finished)
    if finished:
        ended.add(which)


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    scheduler = Scheduler(pages_of(2, 16, 16), [2, 2], 64, 4, 64, 8)
    assert scheduler.submit(request(0, 50, 14)) is None
    reason = scheduler.submit(request(1, 50, 15))
    assert reason is not None and "65 tokens" in reason and "64" in reason and "kv.tokens" in reason


def test_pages_refuse_what_tokens_would_allow() -> None:
    """A rank's pages count, wherever the first block would go."""
    scheduler = Scheduler(pages_of(2, 16, 16), [1, 4], 1000, 4, 64, 8)
    assert scheduler.submit(request(0, 30, 2)) is None
    assert scheduler.submit(request(1, 30, 3)) is not None


@pytest.mark.parametrize(
    "kinds, stochastic, filtered", [([{}], False, False), ([{}, {"temperature": 1.0}], True, False)]
)
def test_sampling_flags_cover_the_running_batch(
    kinds: list[dict[str, float]], stochastic: bool, filtered: bool
) -> None:
    scheduler = Scheduler(pages_of(1, 16, 16), [100], 1000, 4, 64, 8)
    for i, kind in enumerate(kinds):
        scheduler.submit(request(i, 5, 5, **kind))
    decision = scheduler.decide()
    assert isinstance(decision, Decision)
    assert (decision.stochastic, decision.filtered) == (stochastic, filtered)
