"""Cases of the fuzzer: a random model, engine settings, and requests.

A family and a seed determine a case. SHARED consecutive seeds share the sizes that kernels are compiled for.
Settings are valid by docs/reference/features.md; one in ten is invalid (`INVALID`) and must be refused.
"""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from benchmarks.papers.policies import FULL
from helix.config import MAX_SELECTED, Config
from helix.kv_placement import Stripes
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.sampling_params import SamplingParams
from helix.worker.kv_cache_spec import MAX_RING_TOKENS
from tests.e2e.checkpoints import PACKINGS
from tests.e2e.fuzz_configs import LATENTS, OUTER, Json, Shapes, config_of, rope_of, written

# Sections of config.json, and rows and columns per scale.
STORED: dict[str, tuple[Json, tuple[int | None, int | None]]] = {
    "blocks of 16": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, (16, 16)),
    "blocks of 128": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128)),
    "rows": ({"quant_method": "fbgemm_fp8"}, (1, None)),
    # As in Ministral-3.
    "one scale": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        (None, None),
    ),
}
MXFP4 = "mxfp4"  # for gpt-oss's experts
LENGTH = 160  # maximum prompt length: exceeds gpt-oss's default window of 128
SHARED = 8  # seeds
MODES = ("helix", "helix", "helix", "tp", "medha", "dp")

Settings = dict[str, Any]


@dataclass(frozen=True)
class CaseRequest:
    """A request of a case.

    Attributes:
        follows: an ended request whose text (with lossy attention, whose prompt) this prompt continues; None: `tokens`
            are the whole prompt.
        share: share of that text.
        tokens: the prompt after that text.
        abort: number of output tokens after which it is aborted; None: never.
        late: number of outputs after which it is submitted.
    """

    name: str
    tokens: tuple[int, ...]
    new: int
    sampling: SamplingParams
    follows: str | None = None
    share: float = 1.0
    abort: int | None = None
    late: int = 0


@dataclass(frozen=True)
class Case:
    """A model, its settings and its requests.

    Attributes:
        content: of config.json, as written.
        own_head: the checkpoint has a head that differs from the embedding, whatever the config says.
        settings: of `Config`, by key.
        invalid: the key of INVALID applied to them; None: they are valid.
        lossy: attention reads only some keys, or FP8 values, so that transformers' output differs.
        eos: EOS tokens, instead of the config's.
        rounds: requests; a round starts when all before it have ended.
        min_keys: patches `helix.speculation.sparse`, small enough that drafts skip keys.
        piece_tokens: patches `helix.setup.offload`, small enough that earlier tokens of a chunk come in several pieces.
        run_steps: of `EngineSizes`, small enough that there are many runs.
        min_offload_memory: a cache in host memory has the minimum of resident blocks that its settings allow.
        random_pace: the number of drafts is random instead of adaptive.
        backend: between processes: nccl or symm_mem.
        stored: storage of matrices in FP8, one of STORED, or in four bits, one of PACKINGS; None: unquantized.
        kept: weights stay as stored.
        code_paths: of `tests.e2e.fuzz_runs`: paths that a model this small would not take.
        masked: lossy attention is compared with dense attention under a mask computed from the keys.
        alone: it is compared with one rank's.
        trained: directory of a checkpoint to use instead of random weights.
        pinned: there are no near-ties, so that captured steps sample the same tokens.
        nested: the model is the text part of a multimodal checkpoint.
    """

    family: str
    seed: int
    content: Json
    generation: Json | None
    own_head: bool
    settings: Settings
    invalid: str | None
    lossy: bool
    eos: tuple[int, ...]
    rounds: tuple[tuple[CaseRequest, ...], ...]
    min_keys: int
    piece_tokens: int
    run_steps: int
    min_offload_memory: bool
    random_pace: bool
    backend: str
    stored: str | None
    kept: bool
    code_paths: tuple[str, ...] = ()
    masked: bool = False
    alone: bool = False
    trained: str | None = None
    pinned: bool = False
    nested: bool = False

    @property
    def world_size(self) -> int:
        return int(self.settings["layout.kvp"] * self.settings["layout.tpa"] * self.settings["layout.dp"])

    @property
    def config(self) -> Config:
        """The ranks' config, without the model's path."""
        config = Config()
        for key, value in self.settings.items():
            *groups, name = key.split(".")
            setattr(attrgetter(".".join(groups))(config), name, value)
        config.serve.socket = "requests come from elsewhere"
        return config

    @property
    def features(self) -> dict[str, str]:
        """The features of a case, for counting."""
        s = self.settings
        blocks = s.get("attention.policy") == "block_sparse"
        return {
            "drafter": " ".join(filter(None, (s["speculation.drafter"], s.get("speculation.policy")))),
            "attention": ("blocks, a part" if self.lossy else "blocks, all") if blocks else "dense",
            "offload": s.get("kv.offload", "none"),
            "hopb": s["hopb.chunks"],
            "kv": s["kv.dtype"],
            "weights": f"{self.stored}, {'kept' if self.kept else 'unpacked'}" if self.stored else "whole",
            "layout": f"{s['layout.mode']} {s['layout.kvp']}x{s['layout.tpa']}x{s['layout.dp']}",
        }

    def __str__(self) -> str:
        more = f"spoilt={self.invalid} " if self.invalid else ""
        more += f"min_keys={self.min_keys} run_steps={self.run_steps} scarce={self.min_offload_memory} "
        more += f"whimsical={self.random_pace} eos={len(self.eos)} stored={self.stored} kept={self.kept} "
        requests = ", ".join(
            f"{request.name}:{len(request.tokens)}+{request.new}" for requests in self.rounds for request in requests
        )
        return more + " ".join(f"{key}={value}" for key, value in self.settings.items()) + f"; {requests}"


