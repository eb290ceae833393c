"""A watch over the acceptance of a server's drafts."""

from __future__ import annotations

from collections import deque

HISTORY_S = 3600.0  # span in which acceptance is compared
MIN_WINDOW_S = 300.0  # least seconds of a share of it
MIN_DRAFTS = 1000  # least drafts of a share: three standard errors are 5% of all
MAX_DROP = 1 / 3


class AcceptanceMonitor:
    """Watch over the share of first drafts that are kept, which depends on no number of drafts.

    What requests are about moves it, and so does a drafter that no longer fits its model: nobody else would notice,
    since tokens stay right.
    """

    def __init__(self) -> None:
        self._shares: deque[tuple[float, float]] = deque()  # the time at which each ends, and what it is
        self._tried = self._accepted = 0.0
        self._begin: float | None = None
        self._fallen = False

    def add(self, tried: float, accepted: float, now: float) -> str | None:
        """Adds first drafts, and those of them that were kept, up to a time in seconds.

        Returns:
            A line if acceptance has fallen by MAX_DROP within HISTORY_S; once, until it has risen again.
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
            f"drafts: {share:.0%} of first drafts are kept, and {before:.0%} were {(now - best) / 60:.0f} minutes ago: "
            "other requests, or a drafter that does not fit them (docs/speculation.md)"
        )
