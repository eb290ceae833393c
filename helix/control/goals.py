"""Goals of scheduling: what bounds the chunks of prompts while somebody decodes."""

from __future__ import annotations

from dataclasses import dataclass

from helix.config import ScheduleConfig

PART = 0.2  # a chunk's longest part of the time for which prompts still have to wait


@dataclass(frozen=True)
class Bounds:
    """Bounds of chunks: most milliseconds of one, and the share of the time for decode steps between them."""

    stall_ms: float
    decode_share: float

    @property
    def owed(self) -> float:
        """Seconds of decode steps for each second of a chunk."""
        return self.decode_share / (1 - self.decode_share)


GOALS = {  # bounds while prompts hardly wait, and the widest ones
    "latency": (Bounds(25.0, 0.5), Bounds(25.0, 0.5)),
    "balance": (Bounds(50.0, 0.25), Bounds(400.0, 0.05)),
    "throughput": (Bounds(400.0, 0.05), Bounds(1000.0, 0.02)),
}


class Goal:
    """Bounds of a chunk, by the time for which prompts wait.

    `schedule.stall_ms` and `schedule.decode_share` replace those of `schedule.goal`.
    """

    def __init__(self, schedule: ScheduleConfig) -> None:
        self.least, self.most = (
            Bounds(
                of_goal.stall_ms if schedule.stall_ms is None else schedule.stall_ms,
                of_goal.decode_share if schedule.decode_share is None else schedule.decode_share,
            )
            for of_goal in GOALS[schedule.goal]
        )

    def stall_s(self, waiting_s: float) -> float:
        """Returns the most seconds of a chunk while other prompts wait for `waiting_s` seconds of chunks."""
        return min(max(self.least.stall_ms / 1e3, PART * waiting_s), self.most.stall_ms / 1e3)

    def owed_s(self, seconds: float) -> float:
        """Returns the seconds of decode steps after a chunk: a longer one is not followed by more, within bounds."""
        least, most = self.least, self.most
        return max(most.owed * seconds, min(least.owed * seconds, least.owed * least.stall_ms / 1e3))
