"""The engine as its callers meet it: refusals, ends, early leaving, failures, and what it measures."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine import Engine, Output
from helix.layout import HelixLayout
from helix.request import Request
from helix.speculation import NgramDrafter
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.parity import build_engine

FAMILY = "qwen3"
PROMPT = tuple(range(1, 20))


def engine(world: LoopbackWorld, rank: int, layout: HelixLayout, **options: Any) -> Engine:
    path: Path = options.pop("path", None) or checkpoint(FAMILY)
    return build_engine(path, layout, world.communicator(rank, layout.kvp_group(rank)), 16, **options)


def alone(**options: Any) -> Engine:
    return engine(LoopbackWorld(1), 0, HelixLayout.create(), **options)


def last(outputs: list[Output]) -> dict[Any, Output]:
    return {o.id: o for o in outputs}


@pytest.mark.parametrize(
    "request_, reason",
    [
        (Request(0, (), 5), "prompt is empty"),
        (Request(0, (1, 257), 5), r"token id 257 is outside the vocabulary \[0, 257\)"),
        (Request(0, (-1,), 5), "token id -1"),
        (Request(0, PROMPT, 0), "max_new_tokens=0"),
        (Request(0, PROMPT, 500), "exceed the model's context of 512"),
        (Request(0, PROMPT, 5, stop=("x",)), "need a tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_others_are(request_: Request, reason: str) -> None:
    outputs = last(list(alone().generate([request_, Request(1, PROMPT, 3)])))
    assert outputs[0].finish_reason == "error" and outputs[0].output_ids == ()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(outputs[0].reason)
    assert outputs[1].finish_reason == "length" and len(outputs[1].output_ids) == 3


def test_over_the_capacity_is_refused() -> None:
    small = alone(max_batch=1, max_length=100)
    outputs = last(list(small.generate([Request(0, PROMPT, 82), Request(1, PROMPT, 81)])))
    assert outputs[0].finish_reason == "error" and "101 tokens" in (outputs[0].reason or "")
    assert len(outputs[1].output_ids) == 81


@pytest.mark.parametrize("drafter", [None, NgramDrafter(4, 3)])
def test_over_its_length_is_refused_though_the_cache_would_hold_it(drafter: NgramDrafter | None) -> None:
    small = alone(max_batch=2, max_length=100, drafter=drafter)
    outputs = last(list(small.generate([Request(0, PROMPT, 82), Request(1, PROMPT, 81)])))
    assert outputs[0].finish_reason == "error" and "max_length=100" in (outputs[0].reason or "")
    assert len(outputs[1].output_ids) == 81


@pytest.mark.parametrize("broken", range(4), ids="step {}".format)
def test_no_token_comes_out_of_a_step_in_which_a_rank_gave_up(broken: int) -> None:
    """A collective that gave up leaves numbers that mean nothing: they are no tokens, however well they look."""
    e = alone()
    wanted = last(list(alone().generate([Request(0, PROMPT, 8)])))[0].output_ids
    gave_up = []
    draw, steps = e._draw, itertools.count()

    def lost(*args: Any) -> torch.Tensor:
        tokens = draw(*args)
        if next(steps) < broken:
            return tokens
        gave_up.append(True)
        return torch.zeros_like(tokens)

    def check(wait: bool = True) -> None:
        if gave_up:
            raise RuntimeError("rank 0 waited 300 s for rank 3")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e, "_draw", lost)
        patch.setattr(e.comm, "check", check)
        outputs: list[Output] = []
        with pytest.raises(RuntimeError, match="rank 3"):
            deque(map(outputs.append, e.generate([Request(0, PROMPT, 8)])))
    assert len(outputs) == broken and all(o.output_ids == wanted[: i + 1] for i, o in enumerate(outputs))


def test_every_token_is_an_output_in_order() -> None:
    outputs = list(alone().generate([Request(i, PROMPT[: 5 + i], 6) for i in range(3)]))
    for i in range(3):
        mine = [o for o in outputs if o.id == i]
        assert [len(o.output_ids) for o in mine] == [1, 2, 3, 4, 5, 6]
        assert all(b.output_ids[:-1] == a.output_ids for a, b in itertools.pairwise(mine))
        assert [o.finish_reason for o in mine] == [None] * 5 + ["length"]


@pytest.mark.parametrize("run_steps, prefill_chunk", [(1, 64), (5, 1), (8, 7), (64, 4096)])
def test_run_length_and_chunks_change_nothing(run_steps: int, prefill_chunk: int) -> None:
    wanted = oracle(FAMILY, (7, 1, 15, 16, 17, 300), 48)[:4]
    e = alone(prefill_chunk=prefill_chunk)
    e.run_steps = run_steps
    outputs = last(list(e.generate([Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)])))
    assert [outputs[i].output_ids for i in range(4)] == [c.tokens for c in wanted]


def test_eos_ends_a_request_and_gives_its_slot_on() -> None:
    wanted = oracle(FAMILY, (7, 1, 15, 16, 17, 300), 48)
    tokens = wanted[3].tokens
    eos = next(t for t in tokens[5:] if tokens.index(t) >= 5)  # first seen after a few tokens
    e = alone(max_batch=1)
    e.model.spec = replace(e.model.spec, eos=(eos,))
    outputs = last(list(e.generate([Request(0, wanted[3].prompt, 48), Request(1, wanted[2].prompt, 2)])))
    assert outputs[0].finish_reason == "stop" and outputs[0].output_ids == tokens[: tokens.index(eos) + 1]
    assert outputs[1].output_ids == wanted[2].tokens[:2]
    assert e.cache.free_pages == e.cache.pages and not e.admitted


def test_stop_texts_end_one_request_while_others_go_on() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    e = alone(path=DEMO)
    e.tokenizer = tokenizer
    prompt = tokenizer('def read_json(path):\n    """Read a JSON file')["input_ids"]
    outputs = list(e.generate([Request("stops", prompt, 40, stop=("Parameters",)), Request("goes on", prompt, 40)]))
    ended = last(outputs)
    whole = ended["goes on"].text
    assert "Parameters" in whole and ended["goes on"].finish_reason == "length"
    assert ended["stops"].text == whole[: whole.index("Parameters")] and ended["stops"].finish_reason == "stop"
    for name in ("stops", "goes on"):
        assert "".join(o.delta for o in outputs if o.id == name) == ended[name].text


