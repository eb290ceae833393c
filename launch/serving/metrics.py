"""A server's metrics in Prometheus's format, under vLLM's names with the prefix `helix:`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BETWEEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)  # two tokens
# Gauges of the engine, by its own names.
ENGINE = {
    "pages": ("kv_pages", "pages of KV on each rank"),
    "pages_used": ("kv_pages_used", "pages that sequences hold"),
    "pages_cached": ("kv_pages_cached", "pages that are kept for prompts that begin alike"),
    "pages_free": ("kv_pages_free", "pages that are free"),
}


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        disable_created_metrics()  # no extra timestamp per counter
        self._registry = CollectorRegistry()

        def histogram(name: str, what: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"helix:{name}", what, buckets=buckets, registry=self._registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"helix:{name}", what, labels, registry=self._registry)

        self.first_token = histogram("time_to_first_token_seconds", "from a request to its first token")
        self.between_tokens = histogram("inter_token_latency_seconds", "between two tokens of a request", BETWEEN)
        self.queued = histogram("request_queue_time_seconds", "from a request to its admission")
        self.whole = histogram("e2e_request_latency_seconds", "from a request to its end")
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.cached_tokens = counter("prefix_cache_hits", "tokens of prompts that were in the cache")
        self.new_tokens = counter("generation_tokens", "tokens drawn")
        self.ended = counter("request_success", "requests that ended, by how", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.ended.labels(reason)  # exported from the beginning, so that rates work
        self.preemptions = counter("num_preemptions", "requests that gave their pages to others, each time")
        self.restarts = counter("restarts", "restarts of the ranks")

    def watch(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Adds a gauge that is read at each scrape."""
        Gauge(f"helix:{name}", what, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
