"""Monitors the acceptance rate of drafts on a server."""

from __future__ import annotations

from collections import deque

HISTORY_S = 3600.0  # time within which acceptance rates are compared
MIN_WINDOW_S = 300.0  # minimum seconds per rate
MIN_DRAFTS = 1000  # minimum drafts per rate: three standard errors are then 5 percentage points
MAX_DROP = 1 / 3


class AcceptanceMonitor:
    """Monitors the acceptance rate of first drafts, which does not depend on gamma.

    It changes with the requests, and drops if a drafter no longer fits its model. Nothing else would show that: output
    stays correct.
    """

    def __init__(self) -> None:
        self._shares: deque[tuple[float, float]] = deque()  # end time and rate
        self._tried = self._accepted = 0.0
        self._begin: float | None = None
        self._fallen = False

    def add(self, tried: float, accepted: float, now: float) -> str | None:
        """Adds counts of first drafts and accepted first drafts, up to the time `now` in seconds.

        Returns:
            A warning if the rate has dropped by MAX_DROP within HISTORY_S; once, until it has recovered.
        """
        self._begin = now if self._begin is None else self._begin
        self._tried, self._accepted = self._tried + tried, self._accepted + accepted
        if now - self._begin < MIN_WINDOW_S or self._tried < MIN_DRAFTS:
            return None
        share, self._begin = self._accepted / self._tried, now
        self._tried = self._accepted = 0.0
        while self._shares and self._shares[0][0] < now - HISTORY_S:
            self._shares.popleft()
        before, best = max(((past_share, at) for at, past_share in self._shares), default=(share, now))
        self._shares.append((now, share))
        fallen, warned = share <= (1 - MAX_DROP) * before, self._fallen
        self._fallen = fallen
        if not fallen or warned:
            return None
        return (
            f"drafts: {share:.0%} of first drafts are accepted, {before:.0%} were {(now - best) / 60:.0f} minutes ago: "
            "requests have changed, or the drafter does not fit them (docs/speculation.md)"
        )
