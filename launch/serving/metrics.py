"""A server's Prometheus metrics under vLLM's names, with the prefix `helix:` and with the prefix `vllm:`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
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
    "slabs": ("kv_offload_slabs", "stripes that host memory holds (kv.prefix_host_bytes)"),
    "slabs_used": ("kv_offload_slabs_used", "stripes in host memory"),
    "records": ("kv_offload_records", "stripes that the disk holds (kv.prefix_disk_bytes)"),
    "records_used": ("kv_offload_records_used", "stripes on disk"),
}
SOURCES = ("device", "host", "disk")
# Counters of moves of prefixes by the engine's names: vLLM's name, the label `tier`, and what it is; bytes of a rank.
MOVES = {
    "prefix_queries": ("external_prefix_cache_queries", None, "prompt tokens looked up in host memory and on disk"),
    "prefix_hits": ("external_prefix_cache_hits", None, "prompt tokens restored from there"),
    **{
        f"prefix_{name}_{unit}": (f"kv_offload_tiering_{kind}_{as_unit}", memory, f"{unit} of {kind}s, by tier")
        for name, kind, memory in (
            ("loaded", "read", "host"), ("read", "read", "disk"),
            ("stored", "write", "host"), ("written", "write", "disk"),
        )
        for unit, as_unit in (("bytes", "bytes"), ("seconds", "time"))
    },
    "prefix_failed": ("kv_offload_tiering_promotion_job_failures", None, "restores that failed"),
    "prefix_late": ("kv_offload_tiering_promotion_job_timeouts", None, "restores that took longer than prefill"),
    "prefix_failed_stores": ("kv_offload_store_failures", None, "stripes whose copies to host memory failed"),
    "prefix_failed_writes": ("kv_offload_tiering_write_failures", None, "writes to disk that failed"),
    "prefix_dropped": ("kv_offload_tiering_backpressure_stores_dropped", None, "stripes lost before they were stored"),
}  # fmt: skip
# Metrics that vLLM does not have.
OWN = {
    "restarts", "chat_format_info", "stored_responses", "stored_responses_bytes",
    "kv_offload_tiering_promotion_job_timeouts", "kv_offload_store_failures", "kv_offload_tiering_write_failures",
    *(name for name, _ in ENGINE.values()),
}  # fmt: skip
# Former names in vLLM, which some routers and dashboards still read.
OLDER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}


BUSY_S, BUSY_SHARE = 10.0, 0.9  # when a process is the bound


@dataclass(frozen=True)
class Snapshot:
    """What one process of a server has counted.

    Attributes:
        metrics: of its requests.
        load: see `ServerMetrics.load`.
    """

    metrics: list[Metric]
    load: dict[str, float]


@dataclass(frozen=True)
class Collected:
    """What all processes of a server have counted, and the metrics that the server has once."""

    snapshots: list[Snapshot]
    server: list[Metric]

    @property
    def load(self) -> dict[str, float]:
        """The sum of the processes' loads."""
        return {key: sum(one.load[key] for one in self.snapshots) for key in self.snapshots[0].load}

    def text(self, model: str) -> bytes:
        """Renders all metrics; those named `vllm:` have a label with the model's name."""
        requests = sum_metrics([metric for one in self.snapshots for metric in one.metrics])
        return generate_latest(_WithVllmNames([*requests, *self.server], model))


def sum_metrics(metrics: Iterable[Metric]) -> list[Metric]:
    """Adds the samples of metrics with the same name that have the same labels."""
    summed: dict[str, tuple[Metric, dict[Any, Any]]] = {}
    for metric in metrics:
        total = Metric(metric.name, metric.documentation, metric.type)
        samples = summed.setdefault(metric.name, (total, {}))[1]
        for sample in metric.samples:
            key = sample.name, *sorted(sample.labels.items())
            samples[key] = sample._replace(value=sample.value + (samples[key].value if key in samples else 0))
    for total, samples in summed.values():
        total.samples = [*samples.values()]
    return [total for total, _ in summed.values()]


