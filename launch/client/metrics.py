"""A server's metrics in Prometheus's format, under vLLM's names: with the prefix `helix:`, and as vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

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
