"""A server's metrics in Prometheus's format, under vLLM's names: with the prefix `helix:`, and as vLLM's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

from launch.client.core import Core, Flight, Observer
from launch.serving.acceptance import AcceptanceWatch

LOG = logging.getLogger("helix.serving")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BETWEEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)  # two tokens
TOKENS = tuple(float(1 << n) for n in range(0, 23, 2))  # of a request, up to four million
# Gauges of the engine, by its own names.
ENGINE = {
    "pages": ("kv_pages", "pages of KV on each rank"),
    "pages_used": ("kv_pages_used", "pages that sequences hold"),
    "pages_cached": ("kv_pages_cached", "pages that are kept for prompts that begin alike"),
    "pages_free": ("kv_pages_free", "pages that are free"),
}
OWN = {"restarts", *(name for name, _ in ENGINE.values())}  # vLLM has none of these
# Names that vLLM once had, which some routers and dashboards still read.
OLDER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
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
        self.prefill = histogram("request_prefill_time_seconds", "from admission to the first token")
        self.decode = histogram("request_decode_time_seconds", "from the first token to the end")
        self.whole = histogram("e2e_request_latency_seconds", "from a request to its end")
        self.prompt_lengths = histogram("request_prompt_tokens", "tokens of a request's prompt", TOKENS)
        self.new_lengths = histogram("request_generation_tokens", "tokens drawn for a request", TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.looked_up = counter("prefix_cache_queries", "tokens of prompts that were looked up in the cache")
        self.cached_tokens = counter("prefix_cache_hits", "tokens of prompts that were in the cache")
        self.new_tokens = counter("generation_tokens", "tokens drawn")
        self.ended = counter("request_success", "requests that ended, by how", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.ended.labels(reason)  # exported from the beginning, so that rates work
        self.preemptions = counter("num_preemptions", "requests that gave their pages to others, each time")
        self.drafts = counter("spec_decode_num_drafts", "steps of a request that verified drafts")
        self.kept = counter("spec_decode_num_accepted_tokens_per_pos", "drafts that were kept, by place", "position")
        self.restarts = counter("restarts", "restarts of the ranks")
        labels = ("block_size", "num_gpu_blocks")
        self._cache = Gauge("helix:cache_config_info", "the cache's blocks", labels, registry=self._registry)

    def watch(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Adds a gauge that is read at each scrape."""
        Gauge(f"helix:{name}", what, registry=self._registry).set_function(value)

    def describe_cache(self, block_size: int, blocks: int) -> None:
        """Tells the cache's blocks, and the tokens of each."""
        self._cache.clear()
        self._cache.labels(block_size, blocks).set(1)

    def text(self, model: str) -> bytes:
        """Writes all metrics; vLLM's bear the model's name."""
        return generate_latest(_Twice(self._registry, model))