class Metrics:
    """Counters, gauges and histograms of one process: of its requests, and of the whole server, which it has once."""

    def __init__(self) -> None:
        disable_created_metrics()  # no extra timestamp per counter
        self.requests, self.server = CollectorRegistry(), CollectorRegistry()

        def histogram(name: str, what: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"helix:{name}", what, buckets=buckets, registry=self.requests)

        def counter(name: str, what: str, *labels: str, registry: CollectorRegistry | None = None) -> Counter:
            return Counter(f"helix:{name}", what, labels, registry=registry or self.requests)

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
        once = partial(counter, registry=self.server)
        self.preemptions = once("num_preemptions", "preemptions: a request's pages were freed for others")
        self.drafts = once("spec_decode_num_drafts", "drafts verified: one per request and step")
        self.accepted_drafts = once(
            "spec_decode_num_accepted_tokens_per_pos", "accepted draft tokens, by position", "position"
        )
        self.restarts = once("restarts", "restarts of the ranks")
        self.cached_by_source = once("prompt_tokens_cached_by_source", "cached prompt tokens, by source", "source")
        for source in SOURCES:
            self.cached_by_source.labels(source)
        self.moves: dict[str, Counter] = {}
        for name, memory, what in MOVES.values():
            if name not in self.moves:
                self.moves[name] = once(name, what, *([] if memory is None else ["tier"]))
            if memory is not None:
                self.moves[name].labels(memory)
        labels = ("block_size", "num_gpu_blocks")
        self._cache = Gauge("helix:cache_config_info", "the cache's blocks", labels, registry=self.server)
        labels = ("format", "tool_calls")
        self._chat_format = Gauge("helix:chat_format_info", "the chat format", labels, registry=self.server)

    def watch(self, name: str, what: str, value: Callable[[], float], registry: CollectorRegistry) -> None:
        Gauge(f"helix:{name}", what, registry=registry).set_function(value)

    def describe_cache(self, block_size: int, blocks: int) -> None:
        """Sets the KV cache's block size, in tokens, and number of blocks."""
        self._cache.clear()
        self._cache.labels(block_size, blocks).set(1)

    def describe_chat_format(self, name: str | None, reads_calls: bool) -> None:
        """Sets the name of the chat format that answers are read in, and whether it has tool calls."""
        self._chat_format.clear()
        self._chat_format.labels(name or "none", str(reads_calls).lower()).set(1)


class BusyMonitor:
    """Notices that the event loop of a process takes a whole core: streams then wait for it and not for the ranks."""

    def __init__(self) -> None:
        self._begin: tuple[float, float] | None = None
        self._warned = False

    def add(self, cpu_s: float, now: float) -> str | None:
        """Adds the CPU seconds of the event loop's thread up to the time `now` in seconds.

        Returns:
            A warning, once, after BUSY_S with more than BUSY_SHARE of a core.
        """
        begin_cpu_s, begin = self._begin = self._begin or (cpu_s, now)
        if (seconds := now - begin) < BUSY_S:
            return None
        self._begin, share = (cpu_s, now), (cpu_s - begin_cpu_s) / seconds
        if share < BUSY_SHARE or self._warned:
            return None
        self._warned = True
        return f"HTTP takes {share:.0%} of a core in this process, so streams wait for it: raise serve.processes"


