"""Metrics under vLLM's names, and the dashboard that reads them."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helix.config import ServeConfig
from helix.engine.request import Request, RequestUpdate
from launch.client.engine_messages import Queued, Stats
from launch.serving import acceptance
from launch.serving.acceptance import AcceptanceMonitor
from launch.serving.metrics import MOVES, BusyMonitor
from launch.serving.response_store import StoredResponse
from launch.serving.routes import Api
from launch.serving.security import ApiKeys
from tests.serving.api_server import READY, ROOT, ApiServer, Clock, FakeJob, Serve, counting, silent, until
from tests.serving.chats import COMPLETIONS

# What dashboards, routers and llm-d's endpoint picker read of vLLM.
READ = """
vllm:num_requests_waiting vllm:num_requests_running vllm:kv_cache_usage_perc vllm:cache_config_info
vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket vllm:time_per_output_token_seconds_sum
vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:request_success_total vllm:gpu_cache_usage_perc
vllm:request_queue_time_seconds_bucket vllm:request_prompt_tokens_bucket vllm:num_preemptions_total
"""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
MODEL = ("model_name", "demo-model")


async def cached(job: FakeJob, submit: Request) -> None:
    drafts = {"drafts": 10, "drafts_accepted_0": 7, "drafts_accepted_1": 3}
    job.send(Stats({"pages": 64, "pages_used": 16, "pages_free": 48} | drafts))
    job.send(RequestUpdate(submit.id, 3, 2, 0))
    await job.emit(submit, [100], cached_tokens=2)
    await job.emit(submit, [101, 102], "length")


async def samples(api_server: ApiServer) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families((await api_server.get("/metrics")).text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, "each once"
            found[key] = sample.value
    return found


async def test_metrics_count_what_went_through(serve: Serve) -> None:
    """Under our names, and what vLLM's readers read under theirs too."""
    api_server = await serve(FakeJob(cached))
    body = {"prompt": [[1, 2, 3], [1, 2, 4]], "n": 2, "max_tokens": 3}
    usage = (await api_server.post(COMPLETIONS, body)).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (6, {"cached_tokens": 4})
    await until(lambda: api_server.engine_client.stats)
    expected = {
        "time_to_first_token_seconds_count": 4, "inter_token_latency_seconds_count": 4,
        "request_queue_time_seconds_count": 4, "e2e_request_latency_seconds_count": 4,
        "request_prefill_time_seconds_count": 4, "request_decode_time_seconds_count": 4,
        "request_prompt_tokens_sum": 12, "request_generation_tokens_sum": 12,
        "prefix_cache_queries_total": 12, "prefix_cache_hits_total": 8,
        "prompt_tokens_total": 12, "generation_tokens_total": 12,
        'request_success_total{finished_reason="length"}': 4, "num_requests_running": 0,
        "num_requests_waiting": 0, "kv_pages_used": 16, "kv_pages_free": 48, "restarts_total": 0,
    }  # fmt: skip
    values = await api_server.metrics()
    assert {name: values[name] for name in expected} == expected
    found = await samples(api_server)
    assert {name for name, _ in found} >= {*READ.split()}
    for (name, labels), value in found.items():
        if name.startswith("vllm:"):
            assert MODEL in labels
            own = name.replace("gpu_cache", "kv_cache").replace("time_per_output_token", "inter_token_latency")
            rest = tuple(label for label in labels if label != MODEL)
            assert found[own.replace("vllm:", "helix:"), rest] == value
    pages = ("block_size", str(READY.kv_tokens // 64)), MODEL, ("num_gpu_blocks", "64")
    theirs: Samples = {
        ("vllm:kv_cache_usage_perc", (MODEL,)): 0.25,
        ("vllm:cache_config_info", pages): 1,
        ("vllm:prefix_cache_hits_total", (MODEL,)): 8,
        ("vllm:request_success_total", (("finished_reason", "length"), MODEL)): 4,
        ("vllm:spec_decode_num_drafts_total", (MODEL,)): 10,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", (MODEL, ("position", "1"))): 3,
        ("vllm:time_to_first_token_seconds_count", (MODEL,)): 4,
    }
    assert {key: found.get(key) for key in theirs} == theirs


async def test_the_time_in_the_queue_ends_with_admission(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the first token, behind a prompt that takes long; one that is refused was in no queue."""
    clock = Clock()
    for module in ("engine_client", "answer"):
        monkeypatch.setattr(f"launch.client.{module}.time", clock)
    monkeypatch.setattr("launch.serving.metrics.time", clock)

    async def slow(job: FakeJob, submit: Request) -> None:
        if submit.prompt[0] == 1:
            job.send(RequestUpdate(submit.id, finish_reason="error", reason="planted"))
            return
        job.send(Queued(submit.id))
        clock.now += 3
        job.send(RequestUpdate(submit.id, 1, 0, 0))
        await until(lambda: api_server.engine_client.waiting == 0)
        clock.now += 7
        await counting(job, submit)

    api_server = await serve(FakeJob(slow))
    for first in (1, 2):
        await api_server.post(COMPLETIONS, {"prompt": [first], "max_tokens": 1})
    values = await api_server.metrics()
    assert values["request_queue_time_seconds_count"] == 1
    assert values["request_queue_time_seconds_sum"] == 3
    assert values["time_to_first_token_seconds_sum"] == 10


async def test_every_documented_metric_moves(serve: Serve) -> None:
    """The page names all that there are, and none of them stays at 0 whatever happens."""
    documented = set(re.findall(r"`helix:(\w+)`", (ROOT / "docs" / "serving.md").read_text()))
    moved: set[str] = set()

    async def look() -> dict[str, float]:
        values = await api_server.metrics()
        names = {name: re.sub(r"(_bucket|_count|_sum)?(\{.*)?$", "", name) for name in values}
        # These come with the engine's first gauges.
        assert {*names.values(), "cache_config_info", "spec_decode_num_accepted_tokens_per_pos_total"} == documented
        moved.update(names[name] for name, value in values.items() if value)
        return values

    api_server = await serve(FakeJob(silent))
    api_server.api.shared.store.add(None, "resp_1", StoredResponse(None, (b"[]",)))
    request = asyncio.create_task(api_server.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 4}))
    await until(lambda: api_server.job.submits)
    assert (await look())["num_requests_waiting"] == 1
    api_server.job.send(RequestUpdate(1, 3, 2, 0))
    gauges = {"pages": 9, "pages_used": 2, "pages_cached": 3, "pages_free": 4, "preemptions": 5}
    gauges |= dict.fromkeys(["slabs", "slabs_used", "records", "records_used", "cached_device", *MOVES], 6)
    api_server.job.send(Stats(gauges | {"drafts": 3, "drafts_accepted_0": 2}))
    await until(lambda: api_server.engine_client.stats)
    assert (await look())["num_requests_running"] == 1
    (submit,) = api_server.job.submits
    await api_server.job.emit(submit, [7, 7])
    await until(lambda: api_server.engine_client.generations[1].output_token_ids)
    api_server.job.die()
    await until(lambda: len(api_server.job.submits) == 2)
    await api_server.job.emit(submit, [7, 7], "length")
    assert (await request).status_code == 200
    api_server.job.send(Stats({"pages": 9, "preemptions": 2}))  # the new job's own
    await until(lambda: api_server.engine_client.stats["preemptions"] == 2)
    values = await look()
    assert (values["num_preemptions_total"], values["restarts_total"]) == (7, 1)
    assert moved == documented


async def test_the_dashboard_reads_what_there_is(serve: Serve) -> None:
    """And shows all kinds of metrics."""
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    read = {name for query in queries for name in re.findall(r"\b(?:vllm|helix):\w+", query)}
    assert len(queries) > 30 and len(read) > 15
    grouped = {label for query in queries for labels in re.findall(r"by \((.*?)\)", query) for label in labels.split()}
    api_server = await serve(FakeJob(cached))
    await api_server.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 3})
    await until(lambda: api_server.engine_client.stats)
    found = await samples(api_server)
    assert read - {name for name, _ in found} == set()
    assert grouped <= {label for _, labels in found for label, _ in labels}
    kinds = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in found if name.startswith("vllm:")}
    shown = {name.removesuffix("_bucket") for name in read}
    older = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"}
    assert kinds - shown == {*older, "vllm:cache_config_info"}
    positions = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len({*positions}) == len(positions) and len({p["id"] for p in dashboard["panels"]}) == len(positions)


# ---- a log that says when a third fewer drafts are kept than before


def test_a_fall_of_acceptance_is_told_once() -> None:
    watch, received = AcceptanceMonitor(), []
    # Minutes, with the share of first drafts that were kept.
    for minute, share in [*((m, 0.9) for m in range(30)), *((m, 0.55) for m in range(30, 60))]:
        received.append(watch.add(400, 400 * share, 60.0 * minute))
    first = next(i for i, line in enumerate(received) if line)
    assert 34 <= first <= 40, "within two shares of five minutes"
    assert received[first].startswith("drafts: 55% of first drafts are accepted, 90% were"), received[first]
    assert [i for i, line in enumerate(received) if line] == [first]
    # It rises, and falls again.
    again = [watch.add(400, 400 * share, 3600.0 + 60 * m) for m, share in enumerate([0.9] * 20 + [0.5] * 20)]
    assert sum(line is not None for line in again) == 1


@pytest.mark.parametrize(
    "after, tried, every_s",
    [
        pytest.param(0.65, 400, 60.0, id="less than a third"),
        pytest.param(0.5, 2, 60.0, id="too few drafts"),
        pytest.param(0.5, 400, 3700.0, id="longer than an hour ago"),
    ],
)
def test_no_fall_is_told(after: float, tried: int, every_s: float) -> None:
    watch = AcceptanceMonitor()
    for i in range(60):
        assert watch.add(tried, tried * (0.9 if i < 30 else after), every_s * i) is None


def test_a_process_that_takes_a_core_is_told_once() -> None:
    """Not before ten seconds, and not for a peak within them."""
    monitor = BusyMonitor()
    cpu_s, received = 0.0, []
    for second in range(60):
        received.append(monitor.add(cpu_s, float(second)))
        cpu_s += 0.95 if 5 <= second < 10 or second >= 20 else 0.5
    assert [second for second, line in enumerate(received) if line] == [30]
    assert received[30] == "HTTP takes 95% of a core in this process, so streams wait for it: raise serve.processes"


def test_a_server_tells_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Counters of a job grow; those of the next one begin at 0."""
    monkeypatch.setattr(acceptance, "MIN_WINDOW_S", 0.0)
    engine_client = Api(ServeConfig(), ApiKeys(None)).engine_client
    for drafts, accepted in [(1000, 900), (2000, 1800), (1000, 850), (2000, 1400)]:
        engine_client._handle_message(
            Stats({"drafts": drafts, "drafts_accepted_0": accepted, "drafts_accepted_1": accepted // 2})
        )
    assert [line[:49] for line in caplog.messages] == ["drafts: 55% of first drafts are accepted, 90% wer"]
