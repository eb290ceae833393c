"""`helix plan` and `helix simulate`: their configs, which extend that of a run, and their flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from helix.config import MOST_SEQUENCES, Config, Count, Width
from helix.schema import FilePath, Range
from launch.inputs.command_parser import Command, Settings
from launch.inputs.flags import MODEL_FLAGS, Flag


@dataclass
class PlanConfig(Config):
    """The config of a run, whose layout is chosen, and a question about it.

    Attributes:
        gpus: GPUs of one NVLink domain.
        context: tokens of each sequence in the cache.
        batch: sequences; unset: 1, or with ttl_ms as many as give the most tokens/s/GPU within it.
        ttl_ms: the most milliseconds from one token of a sequence to its next; slower layouts come last.
        hardware: one of conf/hardware/, or a file of your own, path/mine.yaml; unset: this machine's GPU, else h200.
        modes: layout modes to compare; unset: tp, medha and helix.
        acceptance: with speculation, probability that a drafted token is accepted, if those before it were.
        hits: with kv.offload=host, the share of chosen blocks that are on the GPU already.
        guessed: with kv.offload_prefetch=true, the share of the other chosen blocks that guesses name.
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
    """The config of a run, and one decode step of it.

    Attributes:
        pp: stages of a pipeline, each with its share of the layers.
        batch: sequences in a stage.
        context: tokens of each sequence in the cache.
        dtype: of weights, keys and values, and messages.
        hardware: one of conf/hardware/, or a file of your own, path/mine.yaml.
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
    "Ranks every layout of a model on so many GPUs by its predicted time, and says why the first is first, what else "
    "fits,\nand how to serve it. layout=auto of a run takes the first.",
    (
        "helix plan llama-3.1-8b gpus=8 context=1M batch=8",
        "helix plan DIR gpus=8 context=1M ttl_ms=20 --quantization fp8",
        "helix plan qwen2.5-7b gpus=8 context=1M speculation=sparse acceptance=0.9",
        "helix plan qwen2.5-7b gpus=1 context=1M attention=block_sparse kv.offload=host hits=0.8",
    ),
    flags=(
        Flag(("--json",), "FILE", "", "all of this as JSON; - for the terminal"),
        Flag(("--plot",), "FILE.png", "", "times of the layouts; with ttl_ms and no batch, fronts"),
        *(flag for flag in MODEL_FLAGS if not flag.key.startswith("decode.")),
    ),
    settings=Settings(PlanConfig),
    keys=(
        ("gpus=N context=TOKENS", "GPUs of one NVLink domain; tokens of each sequence in the cache"),
        ("batch=N", "sequences (default 1); with ttl_ms and no batch: those with the most tokens/s/GPU within it"),
        ("ttl_ms=MS", "the most from one token of a sequence to its next; slower layouts come last"),
        ("hardware=NAME", "one of conf/hardware/, or path/mine.yaml (default: this machine's GPU, else h200)"),
        ("model.weights=fp8 kv.dtype=fp8", "weights, and keys and values, in FP8: as in a run"),
        ("layout.tpa=N modes=A,B", "only layouts with this width; of these modes, such as tp,helix,dp"),
        ("speculation=NAME acceptance=P", "drafts, each accepted with this probability; speculation.gamma of them, or"),
        ("", "as many as are best: ngram, suffix (free), sparse, mtp, eagle3 (priced)"),
        ("attention=parts", "steps read few keys; says where dense attention is faster (block_sparse: blocks)"),
        ("kv.offload=host hits=P", "with attention: keys and values in host memory, this share of them on the GPU"),
        ("kv.offload_prefetch=true guessed=P", "of the others, the share that comes ahead, by guesses"),
        ("comm.backend=nccl", "with NCCL's collectives, where they were measured"),
    ),
)  # fmt: skip
POINT = Command(
    "helix simulate point",
    "Prints one decode step of a model over pp x dp x kvp x tpa GPUs, phase by phase: microseconds, bytes read,\n"
    "arithmetic and bytes sent on the GPU with the most of it, and kernels launched; then time per token (TTL),\n"
    "tokens/s and memory (docs/simulator.md). `helix plan` finds the best layout.",
    (
        "helix simulate point llama-3.1-70b hardware=h200 layout.kvp=2 layout.tpa=4 batch=2 context=1M",
        "helix simulate point deepseek-r1 hardware=gb200 layout.kvp=8 layout.ep=8 dtype=fp4 hopb=off",
    ),
    flags=(Flag(("--plot",), "FILE.png", "", "where the time goes"),),
    settings=Settings(PointConfig),
    keys=(
        ("hardware=NAME", "a GPU: one of conf/hardware/, or path/mine.yaml"),
        ("layout=MODE", "how attention is divided: helix (default), medha, tp or dp"),
        ("layout.kvp=N layout.tpa=M", "GPUs over which the cache of a sequence, and the heads, are split"),
        ("layout.dp=N", "groups of kvp x tpa GPUs in a stage, each with sequences of its own in attention"),
        ("layout.tpf=N layout.ep=M", "GPUs over which the columns of the FFN, and groups to which experts, are split"),
        ("pp=N", "stages of a pipeline"),
        ("batch=N context=TOKENS", "sequences in a stage (default 1), and the tokens of each in the cache (1M)"),
        ("dtype=fp4 | fp8 | bf16", "of weights, keys and values, and messages (default bf16)"),
        ("hopb=off", "attention waits for the exchange, which else overlaps with other sequences' attention"),
    ),
)
