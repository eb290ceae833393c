"""A timing that leaves the exchange of latents out."""

from __future__ import annotations

import pytest

from benchmarks.ranks.hopb import without_exchange
from helix.engine.core import Engine
from helix.layers import mla
from helix.layout import HelixLayout
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.warmup import step_seconds
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import check, loopback
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS


def test_queries_are_gathered_where_the_exchange_is_left_out_of_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "gathers_queries", lambda *args: True)
    monkeypatch.setattr(mla, "exchanges_values", lambda *args: False)
    wanted = oracle("deepseek-v2-yarn", MOE_LENGTHS, MOE_TOKENS)
    seconds = []

    def tamper(engine: Engine) -> None:
        seconds.append(
            without_exchange(engine.runner, engine.comm, lambda: step_seconds(engine.runner, DecodeGraphKey(2), 1))
        )

    check(loopback(checkpoint("deepseek-v2-yarn"), HelixLayout.create("helix", 2), 16, wanted, tamper), wanted)
    assert len(seconds) == 2 and min(seconds) > 0
