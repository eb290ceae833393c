"""Handwritten fuzz cases, one per line of parity.yaml, and the features each covers.

A line's keys, all but the model optional:

  model    of tiny.yaml, or demo
  layout   mode, kvp x tpa (dp: ranks), and the EP width
  cache    tokens per append block and per page
  chunk    prompt tokens per step
  requests requests, of REQUEST_KINDS
  drafter  drafter, tokens, and words: a policy, `draft_layout` noise, `adaptive`; a `model` has its own layout
  blocks   choice, sink + local + selected blocks; `from` tokens; `parts` per block and candidates
  dense    all blocks are selected, so that attention is dense
  offload  resident blocks: all, or few; `ahead` for prefetch
  slabs    host memory for prefixes: all, or few, or few and `disk`; unused pages keep none
  dtype, hopb, kv, weights, snapshots (on the GPU + in host memory; `every` N tokens)
  code_paths  of `fuzz_runs.CODE_PATHS`
  expects  events that have to occur, of the outcome's `seen`; `forbids`: those that must not
  backends threads, gloo, gpu (threads that share one), nccl, symm_mem
  slow     not in `make test`
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
from tests.e2e.fuzz_cases import MXFP4, Case, CaseRequest, Settings, room_of

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "parity.yaml").read_text())
ROWS: dict[str, dict[str, Any]] = TABLE["rows"]
PAIRS: list[dict[str, list[str]]] = TABLE["pairs"]  # that were tested before this table existed

GREEDY = SamplingParams()
SAMPLED = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=9),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95, seed=4),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3),
)
# Prompt lengths, and output tokens.
REQUEST_KINDS: dict[str, tuple[tuple[int, ...], int]] = {
    "few": ((1, 17, 90), 12),
    # More prompts than slots, around a block's end, and over five chunks of 64 and the end of a block of 64.
    "long": ((7, 1, 15, 16, 17, 310), 14),
    "blocks": ((7, 60, 190, 128, 33), 18),  # generated text fills pages that can be selected
    "chosen": ((60, 190, 33), 8),
    "states": ((1, 3, 64, 150), 12),  # around the rows of a convolution and of a chunk
    "sampled": ((17, 60, 7, 90, 15), 16),
    "texts": ((300, 2000, 8000), 24),  # on GPUs
    "served": ((21, 58, 40), 20),  # too few pages, and an abort; later requests continue ended ones
    "shared": ((5, 40, 9, 23, 31), 14),  # after one system prompt, every second after a document, too
}


def requests_of(kind: str, vocab: int) -> tuple[tuple[CaseRequest, ...], ...]:
    """Returns the rounds of requests of a kind; with `again` after it, further requests continue each one."""
    kind, _, again = kind.partition(" ")
    rng = random.Random(11)
    lengths, new = REQUEST_KINDS[kind]
    first = []
    system, document = ([rng.randrange(1, vocab) for _ in range(n)] if kind == "shared" else [] for n in (70, 90))
    prefixes = (*system,), (*system, *document)
    for i, length in enumerate(lengths):
        tokens = tuple(rng.randrange(1, vocab) for _ in range(length))
        tokens = prefixes[i % 2] + tokens
        sampling = SAMPLED[i] if kind == "sampled" else GREEDY
        first.append(CaseRequest(f"r{i}", tokens, new if i or len(lengths) < 5 else new // 2, sampling))
    if kind == "served":
        first.append(CaseRequest("gone", first[1].tokens, 30, GREEDY, abort=2))
    if not again and kind != "served":
        return (tuple(first),)
    followups = [
        CaseRequest(f"f{i}", (9, 7 + i), 6, request.sampling, follows=request.name) for i, request in enumerate(first)
    ]
    return tuple(first), tuple(followups[: len(lengths)])


def layout_of(words: str) -> HelixLayout:
    """Parses `helix 2x2 ep2`, `tp 1x4`, `dp 3 ep3`."""
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
        draft_layout = layout_of(" ".join(word for word in more if word != "adaptive"))
        settings |= {f"speculation.layout.{key}": getattr(draft_layout, key) for key in ("mode", "kvp", "tpa")}
        return settings
    settings |= {"speculation.noise": "own"} if "own" in more else {}
    if drafter == "sparse":
        settings |= {
            "speculation.policy": FULL if more[0] == "full" else more[0],
            "speculation.sparsity": 1.0 if "whole" in more else 0.1,
        }
        if "as-vegas" in more:
            settings |= {"speculation.recent": 0.0, "speculation.reach": 0, "speculation.heads": "all"}
    return settings


def _blocks(words: str, page: int) -> Settings:
    choice, counts, *more = words.split()
    sink, local, selected = map(int, counts.split("+"))
    settings: Settings = {"attention.policy": "block_sparse", "attention.choice": choice, "attention.block": page}
    settings |= {"attention.sink_blocks": sink, "attention.local_blocks": local, "attention.num_blocks": selected}
    options = dict(zip(more[::2], more[1::2], strict=True))
    settings["attention.from_tokens"] = int(options.get("from", 0))
    if "parts" in options:
        parts, candidates = map(int, options["parts"].split("/"))
        settings |= {"attention.subblock_size": page // parts, "attention.num_candidate_blocks": candidates}
    return settings


def settings_of(row: dict[str, Any]) -> Settings:
    """Returns the settings of a row, without its cache's capacity."""
    layout = layout_of(row.get("layout", "helix 1x1"))
    block, page = row.get("cache", (16, 16))
    settings: Settings = {
        "model.dtype": row.get("dtype", "float32"),
        **{f"layout.{key}": getattr(layout, key) for key in ("mode", "kvp", "tpa", "ep", "dp")},
        "kv.append_block": block,
        "kv.page_size": page,
        "kv.prefix_cache": True,
        "kv.dtype": row.get("kv", "auto"),
        "hopb.chunks": str(row.get("hopb", "none")),
        "decode.max_batch": str(row.get("max_batch", 5)),
        "decode.prefill_chunk": str(row.get("chunk", 64)),
        "schedule.max_prefill_stall_ms": 60_000.0,  # maximum chunks, however slow the machine
        "schedule.decode_share": 0.0,
        "schedule.lookahead_tokens": 1 if row.get("requests") == "served" else 16,
        "speculation.drafter": "none",
        "attention.shared_prefix": "always",
    }
    settings |= _drafts(row["drafter"]) if "drafter" in row else {}
    settings |= _blocks(row["blocks"], page) if "blocks" in row else {}
    if "offload" in row:
        settings |= {
            "kv.offload": "host",
            "kv.offload_host_bytes": 1e9,
            "kv.offload_prefetch": "ahead" in row["offload"],
        }
    if "slabs" in row:
        settings["kv.prefix_host_bytes"] = 2e7 if row["slabs"] == "all" else 3e5
        if "disk" in row["slabs"]:
            settings |= {"kv.prefix_dir": "below the case's directory", "kv.prefix_disk_bytes": 2e7}
            settings["kv.prefix_host_bytes"] = 4e5 if "snapshots" in row else 1e5  # a snapshot takes many slabs
    if "snapshots" in row:
        room, _, every = row["snapshots"].partition(" every ")
        on_gpu, in_host = map(int, room.split("+"))
        settings |= {"kv.snapshots": on_gpu, "kv.host_snapshots": in_host, "kv.snapshot_every": int(every or 0)}
    return settings


