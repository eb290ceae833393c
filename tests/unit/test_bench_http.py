"""What clients of a served model note: their clock's figures, and failures as one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.jobs import JobError
from benchmarks.models.http import HTTPClient, HTTPSeen, row, serving
from tests.serving.front import front


def seen(sent: float, came: list[float], new: int) -> HTTPSeen:
    usage = {"completion_tokens": new, "prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 5}}
    return HTTPSeen(sent, came, usage)


def test_figures_of_a_row() -> None:
    """Two streams; the second one's last piece has two tokens, so that its gaps are not its times of a token."""
    found = row([seen(0.0, [0.1, 0.2, 0.3], 3), seen(1.0, [1.3, 1.6], 3)], 2.0, 0.05)
    wanted = {
        "mean_ttft_ms": 200, "p50_ttft_ms": 200, "mean_itl_ms": 500 / 3, "p50_itl_ms": 100, "p90_itl_ms": 260,
        "mean_tpot_ms": 125, "p99_tpot_ms": 149.5, "requests": 2, "output_throughput": 3, "hit_rate": 0.5,
        "step_ms": 50, "over_step": 2.5,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert not any("itl" in name for name in row([seen(0.0, [0.1], 4)], 2.0))


def test_a_client_notes_each_piece(tmp_path: Path) -> None:
    async def check() -> None:
        async with front(tmp_path) as made, asyncio.timeout(60):
            client = HTTPClient(made.url, 4096)
            noted = await client.stream(client.tokens(7), 5)
            assert noted.usage["completion_tokens"] == 5 and noted.usage["prompt_tokens"] == 7
            assert 1 <= len(noted.came) <= 5 and noted.sent < noted.came[0] and noted.came == sorted(noted.came)
            with pytest.raises(JobError, match=r"400 Bad Request.*context_length_exceeded"):
                await client.stream(client.tokens(5000), 5)

    asyncio.run(check())


def test_a_server_that_does_not_start_is_no_wait() -> None:
    with pytest.raises(JobError, match="did not start"), serving(["serve.port=70000"]):
        pass
