"""The commands `helix plan` and `helix simulate`: configs, which extend a run's, and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from helix.config import MOST_SEQUENCES, Config, Count, Width
from helix.schema import FilePath, Range
from launch.inputs.command_parser import Command, Settings
from launch.inputs.flags import MODEL_FLAGS, Flag


@dataclass
class PlanConfig(Config):
    """A run's config, whose layout the planner chooses, and a planner query.

    Attributes:
        gpus: GPUs in one NVLink domain.
        context: tokens of each sequence in the KV cache.
        batch: sequences; unset: 1, or with ttl_ms the batch with the most tokens/s/GPU within it.
        ttl_ms: maximum milliseconds from one token of a sequence to the next; slower layouts rank last.
        hardware: one of conf/hardware/, or a file path/mine.yaml; unset: this machine's GPU, else h200.
        modes: layout modes to compare; unset: tp, medha and helix.
        acceptance: with speculation, the probability that a draft is accepted if those before it were.
        hits: with kv.offload=host, the share of selected blocks that are already on the GPU.
        guessed: with kv.offload_prefetch=true, the share of the other selected blocks that are prefetched.
    """

    gpus: Annotated[int, Range(1, MOST_SEQUENCES)] | None = None
    context: Count | None = None
    batch: Annotated[int, Range(1, MOST_SEQUENCES)] | None = None
    ttl_ms: Annotated[float, Range(above=0)] | None = None
    hardware: FilePath | None = None
    modes: list[str] = field(default_factory=list)
    acceptance: Annotated[float, Range(0, 1)] | None = None
    hits: Annotated[float, Range(0, 1)] = 0.0
    guessed: Annotated[float, Range(0, 1)] = 0.0

    RENAMED: ClassVar[dict[str, str]] = Config.RENAMED | {
        "weights": "model.weights={}", "kv": "kv.dtype={}", "drafter": "speculation={}",
        "gamma": "speculation.gamma={}", "sparsity": "speculation.sparsity={}", "path": "speculation.path={}",
        "tier": "kv.offload={}", "host_bytes": "kv.offload_host_bytes={}",
        "gpu_bytes": "kv.offload_gpu_bytes={}", "ahead": "kv.offload_prefetch=true guessed={}",
        "backend": "comm.backend={}",
        "json": "--json {}",
    }  # fmt: skip


@dataclass
class PointConfig(Config):
    """A run's config and one decode step of it.

    Attributes:
        pp: pipeline stages, each with a share of the layers.
        batch: sequences per stage.
        context: tokens of each sequence in the KV cache.
        dtype: of weights, KV cache and messages.
        hardware: one of conf/hardware/, or a file path/mine.yaml.
    """

    pp: Width = 1
    batch: Width = 1
    context: Count = 1 << 20
    dtype: Literal["fp4", "fp8", "bf16"] = "bf16"
    hardware: FilePath | None = None

    RENAMED: ClassVar[dict[str, str]] = Config.RENAMED | {
        "mode": "layout={}", "dp": "layout.dp={}", "kvp": "layout.kvp={}", "tpa": "layout.tpa={}",
        "tpf": "layout.tpf={}", "ep": "layout.ep={}",
    }  # fmt: skip


PLAN = Command(
    "helix plan",
    "Ranks all layouts of a model on a number of GPUs by predicted time. Explains the choice, and shows what else "
    "fits\nand how to serve it. A run with layout=auto takes the first layout.",
    (
        "helix plan llama-3.1-8b gpus=8 context=1M batch=8",
        "helix plan DIR gpus=8 context=1M ttl_ms=20 --quantization fp8",
        "helix plan qwen2.5-7b gpus=8 context=1M speculation=sparse acceptance=0.9",
        "helix plan qwen2.5-7b gpus=1 context=1M attention=block_sparse kv.offload=host hits=0.8",
    ),
    flags=(
        Flag(("--json",), "FILE", "", "write the ranking as JSON; - prints it"),
        Flag(("--plot",), "FILE.png", "", "plot times of the layouts; with ttl_ms and no batch, Pareto fronts"),
        *(flag for flag in MODEL_FLAGS if not flag.key.startswith("decode.")),
    ),
    settings=Settings(PlanConfig),
    keys=(
        ("gpus=N context=TOKENS", "GPUs in one NVLink domain; tokens of each sequence in the KV cache"),
        ("batch=N", "sequences (default 1); with ttl_ms and no batch: the batch with the most tokens/s/GPU"),
        ("ttl_ms=MS", "maximum time per token of a sequence; slower layouts rank last"),
        ("hardware=NAME", "one of conf/hardware/, or path/mine.yaml (default: this machine's GPU, else h200)"),
        ("model.weights=fp8 kv.dtype=fp8", "weights and KV cache in FP8, as in a run"),
        ("layout.tpa=N modes=A,B", "only layouts with this width; only these modes, such as tp,helix,dp"),
        ("speculation=NAME acceptance=P", "drafts with this acceptance rate; speculation.gamma or the best number"),
        ("", "of them: ngram, suffix (assumed free), sparse, mtp, eagle3"),
        ("attention=parts", "block-sparse attention, compared with dense; or attention=block_sparse"),
        ("kv.offload=host hits=P", "with sparse attention: KV in host memory, this share of reads hits the GPU"),
        ("kv.offload_prefetch=true guessed=P", "the share of the other reads that is prefetched"),
        ("comm.backend=nccl", "use NCCL's collectives, where they were measured"),
    ),
)  # fmt: skip
POINT = Command(
    "helix simulate point",
    "Predicts one decode step of a model over pp x dp x kvp x tpa GPUs, phase by phase: microseconds, bytes read,\n"
    "arithmetic and bytes sent on the busiest GPU, and kernels launched; then time per token (TTL), tokens/s and\n"
    "memory (docs/simulator.md). `helix plan` finds the best layout.",
    (
        "helix simulate point llama-3.1-70b hardware=h200 layout.kvp=2 layout.tpa=4 batch=2 context=1M",
        "helix simulate point deepseek-r1 hardware=gb200 layout.kvp=8 layout.ep=8 dtype=fp4 hopb=off",
    ),
    flags=(Flag(("--plot",), "FILE.png", "", "plot the time of each phase"),),
    settings=Settings(PointConfig),
    keys=(
        ("hardware=NAME", "the GPU: one of conf/hardware/, or path/mine.yaml"),
        ("layout=MODE", "how attention is parallelized: helix (default), medha, tp or dp"),
        ("layout.kvp=N layout.tpa=M", "attention: KV split by token N ways, by head M ways"),
        ("layout.dp=N", "data-parallel groups of kvp x tpa GPUs per stage, for attention"),
        ("layout.tpf=N layout.ep=M", "FFN: tensor parallel over N GPUs; experts in M groups"),
        ("pp=N", "pipeline stages"),
        ("batch=N context=TOKENS", "sequences per stage (default 1), and tokens of each in the KV cache (1M)"),
        ("dtype=fp4 | fp8 | bf16", "of weights, KV cache and messages (default bf16)"),
        ("hopb=off", "no overlap of the exchange with attention of other sequences"),
    ),
)
