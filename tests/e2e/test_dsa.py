"""Models whose indexers choose tokens (DSA) give what transformers gives, over every number of ranks."""

from __future__ import annotations

from itertools import cycle

import pytest

from helix.layout import HelixLayout
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.deepseek import DSA_FAMILIES
from tests.e2e.parity import check, loopback
from tests.e2e.test_parity import BLOCKS, MOE_LENGTHS, MOE_TOKENS, WORLDS


def matrix() -> list[object]:
    """Each family on every world, with blocks in turn."""
    blocks = cycle(BLOCKS)
    return [
        pytest.param(family, world, next(blocks), id=f"{family}-kvp{world}")
        for family in DSA_FAMILIES
        for world in WORLDS
    ]


@pytest.mark.parametrize("family, world, block", matrix())
def test_every_group(family: str, world: int, block: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create("helix", world), block, wanted), wanted)
