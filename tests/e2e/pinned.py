"""Cases of the fuzzer that are written down, one a line of parity.yaml, and what each of them covers.

A line's keys, all but the model optional:

  model    of tiny.yaml, or demo
  ranks    mode, kvp x tpa (of dp: ranks), and the width of EP
  cache    tokens of an append block, of a page
  chunk    tokens of a prompt in one step
  asks     requests, of ASKS
  draft    drafter, tokens, and words: a policy, `own` noise, `adaptive`; of `model` a layout of its own
  blocks   choice, sink + local + chosen blocks; `from` tokens; `parts` of a block and candidates
  whole    all blocks are chosen, so that attention is dense
  tier     places on the GPU: all that there are, or few; `ahead`
  dtype, hopb, kv, weights, snapshots (on the GPU + in host memory)
  ways     of `fuzz_runs.WAYS`
  sees     what has to happen, of the outcome's `seen`; `never`: what must not
  places   threads, gloo, gpu (threads that share one), nccl, symm_mem
  slow     left out of `make test`
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from benchmarks.papers.policies import FULL
from helix.layout import HelixLayout
from helix.models import FAMILIES
from helix.sampling_params import SamplingParams
from tests.e2e.checkpoints import DEMO, config_of
from tests.e2e.fuzz_cases import MXFP4, Ask, Case, Settings, room_of

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "parity.yaml").read_text())
ROWS: dict[str, dict[str, Any]] = TABLE["rows"]
PAIRS: list[dict[str, list[str]]] = TABLE["pairs"]  # that were tested before there was this table

GREEDY = SamplingParams()
SAMPLED = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=9),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95, seed=4),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3),
)
# Lengths of prompts, and how many tokens follow.
ASKS: dict[str, tuple[tuple[int, ...], int]] = {
    "few": ((1, 17, 90), 12),
    # More prompts than slots, at the edges of a block, and over five chunks of 64 and the end of a block of 64.
    "long": ((7, 1, 15, 16, 17, 310), 14),
    "blocks": ((7, 60, 190, 128, 33), 18),  # new text fills pages that can be chosen
    "chosen": ((60, 190, 33), 8),
    "states": ((1, 3, 64, 150), 12),  # below and at the rows of a convolution and of a chunk
    "sampled": ((17, 60, 7, 90, 15), 16),
    "texts": ((300, 2000, 8000), 24),  # for GPUs
    "served": ((21, 58, 40), 20),  # too few pages, and an abort; what comes next goes on where others ended
}


def asks_of(kind: str, vocab: int) -> tuple[tuple[Ask, ...], ...]:
    """The rounds of requests of this kind; `again` behind it: what each has ended with goes on."""
    kind, _, again = kind.partition(" ")
    rng = random.Random(11)
    lengths, new = ASKS[kind]
    first = []
    for i, length in enumerate(lengths):
        tokens = tuple(rng.randrange(1, vocab) for _ in range(length))
        sampling = SAMPLED[i] if kind == "sampled" else GREEDY
        first.append(Ask(f"r{i}", tokens, new if i or len(lengths) < 5 else new // 2, sampling))
    if kind == "served":
        first.append(Ask("gone", first[1].tokens, 30, GREEDY, abort=2))
    if not again and kind != "served":
        return (tuple(first),)
    behind = [Ask(f"f{i}", (9, 7 + i), 6, ask.sampling, follows=ask.name) for i, ask in enumerate(first)]
    return tuple(first), tuple(behind[: len(lengths)])


def layout_of(words: str) -> HelixLayout:
    """`helix 2x2 ep2`, `tp 1x4`, `dp 3 ep3`."""
    mode, size, *ep = words.split()
    width = int(ep[0].removeprefix("ep")) if ep else 1
    if mode == "dp":
        return HelixLayout.create("dp", dp=int(size), ep=width)
    kvp, tpa = map(int, size.split("x"))
    return HelixLayout.create(mode, kvp, tpa, ep=width)


def _drafts(words: str) -> Settings:
    drafter, gamma, *more = words.split()
    settings: Settings = {"speculation.drafter": drafter, "speculation.gamma": int(gamma)}
    settings["speculation.adaptive"] = "adaptive" in more
    if drafter == "model":
        own = layout_of(" ".join(word for word in more if word != "adaptive"))
        settings |= {f"speculation.layout.{key}": getattr(own, key) for key in ("mode", "kvp", "tpa")}
        return settings
    settings |= {"speculation.noise": "own"} if "own" in more else {}
    if drafter == "sparse":
        settings |= {
            "speculation.policy": FULL if more[0] == "full" else more[0],
            "speculation.sparsity": 1.0 if "whole" in more else 0.1,
        }
    return settings


def _blocks(words: str, page: int) -> Settings:
    choice, counts, *more = words.split()
    sink, local, chosen = map(int, counts.split("+"))
    settings: Settings = {"attention.policy": "block_sparse", "attention.choice": choice, "attention.block": page}
    settings |= {"attention.sink_blocks": sink, "attention.local_blocks": local, "attention.topk": chosen}
    options = dict(zip(more[::2], more[1::2], strict=True))
    settings["attention.from_tokens"] = int(options.get("from", 0))
    if "parts" in options:
        parts, candidates = map(int, options["parts"].split("/"))
        settings |= {"attention.part": page // parts, "attention.candidates": candidates}
    return settings


def settings_of(row: dict[str, Any]) -> Settings:
    """The settings of a row, by their names, but for the capacity of its cache."""
    layout = layout_of(row.get("ranks", "helix 1x1"))
    block, page = row.get("cache", (16, 16))
    settings: Settings = {
        "model.dtype": row.get("dtype", "float32"),
        **{f"layout.{key}": getattr(layout, key) for key in ("mode", "kvp", "tpa", "ep", "dp")},
        "kv.append_block": block,
        "kv.page_size": page,
        "kv.prefix_cache": True,
        "kv.dtype": row.get("kv", "auto"),
        "hopb.chunks": str(row.get("hopb", "none")),
        "decode.max_batch": str(row.get("slots", 5)),
        "decode.prefill_chunk": str(row.get("chunk", 64)),
        "schedule.stall_ms": 60_000.0,  # chunks are as long as they may be, however slow a machine is
        "schedule.decode_share": 0.0,
        "schedule.lease": 1 if row.get("asks") == "served" else 16,
        "speculation.drafter": "none",
    }
    settings |= _drafts(row["draft"]) if "draft" in row else {}
    settings |= _blocks(row["blocks"], page) if "blocks" in row else {}
    if "tier" in row:
        settings |= {"kv.tier": "host", "kv.host_bytes": 1e9, "kv.ahead": "ahead" in row["tier"]}
    if "snapshots" in row:
        on_gpu, in_host = map(int, str(row["snapshots"]).split("+"))
        settings |= {"kv.snapshots": on_gpu, "kv.host_snapshots": in_host}
    return settings


@functools.cache
def case_of(name: str) -> Case:
    """The fuzzer's case of a row."""
    row = ROWS[name]
    config = config_of(row["model"])
    content = json.loads(config.to_json_string(use_diff=False))
    architecture = next(key for key, (kind, _) in FAMILIES.items() if kind == config.model_type)
    content |= {"architectures": [architecture], "dtype": "float32"}
    settings = settings_of(row)
    if settings["speculation.drafter"] == "mtp":
        content["num_nextn_predict_layers"] = 1
    rounds = asks_of(row.get("asks", "few"), content["vocab_size"])
    served = row.get("asks") == "served"
    settings["kv.tokens"] = room_of(settings, rounds, served)
    stored, _, kept = row.get("weights", "").partition(", ")
    stored = MXFP4 if row["model"].endswith(MXFP4) else stored
    few_bits, blocks = settings["kv.dtype"] != "auto", "blocks" in row
    lossy = few_bits or (blocks and not row.get("whole"))
    return Case(
        family=config.model_type,
        seed=row.get("seed", 7),
        content=content,
        generation=None,
        own_head=False,
        settings=settings,
        spoilt=None,
        lossy=lossy,
        eos=(),
        rounds=rounds,
        least_keys=16,
        piece_tokens=32,
        run_steps=1 if served else 8,
        scarce="few" in row.get("tier", ""),
        whimsical="adaptive" in row.get("draft", ""),
        backend="nccl",
        stored=stored or None,
        kept=kept == "kept",
        ways=tuple(row.get("ways", ())),
        masked=lossy and not few_bits,
        alone=few_bits if not blocks else settings["attention.choice"] == "global",
        trained=str(DEMO) if row["model"] == "demo" else None,
        pinned=settings["model.dtype"] == "float32",
    )


