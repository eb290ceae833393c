"""Prompts behind snapshots of states and windows compute their own tokens only, and get the logits without the cache.

The same document of 200 tokens begins all prompts; stripes have 16 tokens, so the last whole one ends at 192.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from tests.e2e import eagle3, mtp
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import LOGIT_TOLERANCE, LayerDrafts, on_loopback
from tests.e2e.test_layer_drafts import eagle
from tests.sequences import generated

NEW = 6
DOCUMENT = torch.randint(90, (200,), generator=torch.Generator().manual_seed(8)).tolist()


def question(number: int, length: int = 20) -> list[int]:
    return [(31 * number + 7 * i) % 90 for i in range(length)]


def served(path: Path, layout: HelixLayout, requests: Sequence[Request], **options: Any) -> tuple[list[int], Any]:
    """Serves one request after another; returns the computed tokens of each, and their tokens and logits."""

    def run(engine: Engine) -> tuple[list[int], list[tuple[int, ...]], dict[tuple[int, int], Tensor]]:
        logits: dict[tuple[int, int], Tensor] = {}
        computed, tokens = [], []
        for i, request in enumerate(requests):

            def observe(slots: Tensor, positions: Tensor, rows: Tensor, i: int = i) -> None:
                for position, row in zip(positions.tolist(), rows, strict=True):
                    logits[i, position] = row.clone()

            engine.runner.logits_hook = observe
            tokens += [one.token_ids for one in generated(engine, [request]).values()]
            computed.append(engine.timings.prefill_tokens)
        return computed, tokens, logits

    page = 16 // layout.kvp
    found = on_loopback(path, layout, page, run, page_size=page, prefill_chunk=70, adaptive=False, **options)
    return found[0][0], [each[1:] for each in found]


def check(path: Path, kvp: int, tpa: int, requests: Sequence[Request], wanted: list[int], **options: Any) -> None:
    layout = HelixLayout.create("helix", kvp, tpa)
    computed, found = served(path, layout, requests, **options)
    _, alone = served(path, layout, requests, prefix_cache=False, **options)
    assert computed == wanted
    assert found[0][0] == alone[0][0]
    for (_, ours), (_, theirs) in zip(found, alone, strict=True):
        assert ours.keys() == theirs.keys()
        assert max(float((ours[at] - theirs[at]).abs().max()) for at in ours) < LOGIT_TOLERANCE


GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]
STATES = ["qwen3-next", "qwen3.5-moe"]


@pytest.mark.parametrize("kvp, tpa", GRIDS)
@pytest.mark.parametrize("family", [*STATES, "gemma3", "gpt-oss", "mistral-windowed"])
def test_a_fork_computes_its_own_tokens_only(family: str, kvp: int, tpa: int) -> None:
    """The second one leaves the document where no snapshot is: it takes one there, at a junction."""
    requests = [Request(i, DOCUMENT + question(i), NEW) for i in range(4)]
    again = 220 if family in STATES else 28 + recomputed(family)
    check(checkpoint(family), kvp, tpa, requests, [220, min(again, 220), 28, 28], snapshots=6)


@pytest.mark.parametrize("kvp, tpa", GRIDS[1:3])
@pytest.mark.parametrize("family", STATES)
def test_forks_that_arrive_at_once_get_the_tokens_of_each_alone(family: str, kvp: int, tpa: int) -> None:
    layout = HelixLayout.create("helix", kvp, tpa)
    requests = [Request(i, DOCUMENT + question(i), NEW) for i in range(4)]

    def run(engine: Engine) -> tuple[int, dict[int | str, tuple[int, ...]]]:
        answers = {name: one.token_ids for name, one in generated(engine, requests).items()}
        return engine.timings.prefill_tokens, answers

    options: dict[str, Any] = dict(page_size=16 // kvp, prefill_chunk=70, adaptive=False)
    path = checkpoint(family)
    computed, together = on_loopback(path, layout, 16 // kvp, run, snapshots=6, **options)[0]
    assert computed == 220 + 3 * 28
    assert together == on_loopback(path, layout, 16 // kvp, run, prefix_cache=False, **options)[0][1]


def recomputed(family: str) -> int:
    """Returns the tokens before a hit that windows compute again."""
    windows = spec_from_config(read_config(checkpoint(family))).windows
    return sum(window - 1 for window in windows if window is not None)


@pytest.mark.parametrize("family", ["qwen3-next", "gemma3"])
@pytest.mark.parametrize("kvp, tpa", GRIDS[1:3])
def test_snapshots_where_the_last_message_begins_and_every_n_tokens(family: str, kvp: int, tpa: int) -> None:
    """The last turn is edited at once; a third prompt leaves the document at token 150, behind two of three."""
    edited = [Request(i, DOCUMENT + question(i), NEW, last_message_start=200) for i in range(2)]
    check(checkpoint(family), kvp, tpa, edited, [220, 28], snapshots=6)
    requests = [edited[0], Request(2, DOCUMENT[:150] + question(2), NEW)]
    check(checkpoint(family), kvp, tpa, requests, [220, 26], snapshots=6, snapshot_every=50)


@pytest.mark.parametrize("length", [191, 192, 193, 208])
@pytest.mark.parametrize("family, drafter", [("qwen3-next", "mtp"), ("gpt-oss", "eagle3"), ("gemma3", None)])
def test_at_the_end_of_a_stripe_no_token_counts_twice(family: str, drafter: str | None, length: int) -> None:
    """A repeated prompt ends before a snapshot, at it or after it; its last token is computed each time."""
    path, more = checkpoint(family), dict[str, Any](snapshots=6)
    if drafter is not None:
        path = mtp.with_layer(family) if drafter == "mtp" else eagle3.target(family)
        more["drafter"] = LayerDrafts(3, eagle3=eagle(family, "shared") if drafter == "eagle3" else None)
    prompt = (DOCUMENT + question(0))[:length]
    requests = [Request(i, prompt, NEW) for i in range(2)]
    check(path, 2, 1, requests, [length, length - (length - 1) // 16 * 16], **more)
