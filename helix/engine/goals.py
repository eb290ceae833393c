"""Goals of scheduling: what bounds the chunks of prompts between two decode steps."""

from __future__ import annotations

from dataclasses import dataclass

from helix.config import ScheduleConfig


@dataclass(frozen=True)
class Bounds:
    """Bounds of prompts beside decode steps.

    Attributes:
        stall_ms: most milliseconds of chunks between two decode steps.
        decode_share: share of the time for decode steps; 0: one between two pauses.
    """

    stall_ms: float
    decode_share: float


GOALS = {  # bounds while prompts hardly wait, and those while they wait for long
    "latency": (Bounds(25.0, 0.5), Bounds(25.0, 0.5)),
    "balance": (Bounds(50.0, 0.25), Bounds(400.0, 0.0)),
    "throughput": (Bounds(400.0, 0.0), Bounds(1000.0, 0.0)),
}


class Goal:
    """Bounds of chunks, by the time for which prompts wait.

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
        """Returns the most seconds of chunks between two steps while other prompts wait for `waiting_s` seconds."""
        return min(max(self.least.stall_ms / 1e3, waiting_s), self.most.stall_ms / 1e3)

    def owed_s(self, seconds: float, stall_s: float) -> float:
        """Returns the seconds of decode steps after a chunk, which fall to none as the bound `stall_s` widens."""
        least, most = self.least, self.most
        wide = (1e3 * stall_s - least.stall_ms) / max(most.stall_ms - least.stall_ms, 1.0)
        share = least.decode_share + wide * (most.decode_share - least.decode_share)
        return share / (1 - share) * min(seconds, least.stall_ms / 1e3)
