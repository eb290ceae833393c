"""Names are the field's: identifiers that a term has replaced do not come back, but where they mean something else."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What each term replaced; vLLM, SGLang, Megatron, NCCL and Hugging Face say the right side.
REPLACED = {
    "KVCacheSpec": "Keeps keeps",
    "SchedulerOutput, NewRequest, PrefillChunk, BlockTableUpdate": "Decision Admission Segment TableWrite",
    "RequestState, InFlightBatch, PendingSample": "Scheduled HeldStep landed",
    "num_cached_tokens, num_computed_tokens": "resumes",
    "Generation, EngineClient, EngineServer, EngineInfo": "Flight Core Link Ready pass_on",
    "Delta": "News",
    "BatchRunner, ProcessedPrompt, StructuredOutput, ChatFormat": "Desk Reading Form Dialect",
    "SequenceObserver": "Follower Begun Taken Retired",
    "RowShard": "DealtRows deals_rows",
    "DualBatchOverlap, MicroBatch": "Turns Half",
    "ll_protocol, ll_buffer": "mailbox",
    "PartialSum, PartialProjection, split_k_reduce": "PendingSum PendingProjection tree_sum",
    "merge_states": "lse_combine",
    "PrefillGraphKey, ContextBucket, DecodeGraphKey": "ChunkSize Depth StepKind",
    "warmup, precompile": "rehearsal compiled_ahead",
    "LogitsProcessor": "Shaper",
    "aux_hidden_states, nextn": "brought",
    "OffloadedCache, resident_blocks": "TieredCache TieredAttention hot_blocks",
    "offload": "tier tiers tiered tier_steps hot_places",
    "RankInfo, KVPlacement": "Place Placement",
    "lookahead_tokens, SchedulePolicy, Limits": "lease Goal Bounds",
    "weight_offset": "gain_offset",
    "token_ids": "output_ids",
    "offline throughput, sampling_params": "crowd crowds wishes",
    "selected": "hopb_chosen chosen_us",
    "accepted, rejected": "mean_kept kept_share kept_range refused_tenths",
    "acceptance_by_position": "acceptance_by_place recall_by_place mass_by_place by_place",
    "normalized, quantized, initialized": "normalise normalised user_normalised quantised unquantised initialised",
}
ROOMS = ("benchmarks", "comm", "examples", "helix", "kernels", "launch", "tests")


def identifiers(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name):
                found.update(name.split("."))
    return found


def test_no_name_that_a_term_replaced_is_left() -> None:
    terms = {old: term for term, olds in REPLACED.items() for old in olds.split()}
    left = defaultdict(list)
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for old in identifiers(path) & terms.keys():
            left[f"{old}: say {terms[old]}"].append(str(path.relative_to(ROOT)))
    assert dict(left) == {}