def case_of(
    family: str,
    seed: int,
    dtype: str = "float32",
    worlds: Sequence[int] = (1, 2, 2, 3, 4),
    modes: Sequence[str] = MODES,
) -> Case:
    """Returns the case of a family and a seed, in one of `modes`; every other config is in transformers' spelling."""
    rng = random.Random(f"{family} {seed}")
    shapes = Shapes.draw(family, seed // SHARED)
    config = config_of(family, rng, shapes)
    if family in LATENTS and family != "mistral4":  # its head_dim includes the part without RoPE
        config |= {"head_dim": config["qk_rope_head_dim"]}
    rope = rope_of(family, rng, config["max_position_embeddings"])
    config["eos_token_id"] = rng.choice((None, 2, 3, [3, 5]))
    content = written(family, config, rope, seed % 2 == 0, rng)
    if seed % 2 and family == "gpt_oss" and rng.random() < 0.2:  # here null means YaRN
        content = {k: v for k, v in content.items() if not k.startswith(("rope", "original_max"))}
        content |= rng.choice(({}, {"rope_scaling": None}, {"rope_parameters": None}))
    generation = rng.choice((None, None, {"eos_token_id": 7}, {"eos_token_id": [7, 9], "temperature": 0.5}))
    try:
        spec: DecoderSpec | None = spec_from_config(content)
    except ValueError:  # an invalid config: reading it ends the case
        spec = None
    kv_heads = 1 if family in LATENTS else config["num_key_value_heads"]
    experts = 1 if spec is None or spec.experts is None else spec.experts.experts
    if spec is not None and spec.has_states:
        modes = [mode for mode in modes if mode != "dp"] or ["helix"]
    q_heads = config["num_attention_heads"] if spec is None else min(q_heads for q_heads, _ in spec.heads)
    layout = layout_of(q_heads, kv_heads, experts, worlds, modes, rng)
    settings, lossy = settings_of(layout, spec, random.Random(f"settings {seed // SHARED}"), dtype, rng)
    vocab = config["vocab_size"]
    eos = tuple(rng.sample(range(vocab), vocab // 12)) if rng.random() < 0.5 else ()
    # With lossy attention a recomputed prompt gives other results, so never preempt there.
    overcommit = rng.random() < 0.2 and not lossy
    if overcommit:
        settings |= {"decode.max_batch": rng.choice(("3", "5")), "schedule.lookahead_tokens": 1}
    rounds = rounds_of(vocab, settings, eos, overcommit, rng)
    settings["kv.tokens"] = room_of(settings, rounds, overcommit or (not lossy and rng.random() < 0.3))
    invalid = None
    if rng.random() < 0.1 and spec is not None:
        invalid = rng.choice([words for words, (of, _) in INVALID.items() if of(spec)])
        settings |= INVALID[invalid][1]
    return Case(
        family,
        seed,
        content,
        generation,
        config["tie_word_embeddings"] and rng.random() < 0.3,
        settings,
        invalid,
        lossy,
        eos,
        rounds,
        rng.choice((16, 16, 16, 64, 256)),
        rng.choice((32, 64, 32768)),
        1 if overcommit else rng.choice((1, 2, 8)),
        rng.random() < 0.7,
        rng.random() < 0.4,
        rng.choice(("nccl", "symm_mem")),
        None
        if family in ("gpt_oss", "mistral4")
        else rng.choice((None, None, None, "blocks of 16", "blocks of 128", "rows", *rng.sample([*PACKINGS], 3))),
        rng.random() < 0.6,
        nested=spec is not None and family in OUTER and rng.random() < 0.4,
    )


def layout_of(
    q_heads: int, kv_heads: int, experts: int, worlds: Sequence[int], modes: Sequence[str], rng: random.Random
) -> HelixLayout:
    """Returns a random layout that divides these heads and experts."""
    while True:
        world, mode = rng.choice(worlds), rng.choice(modes)
        dp = world if mode == "dp" else 1
        kvp = 1 if mode in ("tp", "dp") else rng.choice([n for n in range(1, world + 1) if world % n == 0])
        ep = rng.choice([n for n in range(1, world + 1) if world % n == 0 and n <= experts])
        try:
            layout = HelixLayout.create(mode, kvp, world // (kvp * dp), ep=ep, dp=dp)
            layout.check_heads(q_heads, kv_heads)
        except ValueError:
            continue
        return layout


def settings_of(
    layout: HelixLayout, spec: DecoderSpec | None, shared: random.Random, dtype: str, rng: random.Random
) -> tuple[Settings, bool]:
    """Returns valid settings, and whether attention is lossy: it reads only some keys, or FP8 values.

    Args:
        shared: random generator of the cases that share compiled kernels.
    """
    page = shared.choice((1, 3, 16, 16, 32, 32, 64, 128))
    block = rng.choice((page, shared.choice((1, 4, 5, 17)), shared.choice((16, 17, 37, 64))))
    gammas = 1, shared.choice((2, 3)), shared.choice((4, 5, 7))
    settings: Settings = {
        "model.dtype": dtype,
        "layout.mode": layout.mode,
        "layout.kvp": layout.kvp,
        "layout.tpa": layout.tpa,
        "layout.ep": layout.ep,
        "layout.dp": layout.dp,
        "kv.append_block": block,
        "kv.page_size": page,
        "kv.prefix_cache": rng.random() < 0.8,
        "hopb.chunks": rng.choice(("none", "none", "2", "3", "auto")),
        "decode.max_batch": rng.choice(("1", "2", "3", "5")),
        "decode.prefill_chunk": str(rng.choice((7, 24, 64, 256))),
        "schedule.lookahead_tokens": rng.choice((1, 2, 16)),
        "schedule.max_prefill_stall_ms": rng.choice((2.0, 50.0)),
        "speculation.drafter": "none",
        "kv.dtype": "auto",
        "attention.shared_prefix": "always",
    }
    if spec is not None and spec.full and rng.random() < 0.35:
        settings["kv.dtype"] = "fp8" if spec.attention.latent is not None else rng.choice(("fp8", "fp8", "k16v8"))
        if spec.indexers:
            settings["kv.dtype"] = rng.choice(("fp8", "fp8_all"))
    rounds = settings["kv.dtype"] != "auto"
    if layout.mode == "dp":  # it has no batch chunks, drafts or block selection
        return settings | {"hopb.chunks": rng.choice(("none", "auto"))}, rounds
    has_heads = spec is not None and _whole(spec)
    drafters = ["none", "suffix", "suffix", "model"]
    if spec is not None and (spec.has_states or any(w is not None and w <= MAX_RING_TOKENS for w in spec.windows)):
        settings["kv.snapshots"] = rng.choice((0, 1, 2, 8))
    if spec is not None and spec.has_states:
        drafters.remove("model")  # a draft model would have the family's states
    if spec is not None and spec.nextn in spec.layers:
        drafters += ["mtp"] * 6
    sparse_pages = page == 1 or (page >= 16 and page & (page - 1) == 0)
    blocks = has_heads and rng.random() < 0.35
    if spec is not None and spec.full and not blocks and sparse_pages:
        drafters += ["sparse"] * 6
    if spec is not None and spec.hidden % spec.attention.q_heads == 0:  # LlamaConfig requires it
        drafters += ["eagle3"]
    drafter = rng.choice(drafters)
    if drafter != "none":
        settings |= {"speculation.drafter": drafter, "speculation.gamma": rng.choice(gammas)}
        settings["speculation.adaptive"] = rng.random() < 0.5
    if drafter == "suffix":
        settings["speculation.suffix_pool_tokens"] = rng.choice((0, 300, 1 << 18))
    if drafter == "model":
        settings |= _draft_layout(layout, spec, page, rng)
    if drafter in ("mtp", "eagle3"):
        settings["speculation.noise"] = rng.choice(("shared", "own"))
    if drafter == "eagle3":
        assert spec is not None
        settings["speculation.window"] = rng.choice([n for n in (3, 20, 200) if n not in spec.windows])
    if settings.get("kv.snapshots") and settings["kv.prefix_cache"]:
        settings["kv.host_snapshots"] = rng.choice((0, 1, 3))
        settings["kv.snapshot_every"] = rng.choice((0, 0, 16, 50))
    if drafter == "sparse":
        assert spec is not None
        settings |= _self_drafts(spec, page, rng)
    lossy = blocks and _block_sparse(layout, settings, dtype, rng)
    if spec is not None and spec.indexers and drafter != "sparse" and rng.random() < 0.3:
        settings |= {"kv.offload": "host", "kv.offload_host_bytes": 1e9}
    if settings["kv.prefix_cache"] and settings.get("kv.offload") != "host":
        stripe_tokens = Stripes(layout, settings["kv.append_block"], settings["kv.page_size"]).tokens
        few_stripes = max(2e6, 2.0**14 * stripe_tokens)  # at most 12 KB a token were seen
        settings["kv.prefix_host_bytes"] = rng.choice((0, 0, few_stripes, max(2e7, few_stripes)))
        if settings["kv.prefix_host_bytes"] and rng.random() < 0.3:
            settings |= {"kv.prefix_dir": "below the case's directory", "kv.prefix_disk_bytes": max(2e7, few_stripes)}
    return settings, lossy or rounds


def _draft_layout(layout: HelixLayout, spec: DecoderSpec | None, page: int, rng: random.Random) -> Settings:
    world, candidates = layout.world_size, []
    for mode in ("helix", "tp", "medha"):
        for kvp in (n for n in range(1, world + 1) if world % n == 0 and page * layout.kvp % n == 0):
            try:
                candidate = HelixLayout.create(mode, kvp, world // kvp)
                if spec is not None:
                    for heads in spec.heads:
                        candidate.check_heads(*heads)
            except ValueError:
                continue
            candidates.append({"mode": mode, "kvp": kvp, "tpa": world // kvp})
    if not candidates:
        return {"speculation.drafter": "suffix"}
    return {f"speculation.layout.{key}": value for key, value in rng.choice(candidates).items()}


def _self_drafts(spec: DecoderSpec, page: int, rng: random.Random) -> Settings:
    policies = ["any", "any", "window", FULL, *([] if spec.indexers else ["c2q"])]
    if spec.attention.latent is None and page >= 16:  # with smaller pages a query would select too many
        policies.append("quest")
    return {
        "speculation.policy": rng.choice(policies),
        "speculation.sparsity": rng.choice((0.05, 0.1, 0.3, 1.0)),
        "speculation.recent": rng.choice((0.0, 0.5, 0.5, 1.0)),
        "speculation.reach": rng.choice((0, 1, 8, 16)),
        "speculation.heads": rng.choice(("each", "all")),
        "speculation.noise": rng.choice(("shared", "own")),
    }


def _block_sparse(layout: HelixLayout, settings: Settings, dtype: str, rng: random.Random) -> bool:
    """Adds block-sparse attention, maybe with offload; returns whether it skips keys."""
    page = settings["kv.page_size"]
    drafts = settings.get("speculation.gamma", 0)
    whole = layout.tpa <= 1 or layout.mode != "tp"  # all query heads of a KV head on one rank
    choice = "global" if whole and rng.random() < 0.4 else "local"
    if choice == "global":
        settings |= {"kv.append_block": page, "hopb.chunks": rng.choice(("none", "auto"))}
    settings |= {
        "attention.policy": "block_sparse",
        "attention.block": page,
        "attention.choice": choice,
        "attention.sink_blocks": rng.choice((0, 1, 2)),
        "attention.local_blocks": 1 + -(-drafts // page) + rng.choice((0, 0, 1, 3)),
        "attention.num_blocks": rng.choice((0, 1, 2, 5)),
        "attention.from_tokens": rng.choice((0, 0, 20, 70)),
    }
    max_pages = Stripes(layout, settings["kv.append_block"], page).pages_for(2 * LENGTH)
    lossy = True
    # In bf16 the right selection is ambiguous: read everything.
    if dtype != "float32" or rng.random() < 0.4:
        lossy = False
        if max_pages * layout.kvp <= MAX_SELECTED and rng.random() < 0.8:  # each rank selects all its blocks
            settings["attention.num_blocks"] = max_pages * layout.kvp
        else:
            settings["attention.from_tokens"] = 1 << 20
    if rng.random() < 0.4 and settings["speculation.drafter"] not in ("mtp", "eagle3"):
        settings |= {"kv.offload": "host", "kv.offload_host_bytes": 1e9}
        settings["kv.offload_prefetch"] = settings["attention.num_blocks"] > 0 and rng.random() < 0.5
    return lossy


def rounds_of(
    vocab: int, settings: Settings, eos: tuple[int, ...], overcommit: bool, rng: random.Random
) -> tuple[tuple[CaseRequest, ...], ...]:
    """Returns requests, sometimes more than slots; some share prompts' prefixes, some continue others' outputs.

    Args:
        overcommit: all are admitted with short prompts, and grow until they do not fit together.
    """
    first: list[CaseRequest] = []
    for number in range(rng.choice((3, 4, 5)) if overcommit else rng.choice((1, 2, 3, 3, 4, 6))):
        new = rng.choice((20, 40)) if overcommit else rng.choice((1, 2, 5, 9, 16))
        tokens = _prompt(vocab, settings["kv.append_block"], rng)[: 12 if overcommit else None]
        if first and rng.random() < 0.3:
            before = rng.choice(first).tokens
            tokens = (before[: rng.randint(1, len(before))] + tokens)[:LENGTH]
        abort = rng.randint(1, new) if new > 2 and rng.random() < 0.15 else None
        late = rng.choice((0, 0, 0, 1, 4))
        first.append(CaseRequest(f"r{number}", tokens, new, _sampling(vocab, eos, rng), abort=abort, late=late))
    second: list[CaseRequest] = []
    for number in range(rng.choice((0, 0, 1, 2))):
        suffix = tuple(rng.randrange(vocab) for _ in range(rng.choice((1, 2, 20))))
        new, share = rng.choice((1, 3, 8)), rng.choice((1.0, 1.0, rng.random()))
        second.append(
            CaseRequest(
                f"f{number}", suffix, new, _sampling(vocab, eos, rng), follows=rng.choice(first).name, share=share
            )
        )
    return (tuple(first), tuple(second)) if second else (tuple(first),)


def _prompt(vocab: int, block: int, rng: random.Random) -> tuple[int, ...]:
    """Returns a prompt of any length, or one that ends just before an append block's end; some repeat themselves."""
    near = max(1, min(block * rng.randint(1, 4) - rng.randint(0, 8), LENGTH))
    length = rng.choice((1, rng.randint(2, 40), rng.randint(40, LENGTH), near, near))
    tokens = [rng.randrange(vocab) for _ in range(length)]
    if rng.random() < 0.3:  # for lookup drafters
        period = rng.randint(1, 9)
        tokens = [tokens[i % period] for i in range(length)]
    return tuple(tokens)


def _sampling(vocab: int, eos: tuple[int, ...], rng: random.Random) -> SamplingParams:
    ends = {"ignore_eos": bool(eos) and rng.random() < 0.3}
    if rng.random() < 0.15:
        ends["stop_token_ids"] = tuple(rng.sample(range(vocab), vocab // 10))
    kinds: list[Json] = [
        {},
        {},
        {"temperature": 0.8, "seed": rng.randrange(1 << 40)},
        {"temperature": 1.3, "seed": rng.randrange(1 << 40), "top_k": rng.randint(1, 40)},
        {"temperature": 0.7, "seed": rng.randrange(1 << 40), "top_p": 0.9, "min_p": rng.choice((0.0, 0.05))},
    ]
    return SamplingParams(**rng.choice(kinds), **ends)


def room_of(settings: Settings, rounds: tuple[tuple[CaseRequest, ...], ...], scarce: bool) -> int:
    """Returns the tokens of KV: enough for all slots, or if `scarce`, for the longest sequence on a rank."""
    of = {request.name: len(request.tokens) + request.new for request in rounds[0]}
    longest = max(
        [*of.values(), *(of[str(a.follows)] + len(a.tokens) + a.new for requests in rounds[1:] for a in requests)]
    )
    longest += settings.get("speculation.gamma", 0)
    return int(settings["layout.dp"] * longest * (1 if scarce else int(settings["decode.max_batch"])))


def _whole(spec: DecoderSpec) -> bool:
    """Whether some layer has KV heads and reads whole sequences."""
    return spec.attention.latent is None and bool(spec.full)


def _two_heads(spec: DecoderSpec) -> bool:
    of = spec.attention
    return of.q_heads % 2 == 0 and of.latent is None and of.kv_heads in (1, 2, 4, 6) and not spec.has_states


# Classes of models.
OF: dict[str, Callable[[DecoderSpec], bool]] = {
    "any": lambda spec: True,
    "states": lambda spec: spec.has_states,
    "no states": lambda spec: not spec.has_states,
    "indexers": lambda spec: bool(spec.indexers),
    "latents": lambda spec: spec.attention.latent is not None,
    "keys and values": lambda spec: spec.attention.latent is None,
    "whole": _whole,
    "whole, no states": lambda spec: _whole(spec) and not spec.has_states,
    "windows": lambda spec: not spec.full,
    "dense": lambda spec: spec.experts is None,
    "two heads": _two_heads,
}
ILLEGAL: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "fuzz_spoilt.yaml").read_text())
ONE_RANK: Settings = ILLEGAL["parts"]["one rank"]
TWO_RANKS: Settings = ILLEGAL["parts"]["two ranks"]
# Invalid settings, by words of the refusal: for which models, and the settings.
INVALID: dict[str, tuple[Callable[[DecoderSpec], bool], Settings]] = {
    words: (OF[found["of"]], dict(ChainMap(*reversed(found["set"])))) for words, found in ILLEGAL["spoilt"].items()
}
