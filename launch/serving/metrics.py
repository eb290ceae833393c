"""A server's Prometheus metrics under vLLM's names, with the prefix `helix:` and with the prefix `vllm:`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

from launch.client.engine_client import EngineClient, Generation, Observer
from launch.serving.acceptance import AcceptanceMonitor

LOG = logging.getLogger(f"helix.{__name__}")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BETWEEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)  # between tokens
TOKENS = tuple(float(1 << n) for n in range(0, 23, 2))  # per request, up to four million
# Gauges of the engine by its names.
ENGINE = {
    "pages": ("kv_pages", "KV cache pages on each rank"),
    "pages_used": ("kv_pages_used", "pages held by sequences"),
    "pages_cached": ("kv_pages_cached", "pages that no sequence uses, kept for prefix hits"),
    "pages_free": ("kv_pages_free", "free pages"),
}
OWN = {
    "restarts",
    "chat_format_info",
    "stored_responses",
    "stored_responses_bytes",
    *(name for name, _ in ENGINE.values()),
}  # vLLM does not have these
# Former names in vLLM, which some routers and dashboards still read.
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
        self.e2e_latency = histogram("e2e_request_latency_seconds", "from a request to its end")
        self.prompt_lengths = histogram("request_prompt_tokens", "tokens of a request's prompt", TOKENS)
        self.new_lengths = histogram("request_generation_tokens", "tokens generated for a request", TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.prefix_cache_queries = counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache")
        self.cached_tokens = counter("prefix_cache_hits", "prompt tokens found in the prefix cache")
        self.new_tokens = counter("generation_tokens", "tokens drawn")
        self.ended = counter("request_success", "finished requests, by finish reason", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.ended.labels(reason)  # export it from the start, so that rates work
        self.preemptions = counter("num_preemptions", "preemptions: a request's pages were freed for others")
        self.drafts = counter("spec_decode_num_drafts", "drafts verified: one per request and step")
        self.accepted_drafts = counter(
            "spec_decode_num_accepted_tokens_per_pos", "accepted draft tokens, by position", "position"
        )
        self.restarts = counter("restarts", "restarts of the ranks")
        labels = ("block_size", "num_gpu_blocks")
        self._cache = Gauge("helix:cache_config_info", "the cache's blocks", labels, registry=self._registry)
        labels = ("format", "tool_calls")
        self._chat_format = Gauge("helix:chat_format_info", "the chat format", labels, registry=self._registry)

    def watch(self, name: str, what: str, value: Callable[[], float]) -> None:
        Gauge(f"helix:{name}", what, registry=self._registry).set_function(value)

    def describe_cache(self, block_size: int, blocks: int) -> None:
        """Sets the KV cache's block size, in tokens, and number of blocks."""
        self._cache.clear()
        self._cache.labels(block_size, blocks).set(1)

    def describe_chat_format(self, name: str | None, reads_calls: bool) -> None:
        """Sets the name of the chat format that answers are read in, and whether it has tool calls."""
        self._chat_format.clear()
        self._chat_format.labels(name or "none", str(reads_calls).lower()).set(1)

    def text(self, model: str) -> bytes:
        """Renders all metrics; those named `vllm:` have a label with the model's name."""
        return generate_latest(_WithVllmNames(self._registry, model))