def _grid(layout: HelixLayout) -> Iterator[str]:
    yield layout.mode
    yield "KV heads cut" if layout.tpa > 1 else "KV heads whole"
    yield "tokens spread" if layout.kvp > 1 else "tokens together"
    if layout.world_size > 4:
        yield "many ranks"
    if layout.ep > 1:
        yield "experts spread"


def features_of(name: str) -> set[str]:
    """What a row has, in words that pairs are made of."""
    row, settings = ROWS[name], settings_of(ROWS[name])
    found = {row["model"], *_grid(layout_of(row.get("ranks", "helix 1x1")))}
    block, page = row.get("cache", (16, 16))
    found.add("blocks of a token" if block == 1 else "blocks of pages" if block > page else "short blocks")
    kind, _, again = row.get("asks", "few").partition(" ")
    found |= {"again"} if again or kind == "served" else set()
    found |= {kind} & {"long", "sampled", "served"}
    words = row.get("draft", "none").split()
    found.add(" ".join(words[::2][:2]) if words[0] == "sparse" else words[0])
    found |= {f"{word} drafts" for word in ("adaptive", "own") if word in words}
    if "blocks" in row:
        found.add("parts" if "parts" in row["blocks"] else f"{settings['attention.choice']} blocks")
    found |= {f"{word} in host memory" for word in row.get("tier", "").split()}
    found |= {"hopb"} if "hopb" in row else set()
    found |= {f"kv={row['kv']}"} if "kv" in row else set()
    found |= {f"weights: {row['weights']}"} if "weights" in row else set()
    if "snapshots" in row:
        found.add("snapshots" if row["snapshots"].endswith("+0") else "host snapshots")
    ranks = layout_of(row.get("ranks", "helix 1x1")).world_size
    found |= {f"{ranks} GPUs"} if {"nccl", "symm_mem"} & set(places_of(name)) else set()
    return found | set(row.get("ways", ())) | (set(places_of(name)) - {"threads"})


def places_of(name: str) -> list[str]:
    """Where a row runs."""
    return list(ROWS[name].get("places", ["threads"]))


def pairs_of(name: str) -> set[tuple[str, str]]:
    """Every two features of a row."""
    return set(combinations(sorted(features_of(name)), 2))
