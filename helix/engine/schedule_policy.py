"""How long prompts may keep decoding sequences waiting: the goals of `schedule.goal`."""

from __future__ import annotations

from dataclasses import dataclass

from helix.config import ScheduleConfig


@dataclass(frozen=True)
class Limits:
    """How much prefill may delay decode steps.

    Attributes:
        stall_ms: maximum prefill time between two decode steps.
        decode_share: minimum share of the time for decode; 0: a single step between two stalls.
    """

    stall_ms: float
    decode_share: float


GOALS = {  # (limits while prompts hardly wait, limits while they wait for long)
    "latency": (Limits(25.0, 0.5), Limits(25.0, 0.5)),
    "balance": (Limits(50.0, 0.25), Limits(400.0, 0.0)),
    "throughput": (Limits(400.0, 0.0), Limits(1000.0, 0.0)),
}


class SchedulePolicy:
    """Limits of prefill, which widen with the time that prompts wait."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self.tight, self.loose = (
            Limits(
                preset.stall_ms if schedule.max_prefill_stall_ms is None else schedule.max_prefill_stall_ms,
                preset.decode_share if schedule.decode_share is None else schedule.decode_share,
            )
            for preset in GOALS[schedule.goal]
        )

    def max_prefill_stall_s(self, waiting_s: float) -> float:
        """Returns the maximum seconds of prefill between two decode steps if other prompts wait `waiting_s`."""
        return min(max(self.tight.stall_ms / 1e3, waiting_s), self.loose.stall_ms / 1e3)

    def decode_debt_s(self, seconds: float, max_prefill_stall_s: float) -> float:
        """Returns the seconds of decode owed after `seconds` of prefill; the wider the stall limit, the fewer."""
        tight, loose = self.tight, self.loose
        wide = (1e3 * max_prefill_stall_s - tight.stall_ms) / max(loose.stall_ms - tight.stall_ms, 1.0)
        share = tight.decode_share + wide * (loose.decode_share - tight.decode_share)
        return share / (1 - share) * min(seconds, tight.stall_ms / 1e3)
