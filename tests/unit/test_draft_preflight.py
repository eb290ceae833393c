"""A draft model that cannot propose is refused by name before anything starts; one that can always has room."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm.loopback import LoopbackWorld
from helix.config import Config
from helix.errors import ConfigError
from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.setup import engine as build
from helix.setup.buffers import max_chunk, prompt_bytes, sampling_bytes, token_buffers
from helix.setup.drafts import CheckedDraft
from helix.speculation import DraftModel, ModelDrafter
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import EngineSizes, token_bytes
from tests.benchmark_config import compose_config, preflight
from tests.e2e.checkpoints import DEMO, checkpoint


def config(draft: Path | str, *overrides: str, target: Path | None = None) -> Config:
    return compose_config(*typed(draft, *overrides, target=target))


def typed(draft: Path | str, *overrides: str, target: Path | None = None) -> list[str]:
    model = f"model.path={target or checkpoint('qwen3')}"
    return [model, "bench=decode", "speculation=model", f"speculation.model.path={draft}", *overrides]


def draft_of(config: Config, world: int) -> CheckedDraft:
    draft = preflight(config, world).draft
    assert draft is not None
    return draft


def problem(overrides: list[str], world: int) -> str:
    with pytest.raises(ValueError) as caught:
        preflight(compose_config(*overrides), world)
    return str(caught.value)


@pytest.mark.parametrize(
    "family, overrides, kvp, tpa",
    [
        ("qwen3", [], 2, 2),  # 6 KV heads
        ("llama-llama3", [], 1, 4),
        ("llama-llama3", ["speculation.layout.kvp=2"], 2, 2),
        ("qwen3", ["speculation.layout.tpa=1"], 4, 1),
        ("llama-llama3", ["speculation.layout.mode=tp"], 1, 4),
        ("deepseek-v3-yarn", [], 4, 1),
        ("qwen3-moe", ["speculation.layout.ep=2"], 1, 4),
    ],
)
def test_a_layout_of_its_own(family: str, overrides: list[str], kvp: int, tpa: int) -> None:
    found = draft_of(config(checkpoint(family), "layout.kvp=4", *overrides), 4).layout
    assert (found.kvp, found.tpa) == (kvp, tpa)


def test_unset_under_an_automatic_layout() -> None:
    """The target's is chosen by its 6 KV heads, the draft model's by its own 4."""
    plan = preflight(config(checkpoint("llama-llama3"), "layout=auto"), 4)
    assert (plan.layout.kvp, plan.layout.tpa) == (2, 2)
    assert plan.draft is not None and (plan.draft.layout.kvp, plan.draft.layout.tpa) == (1, 4)


def test_a_draft_of_latents_keeps_no_values_alone() -> None:
    latents = checkpoint("deepseek-v3-yarn")
    assert draft_of(config(latents, "kv.dtype=fp8"), 1)
    message = problem(typed(latents, "kv.dtype=k16v8"), 1)
    assert "draft model" in message and "kv.dtype=k16v8" in message and "latents (MLA)" in message


def test_tokenizers_that_differ(tmp_path: Path) -> None:
    other = shutil.copytree(DEMO, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content))  # the same tokens in another file
    assert draft_of(config(other, target=DEMO), 1)
    vocab = content["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    message = problem(typed(other, target=DEMO), 1)
    assert "differ in 2 tokens" in message and f"{min(first, second)!r}" in message and str(other) in message
    assert "300" in message and "301" in message


@cache
def model_of(family: str, layout: HelixLayout) -> Decoder:
    comm = LoopbackWorld(layout.world_size).communicator(0, layout.kvp_group(0))
    spec = spec_from_config(read_config(checkpoint(family)))
    return Decoder(spec, layout, comm, torch.float32, torch.device("meta"))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    free=st.integers(100_000, 3_000_000),
    wanted=st.integers(1, 3000),
    max_batch=st.integers(1, 6),
    block=st.sampled_from([1, 16, 48]),
    family=st.sampled_from(["mistral-windowed", "deepseek-v3-yarn"]),
)
def test_both_caches_fit_the_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, wanted: int, max_batch: int, block: int, family: str
) -> None:
    layout, world = HelixLayout.create(), LoopbackWorld(1)
    draft = DraftModel(model_of(family, layout), layout, world.communicator(0, [0]))
    target = model_of("qwen3", layout)
    sizes = compose_config("speculation=model", f"kv.append_block={block}", "kv.page_size=32")
    monkeypatch.setattr(build, "free_bytes", lambda device: free)
    placement = KVPlacement(layout, 0, block, 32)
    page = 32 * sum(token_bytes(kept) for kept in target.spec.kv_cache_specs(layout, 0, "float32"))
    page += draft.page_bytes(placement)
    chunk = max_chunk(token_buffers(target.spec, layout, 0, "float32"), free)
    beside = draft.slot_bytes(placement, EngineSizes(max_batch, chunk=chunk, drafts=sizes.speculation.gamma))
    sampled = sampling_bytes(max_batch, sizes.speculation.gamma + 1, target.spec.vocab, captured=False)
    prompts = prompt_bytes(target.spec, layout, 0, chunk, wanted, "float32", captured=False)
    room = min(int(free * sizes.kv.memory_fraction), free - prompts - sampled)
    if page + beside > room:
        with pytest.raises(ConfigError, match="holds no page"):
            build.build_engine(layout, target, sizes, max_batch, wanted, draft=draft)
        return
    engine = build.build_engine(layout, target, sizes, max_batch, wanted, draft=draft)
    drafter = engine.runner.drafter
    assert isinstance(drafter, ModelDrafter) and drafter.cache.pages == engine.runner.cache.pages

    def size(cache: KVCache) -> int:
        return sum(t.numel() * t.itemsize for t in cache.tensors)

    used = size(engine.runner.cache) + size(drafter.cache)
    needed = placement.stripes.pages_for_all(wanted + sizes.speculation.gamma * max_batch, max_batch)
    assert used == page * drafter.cache.pages + beside <= room
    # A page more would not fit, or is not wanted.
    assert drafter.cache.pages == needed or used + page > room


@given(
    kvp=st.integers(1, 8), own=st.integers(1, 8), block=st.integers(1, 40), page=st.integers(1, 40),
    length=st.integers(1, 900), stripes=st.integers(1, 3),
)  # fmt: skip
def test_a_draft_models_tokens_are_in_the_pages_of_the_targets(
    kvp: int, own: int, block: int, page: int, length: int, stripes: int
) -> None:
    """Any tokens need no page beyond the target's, and whole stripes fill the same ones: they can be shared."""
    target = KVPlacement(HelixLayout.create("helix", kvp), 0, block, page * own)
    layout = HelixLayout.create("helix", own)
    draft = DraftModel(model_of("qwen3", HelixLayout.create()), layout, LoopbackWorld(own).communicator(0, range(own)))
    found, wanted = draft.placement(target).stripes, target.stripes
    assert found.page_tokens == wanted.page_tokens
    assert found.pages_for(length) <= wanted.pages_for(length)
    whole = stripes * wanted.tokens
    assert whole % found.tokens == 0 and found.pages_for(whole) == wanted.pages_for(whole)