def test_leaving_early_frees_everything_on_every_rank() -> None:
    layout = HelixLayout.create("helix", 2, 1)

    def body(world: LoopbackWorld, rank: int) -> tuple[list[Any], int, int]:
        e = engine(world, rank, layout)
        pages = e.cache.free_pages
        seen = []
        for output in e.generate([Request(i, PROMPT, 30) for i in range(7)]):
            seen.append(output)
            if len(seen) == 5:
                break
        again = list(e.generate([Request(0, PROMPT, 4)]))
        return again, pages, e.cache.free_pages

    (again, pages, free), (_, other_pages, other_free) = run_ranks(2, body, timeout_s=60)
    assert pages == free and other_pages == other_free
    assert len(again[-1].output_ids) == 4


def test_the_caller_is_not_left_in_inference_mode() -> None:
    outputs = alone().generate([Request(0, PROMPT, 3)])
    for _ in outputs:
        assert not torch.is_inference_mode_enabled()


def test_nan_is_an_error_and_not_a_token() -> None:
    e = alone()
    e.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="logits are NaN"):
        list(e.generate([Request(0, PROMPT, 3)]))


def test_nan_in_one_rank_of_two_ends_both() -> None:
    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, HelixLayout.create("helix", 2, 1))
        if rank == 1:
            e.model.layers[0].ffn.down.weight.fill_(torch.nan)
        list(e.generate([Request(0, PROMPT, 3)]))

    with pytest.raises(RuntimeError, match="logits are NaN"):
        run_ranks(2, body, timeout_s=30)


def test_what_is_measured() -> None:
    layout = HelixLayout.create("helix", 3, 1)
    progress: list[tuple[int, int]] = []

    def body(world: LoopbackWorld, rank: int) -> Any:
        e = engine(world, rank, layout, max_batch=2)
        e.on_prefill = lambda done, total: progress.append((done, total))
        list(e.generate([Request(0, PROMPT, 10), Request(1, tuple(range(1, 101)), 10)]))
        return e.timings

    timings = run_ranks(3, body, timeout_s=60)[0]
    assert progress[-1] == (119, 119) and timings.prefill_tokens == 119
    assert timings.decode_tokens == 2 * 9
    # Prompts share the first chunk of 64: the first one decodes a step between the chunks.
    assert len(timings.ttl_s) == 10 and all(t > 0 for t in timings.ttl_s)
    # Most held at a time: near the end of both, the last token drawn not being in the cache.
    held = [layout.local_length(19 + 8, k, 16, 0) + layout.local_length(100 + 9, k, 16, 1) for k in range(3)]
    assert sum(abs(a - b) for a, b in zip(timings.kv_tokens, held, strict=True)) <= 2