class ServerMetrics(Observer):
    """Metrics of a server's requests and of its engine.

    Args:
        is_first: whether this is the server's first process, which logs warnings for all.

    Attributes:
        engine_client: set once it exists.
        rate: tokens per second between the job's last two stats messages.
    """

    def __init__(self, is_first: bool = True) -> None:
        self._is_first = is_first
        self.engine_client: EngineClient
        self.rate = 0.0
        self._queried = self._hits = 0  # prompt tokens looked up in the prefix cache, and found there
        self._new_tokens, self._counted = 0, time.monotonic()  # tokens since the last stats message, and its time
        self._acceptance, self._busy = AcceptanceMonitor(), BusyMonitor()
        self.metrics = metrics = Metrics()
        requests = metrics.requests
        metrics.watch("num_requests_waiting", "requests in the queue", lambda: self.engine_client.waiting, requests)
        metrics.watch("num_requests_running", "requests admitted and not finished", self._num_running, requests)
        server = metrics.server
        metrics.watch("kv_cache_usage_perc", "share of the pages that sequences hold, 0 to 1", self._usage, server)
        for key, (name, what) in ENGINE.items():
            metrics.watch(name, what, lambda key=key: self.engine_client.stats.get(key, 0), server)  # type: ignore[misc]

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
        warnings = (
            self._acceptance.add(tried, increase("drafts_accepted_0"), now),
            self._busy.add(time.thread_time(), now),
        )
        for warning in filter(None, warnings if self._is_first else ()):
            LOG.warning(warning)
        for key in (key for key in stats if key.startswith("drafts_accepted_")):
            metrics.accepted_drafts.labels(key.removeprefix("drafts_accepted_")).inc(increase(key))
        for source in SOURCES:
            metrics.cached_by_source.labels(source).inc(increase(f"cached_{source}"))
        for key, (name, memory, _) in MOVES.items():
            found = metrics.moves[name] if memory is None else metrics.moves[name].labels(memory)
            found.inc(increase(key))
        if self.engine_client.engine_info is not None and (pages := int(stats.get("pages", 0))):
            metrics.describe_cache(self.engine_client.engine_info.kv_tokens // pages, pages)
        self.rate, self._new_tokens, self._counted = self._new_tokens / (now - self._counted), 0, now

    def on_restart(self) -> None:
        self.metrics.restarts.inc()

    def _num_running(self) -> int:
        return len(self.engine_client.generations) - self.engine_client.waiting

    def _usage(self) -> float:
        return self.engine_client.stats.get("pages_used", 0) / (self.engine_client.stats.get("pages", 0) or 1)

    def snapshot(self) -> Snapshot:
        """Returns what this process has counted."""
        return Snapshot([*self.metrics.requests.collect()], self.load())

    def load(self) -> dict[str, float]:
        """Returns this process's requests, their prompt tokens in the queue, tokens per second, and prefix hits."""
        generations = self.engine_client.generations.values()
        return {
            "running": self._num_running(),
            "waiting": self.engine_client.waiting,
            "waiting_tokens": sum(len(one.request.prompt) for one in generations if one.is_waiting),
            "rate": self.rate,
            "queried": self._queried,
            "hits": self._hits,
        }

    def loads(self, total: Mapping[str, float]) -> dict[str, Any]:
        """Returns the load of the ranks, in the fields of SGLang's `/v1/loads` that routers read.

        Args:
            total: the sum of all processes' `load`.

        Raises:
            ApiError: 503, the ranks are not ready.
        """
        engine_client = self.engine_client
        engine_info, running, waiting = engine_client.refuse_unless_ready(), total["running"], total["waiting"]
        page = engine_info.kv_tokens / engine_client.stats.get("pages", 1)  # tokens
        used, cached = (round(engine_client.stats.get(name, 0) * page) for name in ("pages_used", "pages_cached"))
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_waiting_uncached_tokens": total["waiting_tokens"],
            "num_used_tokens": used,
            "num_cached_tokens": cached,  # not in use, but available for prefix hits
            "max_total_num_tokens": engine_info.kv_tokens,
            "max_running_requests": engine_info.max_batch,
            "token_usage": self._usage(),
            "utilization": running / engine_info.max_batch,
            "gen_throughput": total["rate"],
            "cache_hit_rate": total["hits"] / max(1, total["queried"]),
        }
        aggregate = {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": load["token_usage"],
            "avg_throughput": total["rate"],
            "avg_utilization": load["utilization"],
        }
        now = datetime.now(UTC).isoformat()
        return {"timestamp": now, "dp_rank_count": 1, "loads": [load], "aggregate": aggregate}


class _WithVllmNames(CollectorRegistry):
    """Metrics under both prefixes: `helix:` and `vllm:`."""

    def __init__(self, metrics: Sequence[Metric], model: str) -> None:
        super().__init__()
        self._metrics = metrics
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
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
