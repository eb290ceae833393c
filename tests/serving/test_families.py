"""Over HTTP every family draws the tokens that it draws alone: after a hit, a preemption and a death of its engine."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import launch.job.serve
from helix.config import ScheduleConfig
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.sampling_params import SamplingParams
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.sequences import generated_ids
from tests.serving.api_server import ApiServer, Serve, read
from tests.serving.chats import CHATS
from tests.serving.engine import EngineJob, alone, ids_of, name_tokens

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "seed": 11}


async def complete(
    api_server: ApiServer, prompt: tuple[int, ...], tokens: int, **more: Any
) -> tuple[tuple[int, ...], int]:
    """Tokens that were drawn, and how many of the prompt were in the cache."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0} | more
    answer = await api_server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), tokens)
    return ids_of(answer.json()["choices"][0]["text"]), usage["prompt_tokens_details"]["cached_tokens"]


FAMILIES = ["qwen3", "mistral-windowed", "mixtral", "gpt-oss", "deepseek-v3-yarn"]  # each kind of cache


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_are_those_of_decoding(
    family: str, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.job.serve, "STATS_S", 0.02)
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    sampled = Request("sampled", wanted[1].prompt, MOE_TOKENS, SamplingParams(**SAMPLED))
    (decoded,) = generated_ids(alone(family, max_length=192), [sampled]).values()

    def make() -> Engine:  # pages for 160 tokens, slots for three, leases of a few tokens
        schedule = ScheduleConfig(lookahead_tokens=2, max_prefill_stall_ms=2.0)
        return alone(family, max_length=192, max_batch=3, pages=40, prefill_chunk=24, schedule=schedule)

    api_server = await serve(EngineJob(make, name_tokens(tmp_path, 257), deaths=(12,), among=6))
    first = [complete(api_server, c.prompt, len(c.tokens)) for c in wanted[::-1]]
    drawing = complete(api_server, wanted[1].prompt, MOE_TOKENS, **SAMPLED)
    large = [complete(api_server, prompt, 40) for prompt in (wanted[2].prompt[30:], wanted[2].prompt[:29:-1])]
    *received, (sampled_tokens, _), _, _ = await asyncio.gather(*first, drawing, *large)
    assert [tokens for tokens, _ in received[::-1]] == [c.tokens for c in wanted]
    assert sampled_tokens == decoded
    for again in (False, True):
        tokens, cached = await complete(api_server, wanted[2].prompt + wanted[2].tokens[:-3], 3)
        min_tokens = 48 if family in ("mistral-windowed", "mixtral", "gpt-oss") else 96
        assert tokens == wanted[2].tokens[-3:] and (cached >= min_tokens or not again)
    metrics = await api_server.metrics()
    assert metrics["restarts_total"] == 1 and metrics["num_preemptions_total"] > 0, metrics


ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2, 9]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": ARGUMENTS}}
    for name in ("get_weather", "get_forecast")
]


@pytest.mark.parametrize(
    "known", ["{# <tool_call> #}{% if tools %}{% endif %}", pytest.param("", marks=pytest.mark.slow)]
)
async def test_a_model_that_never_learned_to_call_calls(known: str, serve: Serve, tmp_path: Path) -> None:
    """It may be of a known family or none, and its engine dies: the next one goes on within a call."""
    template = known + "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n"
    model = tmp_path / "model"
    (tokenizer := AutoTokenizer.from_pretrained(checkpoint("demo"))).chat_template = template
    tokenizer.save_pretrained(model)

    make = partial(alone, "demo", eos=0, max_length=192, max_batch=4)
    api_server = await serve(EngineJob(make, model, deaths=(10,), among=2))

    async def called(choice: Any, **more: Any) -> tuple[str, Any]:
        body = {"messages": [{"role": "user", "content": "def f"}], "tools": TOOLS, "tool_choice": choice}
        received = read(await api_server.post(CHATS, body | {"max_tokens": 160, "temperature": 1} | more))
        assert received.ends == "tool_calls", received
        (call,) = received.calls
        return call

    named = {"type": "function", "function": {"name": "get_forecast"}}
    answers = await asyncio.gather(called("required", seed=3, parallel_tool_calls=False), called(named, seed=4))
    for name, arguments in answers:
        assert name in ("get_weather", "get_forecast") and arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Paris", "Oslo") and arguments["days"] in (1, 2, 9)
    assert answers[1][0] == "get_forecast"
    assert (await api_server.metrics())["restarts_total"] == 1
