"""Metrics under vLLM's names, and the dashboard that reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from helix.engine.request import Request, RequestUpdate
from launch.client.frames import Stats
from tests.serving.front import READY, ROOT, FakeJob, Front, run, until

pytestmark = pytest.mark.timeout(120)
# What dashboards, routers and llm-d's endpoint picker read of vLLM.
READ = """
vllm:num_requests_waiting vllm:num_requests_running vllm:kv_cache_usage_perc vllm:cache_config_info
vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket vllm:time_per_output_token_seconds_sum
vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:request_success_total vllm:gpu_cache_usage_perc
vllm:request_queue_time_seconds_bucket vllm:request_prompt_tokens_bucket vllm:num_preemptions_total
"""


async def cached(job: FakeJob, submit: Request) -> None:
    drafts = {"drafts": 10, "drafts_kept_0": 7, "drafts_kept_1": 3}
    job.send(Stats({"pages": 64, "pages_used": 16, "pages_free": 48} | drafts))
    job.send(RequestUpdate(submit.id, 3, 2, 0))
    await job.say(submit, [100], cached_tokens=2)
    await job.say(submit, [101, 102], "length")


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, "each once"
            found[key] = sample.value
    return found


def test_what_vllm_s_readers_read_is_there(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        await front.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3})
        await until(lambda: front.core.stats)
        found = samples((await front.get("/metrics")).text)
        model = ("model_name", "demo-model")
        assert {name for name, _ in found} >= {*READ.split()}
        for (name, labels), value in found.items():
            if name.startswith("vllm:"):
                assert model in labels
                own = name.replace("gpu_cache", "kv_cache").replace("time_per_output_token", "inter_token_latency")
                rest = tuple(label for label in labels if label != model)
                assert found[own.replace("vllm:", "helix:"), rest] == value
        expected: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
            ("vllm:kv_cache_usage_perc", (model,)): 0.25,
            (
                "vllm:cache_config_info",
                (("block_size", str(READY.kv_tokens // 64)), model, ("num_gpu_blocks", "64")),
            ): 1,
            ("vllm:prefix_cache_queries_total", (model,)): 3,
            ("vllm:prefix_cache_hits_total", (model,)): 2,
            ("vllm:request_success_total", (("finished_reason", "length"), model)): 1,
            ("vllm:generation_tokens_total", (model,)): 3,
            ("vllm:spec_decode_num_drafts_total", (model,)): 10,
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", (model, ("position", "1"))): 3,
            ("vllm:time_to_first_token_seconds_count", (model,)): 1,
        }
        assert {key: found.get(key) for key in expected} == expected

    run(check, tmp_path, FakeJob(cached))


def test_the_dashboard_reads_what_there_is(tmp_path: Path) -> None:
    """And shows all kinds of metrics."""
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    read = {name for query in queries for name in re.findall(r"\b(?:vllm|helix):\w+", query)}
    assert len(queries) > 30 and len(read) > 15
    grouped = {label for query in queries for labels in re.findall(r"by \((.*?)\)", query) for label in labels.split()}

    async def check(front: Front) -> None:
        await front.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3})
        await until(lambda: front.core.stats)
        found = samples((await front.get("/metrics")).text)
        assert read - {name for name, _ in found} == set()
        assert grouped <= {label for _, labels in found for label, _ in labels}
        kinds = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in found if name.startswith("vllm:")}
        shown = {name.removesuffix("_bucket") for name in read}
        older = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"}
        assert kinds - shown == {*older, "vllm:cache_config_info"}

    run(check, tmp_path, FakeJob(cached))
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len({*places}) == len(places) and len({p["id"] for p in dashboard["panels"]}) == len(places)


def test_prometheus_scrapes_the_metrics() -> None:
    (job,) = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"] == [{"targets": ["helix:8000"]}]
    assert job["authorization"]["type"] == "Bearer"
