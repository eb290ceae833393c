"""A server's log says when a third fewer drafts are kept than before."""

from __future__ import annotations

import pytest

from helix.config import ServeConfig
from launch.client.frames import Stats
from launch.serving import acceptance
from launch.serving.acceptance import AcceptanceWatch
from launch.serving.routes import Api
from launch.serving.security import Keys


def test_a_fall_of_acceptance_is_told_once() -> None:
    watch, told = AcceptanceWatch(), []
    # Minutes, with the share of first drafts that were kept.
    for minute, share in [*((m, 0.9) for m in range(30)), *((m, 0.55) for m in range(30, 60))]:
        told.append(watch.add(400, 400 * share, 60.0 * minute))
    first = next(i for i, line in enumerate(told) if line)
    assert 34 <= first <= 40, "within two shares of five minutes"
    assert told[first].startswith("drafts: 55% of first drafts are kept, and 90% were"), told[first]
    assert [i for i, line in enumerate(told) if line] == [first]
    # It rises, and falls again.
    again = [watch.add(400, 400 * share, 3600.0 + 60 * m) for m, share in enumerate([0.9] * 20 + [0.5] * 20)]
    assert sum(line is not None for line in again) == 1


@pytest.mark.parametrize(
    "after, tried, every_s",
    [
        pytest.param(0.65, 400, 60.0, id="less than a third"),
        pytest.param(0.5, 2, 60.0, id="too few drafts"),
        pytest.param(0.5, 400, 3700.0, id="longer than an hour ago"),
    ],
)
def test_no_fall_is_told(after: float, tried: int, every_s: float) -> None:
    watch = AcceptanceWatch()
    for i in range(60):
        assert watch.add(tried, tried * (0.9 if i < 30 else after), every_s * i) is None


def test_a_server_tells_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Counters of a job grow; those of the next one begin at 0."""
    monkeypatch.setattr(acceptance, "EACH_S", 0.0)
    core = Api(ServeConfig(), Keys(None)).core
    for drafts, kept in [(1000, 900), (2000, 1800), (1000, 850), (2000, 1400)]:
        core._take(Stats({"drafts": drafts, "drafts_kept_0": kept, "drafts_kept_1": kept // 2}))
    assert [line[:49] for line in caplog.messages] == ["drafts: 55% of first drafts are kept, and 90% wer"]