class ServerMetrics(Observer):
    """Metrics of a server's continuations, and of its engine.

    Attributes:
        core: where they are told of; set once it is there.
        rate: tokens per second between the job's last two reports.
    """

    def __init__(self) -> None:
        self.core: Core
        self.rate = 0.0
        self._queried = self._hits = 0  # tokens of prompts, and those of them that were in the cache
        self._drawn, self._counted = 0, time.monotonic()  # tokens since the job's last report, and its time
        self._acceptance = AcceptanceWatch()
        self.metrics = metrics = Metrics()
        metrics.watch("num_requests_waiting", "requests queued, not yet admitted", lambda: self.core.waiting)
        metrics.watch(
            "num_requests_running", "requests that were admitted", lambda: len(self.core.flights) - self.core.waiting
        )
        metrics.watch("kv_cache_usage_perc", "share of the pages that sequences hold, 0 to 1", self._usage)
        for key, (name, what) in ENGINE.items():
            metrics.watch(name, what, lambda key=key: self.core.stats.get(key, 0))  # type: ignore[misc]

    def submitted(self, flight: Flight) -> None:
        self.metrics.prompt_tokens.inc(len(flight.request.prompt))

    def admitted(self, flight: Flight) -> None:
        self.metrics.queued.observe(flight.admitted - flight.began)

    def drawn(self, flight: Flight, count: int, now: float) -> None:
        metrics = self.metrics
        if flight.drawn:
            metrics.between_tokens.observe((now - flight.last) / count)
        else:
            prompt, cached = len(flight.request.prompt), flight.cached or 0
            metrics.first_token.observe(now - flight.began)
            metrics.prefill.observe(now - flight.admitted)
            metrics.looked_up.inc(prompt)
            metrics.cached_tokens.inc(cached)
            self._queried += prompt
            self._hits += cached
        metrics.new_tokens.inc(count)
        self._drawn += count

    def ended(self, flight: Flight, finish_reason: str) -> None:
        metrics, now = self.metrics, time.monotonic()
        metrics.ended.labels(finish_reason).inc()
        metrics.whole.observe(now - flight.began)
        metrics.prompt_lengths.observe(len(flight.request.prompt))
        metrics.new_lengths.observe(len(flight.drawn))
        if flight.first is not None:
            metrics.decode.observe(now - flight.first)

    def reported(self, before: Mapping[str, float], stats: Mapping[str, float]) -> None:
        def more(key: str) -> float:
            """Returns by how much a counter of the job has grown; another job counts from 0."""
            known, now = before.get(key, 0), stats.get(key, 0)
            return now - known if now >= known else now

        metrics, now = self.metrics, time.monotonic()
        metrics.preemptions.inc(more("preemptions"))
        metrics.drafts.inc(tried := more("drafts"))
        if (fallen := self._acceptance.add(tried, more("drafts_kept_0"), now)) is not None:
            LOG.warning(fallen)
        for key in (key for key in stats if key.startswith("drafts_kept_")):
            metrics.kept.labels(key.removeprefix("drafts_kept_")).inc(more(key))
        if self.core.ready is not None and (pages := int(stats.get("pages", 0))):
            metrics.describe_cache(self.core.ready.kv_tokens // pages, pages)
        self.rate, self._drawn, self._counted = self._drawn / (now - self._counted), 0, now

    def restarted(self) -> None:
        self.metrics.restarts.inc()

    def _usage(self) -> float:
        return self.core.stats.get("pages_used", 0) / (self.core.stats.get("pages", 0) or 1)

    def loads(self) -> dict[str, Any]:
        """Describes how busy the ranks are, in the fields of SGLang's `/v1/loads` that routers read.

        Raises:
            ApiError: 503, there are none.
        """
        core = self.core
        ready, waiting = core.refuse_unless_ready(), core.waiting
        page = ready.kv_tokens / core.stats.get("pages", 1)  # tokens
        used, cached = (round(core.stats.get(name, 0) * page) for name in ("pages_used", "pages_cached"))
        running = len(core.flights) - waiting
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_waiting_uncached_tokens": sum(
                len(flight.request.prompt) for flight in core.flights.values() if flight.waits
            ),
            "num_used_tokens": used,
            "num_cached_tokens": cached,  # of nobody, and known to prompts that begin alike
            "max_total_num_tokens": ready.kv_tokens,
            "max_running_requests": ready.max_batch,
            "token_usage": self._usage(),
            "utilization": running / ready.max_batch,
            "gen_throughput": self.rate,
            "cache_hit_rate": self._hits / max(1, self._queried),
        }
        total = {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": load["token_usage"],
            "avg_throughput": self.rate,
            "avg_utilization": load["utilization"],
        }
        now = datetime.now(UTC).isoformat()
        return {"timestamp": now, "dp_rank_count": 1, "loads": [load], "aggregate": total}


class _Twice(CollectorRegistry):
    """A registry's metrics under both prefixes."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__()
        self._of = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._of.collect():
            yield metric
            name = metric.name.removeprefix("helix:")
            for own in [] if name in OWN else [name, *([OLDER[name]] if name in OLDER else [])]:
                yield self._as_vllms(metric, own)

    def _as_vllms(self, metric: Metric, name: str) -> Metric:
        copy = Metric(f"vllm:{name}", metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {"model_name": self._model} | sample.labels
            copy.add_sample(sample.name.replace(metric.name, copy.name, 1), labels, sample.value)
        return copy