class ServerMetrics(Observer):
    """Metrics of a server's requests and of its engine.

    Attributes:
        engine_client: set once it exists.
        rate: tokens per second between the job's last two stats messages.
    """

    def __init__(self) -> None:
        self.engine_client: EngineClient
        self.rate = 0.0
        self._queried = self._hits = 0  # prompt tokens looked up in the prefix cache, and found there
        self._new_tokens, self._counted = 0, time.monotonic()  # tokens since the last stats message, and its time
        self._acceptance = AcceptanceMonitor()
        self.metrics = metrics = Metrics()
        metrics.watch("num_requests_waiting", "requests in the queue", lambda: self.engine_client.waiting)
        metrics.watch(
            "num_requests_running",
            "requests admitted and not finished",
            lambda: len(self.engine_client.generations) - self.engine_client.waiting,
        )
        metrics.watch("kv_cache_usage_perc", "share of the pages that sequences hold, 0 to 1", self._usage)
        for key, (name, what) in ENGINE.items():
            metrics.watch(name, what, lambda key=key: self.engine_client.stats.get(key, 0))  # type: ignore[misc]

    def on_submit(self, generation: Generation) -> None:
        self.metrics.prompt_tokens.inc(len(generation.request.prompt))

    def on_admit(self, generation: Generation) -> None:
        self.metrics.queued.observe(generation.admitted_time - generation.arrival_time)

    def on_tokens(self, generation: Generation, count: int, now: float) -> None:
        metrics = self.metrics
        if generation.output_token_ids:
            metrics.between_tokens.observe((now - generation.last_token_time) / count)
        else:
            prompt, cached = len(generation.request.prompt), generation.num_cached_tokens or 0
            metrics.first_token.observe(now - generation.arrival_time)
            metrics.prefill.observe(now - generation.admitted_time)
            metrics.prefix_cache_queries.inc(prompt)
            metrics.cached_tokens.inc(cached)
            self._queried += prompt
            self._hits += cached
        metrics.new_tokens.inc(count)
        self._new_tokens += count

    def on_finish(self, generation: Generation, finish_reason: str) -> None:
        metrics, now = self.metrics, time.monotonic()
        metrics.ended.labels(finish_reason).inc()
        metrics.e2e_latency.observe(now - generation.arrival_time)
        metrics.prompt_lengths.observe(len(generation.request.prompt))
        metrics.new_lengths.observe(len(generation.output_token_ids))
        if generation.first_token_time is not None:
            metrics.decode.observe(now - generation.first_token_time)

    def on_stats(self, before: Mapping[str, float], stats: Mapping[str, float]) -> None:
        def increase(key: str) -> float:
            """Returns how much a counter of the job has grown; a restarted job counts from 0."""
            old, now = before.get(key, 0), stats.get(key, 0)
            return now - old if now >= old else now

        metrics, now = self.metrics, time.monotonic()
        metrics.preemptions.inc(increase("preemptions"))
        metrics.drafts.inc(tried := increase("drafts"))
        if (fallen := self._acceptance.add(tried, increase("drafts_accepted_0"), now)) is not None:
            LOG.warning(fallen)
        for key in (key for key in stats if key.startswith("drafts_accepted_")):
            metrics.accepted_drafts.labels(key.removeprefix("drafts_accepted_")).inc(increase(key))
        if self.engine_client.engine_info is not None and (pages := int(stats.get("pages", 0))):
            metrics.describe_cache(self.engine_client.engine_info.kv_tokens // pages, pages)
        self.rate, self._new_tokens, self._counted = self._new_tokens / (now - self._counted), 0, now

    def on_restart(self) -> None:
        self.metrics.restarts.inc()

    def _usage(self) -> float:
        return self.engine_client.stats.get("pages_used", 0) / (self.engine_client.stats.get("pages", 0) or 1)

    def loads(self) -> dict[str, Any]:
        """Returns the load of the ranks, in the fields of SGLang's `/v1/loads` that routers read.

        Raises:
            ApiError: 503, the ranks are not ready.
        """
        engine_client = self.engine_client
        engine_info, waiting = engine_client.refuse_unless_ready(), engine_client.waiting
        page = engine_info.kv_tokens / engine_client.stats.get("pages", 1)  # tokens
        used, cached = (round(engine_client.stats.get(name, 0) * page) for name in ("pages_used", "pages_cached"))
        running = len(engine_client.generations) - waiting
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_waiting_uncached_tokens": sum(
                len(generation.request.prompt)
                for generation in engine_client.generations.values()
                if generation.is_waiting
            ),
            "num_used_tokens": used,
            "num_cached_tokens": cached,  # not in use, but available for prefix hits
            "max_total_num_tokens": engine_info.kv_tokens,
            "max_running_requests": engine_info.max_batch,
            "token_usage": self._usage(),
            "utilization": running / engine_info.max_batch,
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


class _WithVllmNames(CollectorRegistry):
    """A registry's metrics under both prefixes: `helix:` and `vllm:`."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__()
        self._source = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            yield metric
            name = metric.name.removeprefix("helix:")
            for alias in [] if name in OWN else [name, *([OLDER[name]] if name in OLDER else [])]:
                yield self._as_vllms(metric, alias)

    def _as_vllms(self, metric: Metric, name: str) -> Metric:
        copy = Metric(f"vllm:{name}", metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {"model_name": self._model} | sample.labels
            copy.add_sample(sample.name.replace(metric.name, copy.name, 1), labels, sample.value)
        return copy