@functools.cache
def case_of(name: str) -> Case:
    """Returns the fuzz case of a row."""
    row = ROWS[name]
    config = config_of(row["model"])
    content = json.loads(config.to_json_string(use_diff=False))
    architecture = next(key for key, (kind, _) in FAMILIES.items() if kind == config.model_type)
    content |= {"architectures": [architecture], "dtype": "float32"}
    settings = settings_of(row)
    if settings["speculation.drafter"] == "mtp":
        content["num_nextn_predict_layers"] = 1
    rounds = requests_of(row.get("requests", "few"), content["vocab_size"])
    served = row.get("requests") == "served"
    settings["kv.tokens"] = room_of(settings, rounds, served)
    stored, _, kept = row.get("weights", "").partition(", ")
    stored = MXFP4 if row["model"].endswith(MXFP4) else stored
    few_bits, blocks = settings["kv.dtype"] != "auto", "blocks" in row
    lossy = few_bits or (blocks and not row.get("dense"))
    return Case(
        family=config.model_type,
        seed=row.get("seed", 7),
        content=content,
        generation=None,
        own_head=False,
        settings=settings,
        invalid=None,
        lossy=lossy,
        eos=(),
        rounds=rounds,
        min_keys=16,
        piece_tokens=32,
        run_steps=1 if served else 8,
        min_offload_memory="few" in row.get("offload", ""),
        random_pace="adaptive" in row.get("drafter", ""),
        backend="nccl",
        stored=stored or None,
        kept=kept == "kept",
        code_paths=tuple(row.get("code_paths", ())),
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
    """Returns the features of a row, as in PAIRS."""
    row, settings = ROWS[name], settings_of(ROWS[name])
    found = {row["model"], *_grid(layout_of(row.get("layout", "helix 1x1")))}
    block, page = row.get("cache", (16, 16))
    found.add("blocks of a token" if block == 1 else "blocks of pages" if block > page else "short blocks")
    kind, _, again = row.get("requests", "few").partition(" ")
    found |= {"again"} if again or kind == "served" else set()
    found |= {kind} & {"long", "sampled", "served"}
    words = row.get("drafter", "none").split()
    found.add(" ".join(words[::2][:2]) if words[0] == "sparse" else words[0])
    found |= {f"{word} drafts" for word in ("adaptive", "own") if word in words}
    if "blocks" in row:
        found.add("parts" if "parts" in row["blocks"] else f"{settings['attention.choice']} blocks")
    found |= {f"{word} in host memory" for word in row.get("offload", "").split()}
    found |= {"hopb"} if "hopb" in row else set()
    found |= {f"kv={row['kv']}"} if "kv" in row else set()
    found |= {f"weights: {row['weights']}"} if "weights" in row else set()
    if "slabs" in row:
        found.add(f"{row['slabs']} slabs")
    if "snapshots" in row:
        found.add("snapshots" if "+0" in row["snapshots"] else "host snapshots")
    ranks = layout_of(row.get("layout", "helix 1x1")).world_size
    found |= {f"{ranks} GPUs"} if {"nccl", "symm_mem"} & set(backends_of(name)) else set()
    return found | set(row.get("code_paths", ())) | (set(backends_of(name)) - {"threads"})


def backends_of(name: str) -> list[str]:
    """Returns the backends of a row."""
    return list(ROWS[name].get("backends", ["threads"]))


def pairs_of(name: str) -> set[tuple[str, str]]:
    """Returns all pairs of a row's features."""
    return set(combinations(sorted(features_of(name)), 2))
