"""The schema of everything in `conf/`: what a user can set, as plain dataclasses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from helix.sampling_params import SamplingParams

MAX_QUERIES = 32  # of a sequence in one decode step, for which the attention kernels are made
MOST_SEQUENCES = 1 << 16  # in a batch
MOST_CHOSEN = 128  # blocks that a query chooses on a rank, for which the selecting kernel is made
LEAST_KEYS = 256  # that drafts of a model for itself choose of a sequence at least, over all ranks


@dataclass
class ModelConfig:
    """Attributes:
    path: Hugging Face checkpoint directory.
    config: config.json keys that are merged into those of `path`, or a whole shape where `path` is unset. Objects merge
        (`model.config.rope_scaling.factor=4` keeps the rest of RoPE, in either spelling), lists replace, null deletes a
        key. A key that nothing reads is refused; a run warns of one that the model's family ignores.
    dtype: float32, bfloat16, float16, or auto: the checkpoint's on a GPU, float32 on a CPU.
    load: checkpoint, or random (weights of the config's shape, none read).
    weights: fp8: matrices stay in the few bits in which a checkpoint stores them; those of an unquantised one are
        rounded to e4m3 with a scale for each 128 x 128, which is lossy. bf16: they are unpacked to dtype. auto: as
        stored on a GPU, unpacked on a CPU.
    """

    path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    load: str = "checkpoint"
    weights: str = "auto"


@dataclass
class LayoutConfig:
    """Attributes:
    mode: helix, tp, medha, dp, or auto: the planner's choice, which leaves the widths to it.
    kvp: KV-parallel width of attention.
    tpa: tensor-parallel width of attention.
    tpf: tensor-parallel width of routed experts; unset: what ep leaves.
    ep: expert-parallel width.
    dp: with mode=dp, ranks that attend whole sequences of their own.
    """

    mode: str = "helix"
    kvp: int = 1
    tpa: int = 1
    tpf: int | None = None
    ep: int = 1
    dp: int = 1


@dataclass
class KVConfig:
    """Attributes:
    append_block: consecutive tokens on one kvp rank before the next one's turn; unset: attention.block where blocks are
        chosen, 64 where the model drafts for itself, 16 elsewhere.
    page_size: tokens a page; unset: attention.block where blocks are chosen, 64 elsewhere.
    dtype: fp8: keys and values in e4m3, with a scale for each token and head; latents (MLA) with one for each 128 of
        their numbers, and their rotated part in model.dtype. fp8_all: index keys (DSA), too, with a scale for each;
        other tokens of nearly equal scores may be chosen. k16v8: values alone, where keys do not bear it; not of
        latents. auto: all in model.dtype. Layers with a window keep model.dtype.
    tokens: capacity in tokens over all ranks; unset: from memory_fraction.
    memory_fraction: share of the memory that is free once the weights are in.
    prefix_cache: whether what was computed is kept for prompts that begin alike.
    snapshots: copies of states that are kept for prompts that begin alike, of models whose layers keep states.
    host_snapshots: further copies, in pinned memory of the host, to which those of least value move. Each takes the
        bytes of a sequence's states on each rank.
    tier: gpu: keys and values lie on the GPU; host: in pinned memory of the host, and what a step chooses comes over
        the link (with attention=block_sparse alone).
    host_bytes: of each rank's keys and values, with tier=host.
    gpu_bytes: all that a rank's keys and values take on its GPU, with tier=host; unset: from memory_fraction.
    ahead: with tier=host, blocks of each layer come while the layer before it computes, by a guess at what it will
        choose; what the guess did not name is fetched when it is chosen.
    """

    dtype: str = "auto"
    append_block: int | None = None
    page_size: int | None = None
    tokens: int | None = None
    memory_fraction: float = 0.9
    prefix_cache: bool = True
    snapshots: int = 8
    host_snapshots: int = 0
    tier: str = "gpu"
    host_bytes: float | None = None
    gpu_bytes: float | None = None
    ahead: bool = False


@dataclass
class AttentionConfig:
    """Attributes:
    policy: which keys a query of a decode step reads: dense: all; block_sparse (lossy): the first blocks of the
        sequence, the last ones, and those between that promise most. Prefill reads all.
    block: tokens of a block, which is a page of the cache.
    part: tokens of a part of a block; queries choose parts instead of blocks. Unset: blocks.
    candidates: blocks, the best by their own bounds, whose parts are considered, of all ranks together.
    topk: blocks, or parts, that each KV head chooses, of all ranks together; 0: none. 32 blocks lose half of the single
        lines of a text of 32K; attention=parts (part=16, candidates=256, topk=128) keeps them.
    sink_blocks: first blocks, always read.
    local_blocks: last blocks, the unfinished one included, always read.
    score: what a block promises: bounds (the most that its keys' smallest and largest numbers allow), mean (of its
        keys).
    choice: local (each kvp rank takes its share of topk from its own blocks) or global (one choice over all ranks: the
        same blocks on every layout, for one exchange more in each layer).
    from_tokens: shorter sequences read all.
    """

    policy: str = "dense"
    block: int = 128
    part: int | None = None
    candidates: int = 256
    topk: int = 32
    sink_blocks: int = 1
    local_blocks: int = 4
    score: str = "bounds"
    choice: str = "local"
    from_tokens: int = 32768

    @property
    def parts(self) -> int:
        """Number of equal parts of a block among which a query chooses; 1: it chooses blocks."""
        return self.block // self.part if self.part and self.topk else 1

    @property
    def candidate_blocks(self) -> int:
        """Number of blocks whose parts are considered; 0 where blocks are chosen."""
        return self.candidates if self.parts > 1 else 0


@dataclass
class CommConfig:
    """Attributes:
    backend: symm_mem (kernels of our own between the GPUs of one host, NCCL for large messages), nccl, gloo, or auto:
        the first of these that works here. emulated (benchmarks only): one or two GPUs run one rank each of a larger
        layout and send each other what is for the absent ranks; times are realistic (over one GPU, without the
        link's), tokens are not. NCCL_P2P_DISABLE=1: through host memory.
    timeout_s: deadline of each collective, seconds.
    """

    backend: str = "auto"
    timeout_s: float = 300.0


@dataclass
class HopBConfig:
    """Attributes:
    chunks: of the batch, one of which is exchanged while the next is in attention. none (hopb=off): one exchange of the
        whole batch. 2, 4, 8: that many, at most one per sequence. best (hopb=on): the fastest of 2, 4 and 8, timed at
        the start for each batch size. auto: the same, or none where that is faster, from the length on at which chunks
        pay.
    """

    chunks: str = "auto"

    @property
    def may_cut(self) -> bool:
        """Whether steps are cut into chunks even if that does not pay."""
        return self.chunks not in ("none", "auto")

    def __str__(self) -> str:
        return "hopb=on" if self.chunks == "best" else f"hopb.chunks={self.chunks}"


@dataclass
class DraftLayoutConfig:
    """The draft model's layout, over all ranks of the run.

    Attributes:
        mode, tpf, ep: as in layout.
        kvp, tpa: as there; unset: the widest tpa that divides the draft model's KV heads, and what it leaves.
    """

    mode: str = "helix"
    kvp: int | None = None
    tpa: int | None = None
    tpf: int | None = None
    ep: int = 1


@dataclass
class SpeculationConfig:
    """Attributes:
    drafter: none; ngram: proposes what followed the last earlier occurrence of the sequence's final tokens; suffix: the
        same, also in answers to earlier requests; model: what a smaller model says; mtp: what
        the checkpoint's layer for multi-token prediction says; sparse: what the model itself says over few keys;
        eagle3: what a layer with a checkpoint of its own says, trained to read the model's hidden states.
    gamma: the most tokens proposed for each sequence and step, which the step verifies.
    adaptive: fewer than gamma, or none, where more do not pay, by what was accepted lately and how long steps took.
        With `model` it changes which tokens a sampled request gets, not how they are distributed.
    longest: the most final tokens that ngram and suffix compare.
    remembered: the most tokens of earlier answers in which suffix looks, for requests of the same salt.
    policy: which keys sparse reads: those that any query of the verification before scores best (any); that score best
        by the first and the last of them (c2q); the latest (window); pages that each draft judges best by their bounds
        (quest); every key (full).
    sparsity: share of a sequence's keys that sparse reads, 256 of them at least.
    noise: of sparse, mtp and eagle3. shared: sampled requests draw drafts with the target's noise, and every token is
        the one without drafts; own: drafts are drawn by themselves and kept by rejection, which changes which tokens a
        request gets.
    path: directory of eagle3's checkpoint.
    window: latest tokens of a sequence that eagle3 reads; unset: max_position_embeddings of its config.json, as many as
        it has seen in training.
    model: the smaller model, of the same vocabulary.
    layout: how the ranks share it.
    """

    drafter: str = "none"
    gamma: int = 4
    adaptive: bool = True
    longest: int = 3
    remembered: int = 1 << 18
    policy: str = "any"
    sparsity: float = 0.07
    noise: str = "shared"
    path: str | None = None
    window: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: DraftLayoutConfig = field(default_factory=DraftLayoutConfig)


@dataclass
class DecodeConfig:
    """Attributes:
    prompts: JSON lines of prompts.
    output: JSON lines of results; unset: text on the terminal alone.
    resume: keep what `output` already holds and run the rest.
    max_batch: slots, or auto: as many as there are prompts and memory, up to 512 tokens a step; 8 on CPUs and with
        kv.tier=host. More prompts wait for a free one. With mode=dp, each rank has its share, rounded up.
    max_length: most tokens of a sequence, prompt and new ones; unset: as many as the model and the cache allow.
    prefill_chunk: most prompt tokens in one step, or auto: as many as are fast and leave memory to the cache.
    stream: print text as it comes.
    max_new_tokens, temperature, top_k, top_p, min_p, seed, stop: what a prompt line leaves unset.
    """

    prompts: str | None = None
    output: str | None = None
    resume: bool = False
    max_batch: str = "auto"
    max_length: int | None = None
    prefill_chunk: str = "auto"
    stream: bool = True
    max_new_tokens: int = 64
    temperature: float = SamplingParams.temperature
    top_k: int = SamplingParams.top_k
    top_p: float = SamplingParams.top_p
    min_p: float = SamplingParams.min_p
    seed: int = SamplingParams.seed
    stop: list[str] = field(default_factory=list)


@dataclass
class ScheduleConfig:
    """Settings of how requests share the ranks, whether a file or a server brings them.

    Attributes:
        goal: latency, balance or throughput, which set the two bounds below; balance widens them while prompts wait.
        stall_ms: most milliseconds of chunks of prompts between two decode steps; unset: as the goal has it.
        decode_share: share of the time for decode steps while prompts wait and any sequence decodes; unset: as the goal
            has it.
        run_ms: most milliseconds of decode steps between two decisions of rank 0.
        patience_s: seconds for which others may overtake a request that does not fit; then pages are kept for it.
        lease: new tokens for which a sequence takes pages at a time.
    """

    goal: str = "balance"
    stall_ms: float | None = None
    decode_share: float | None = None
    run_ms: float = 20.0
    patience_s: float = 30.0
    lease: int = 1024


@dataclass
class ServeConfig:
    """Settings of a server: how requests come over HTTP, and how long it waits for whom.

    Attributes:
        socket: Unix socket on which rank 0 serves; unset: the ranks decode `decode.prompts`.
            `helix serve` sets it for the ranks that it starts.
        attach: such a socket of ranks that somebody else started; unset: `helix serve` and `helix run` start ranks.
            `helix run` ends them after its last prompt.
        host: address to listen at.
        port: port to listen at; 0: any that is free.
        name: the model's name to clients; unset: that of its directory.
        chat_template: file with the chat template, also of prompt files and from Python; unset: the model's own.
        api_keys: file of keys, lines of OWNER KEY; unset: none is needed.
        open: whether an address that other hosts reach may do without keys.
        cors: origins whose pages may use the server, such as https://chat.example; `*` is all.
        body_mib: most MiB of a request; unset: 64, or 16 bytes for each token of a sequence where that is more.
        waiting: most requests that wait for the engine.
        slow_s: for a client to take what is sent, seconds.
        restarts: of the ranks, in ten minutes, before the server gives up.
        hang_s: without progress of the engine, while it has requests, after which the ranks are restarted, seconds.
        drain_s: for running requests to end once the server is told to, seconds.
    """

    socket: str | None = None
    attach: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    chat_template: str | None = None
    api_keys: str | None = None
    open: bool = False
    cors: list[str] = field(default_factory=list)
    body_mib: int | None = None
    waiting: int = 256
    slow_s: float = 60.0
    restarts: int = 3
    hang_s: float = 60.0
    drain_s: float = 30.0


class Blocks(NamedTuple):
    """Sizes of the cache, in tokens: of an append block and of a page."""

    append: int
    page: int


@dataclass
class Config:
    """Attributes:
    record: file for the run's record, JSON.
    seed: of random weights.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    hopb: HopBConfig = field(default_factory=HopBConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    record: str | None = None
    seed: int = 0

    @property
    def blocks(self) -> Blocks:
        """The sizes that are set; where they are not, those that attention and the drafter want."""
        page, append = 64, 16
        if self.attention.policy != "dense":
            page = append = self.attention.block
        elif self.speculation.drafter == "sparse":
            append = 64  # a key's neighbours on a rank are mostly its neighbours in the text, which drafts look at
        return Blocks(self.kv.append_block or append, self.kv.page_size or page)


def check(config: Config) -> None:
    """Raises ValueError for a value out of its range, naming the key, the value and the range."""
    choices = {
        **dict.fromkeys(("model.dtype", "speculation.model.dtype"), ("auto", "float32", "bfloat16", "float16")),
        **dict.fromkeys(("model.load", "speculation.model.load"), ("checkpoint", "random")),
        **dict.fromkeys(("model.weights", "speculation.model.weights"), ("auto", "bf16", "fp8")),
        "layout.mode": ("helix", "tp", "medha", "dp", "auto"),
        "kv.dtype": ("auto", "fp8", "fp8_all", "k16v8"),
        "kv.tier": ("gpu", "host"),
        "attention.policy": ("dense", "block_sparse"),
        "attention.score": ("bounds", "mean"),
        "attention.choice": ("local", "global"),
        "comm.backend": ("auto", "gloo", "nccl", "symm_mem", "emulated"),
        "hopb.chunks": ("none", "auto", "best", "2", "4", "8"),
        "schedule.goal": ("latency", "balance", "throughput"),
        "speculation.drafter": ("none", "ngram", "suffix", "model", "mtp", "eagle3", "sparse"),
        "speculation.policy": ("any", "c2q", "window", "quest", "full"),
        "speculation.noise": ("shared", "own"),
    }
    for key, allowed in choices.items():
        if (value := _get(config, key)) not in allowed:
            raise ValueError(f"{key}={value!r} is unknown; choose one of {', '.join(map(str, allowed))}")
    for key, top in {"decode.prefill_chunk": 999_999_999, "decode.max_batch": MOST_SEQUENCES}.items():
        text = _get(config, key)
        if text != "auto" and not (re.fullmatch(r"[1-9]\d{0,8}", text) and int(text) <= top):
            raise ValueError(f"{key}={text} must be auto or a number from 1 to {top}")
    ranges = {
        "kv.append_block": (1, 1 << 24),
        "kv.page_size": (1, 1 << 14),  # offsets in a page are int32 to kernels
        "kv.tokens": (1, 1 << 50),
        "decode.max_new_tokens": (1, 1 << 40),
        "decode.max_length": (1, 1 << 40),
        "attention.block": (1, 1 << 14),
        "attention.part": (1, 1 << 13),
        "attention.candidates": (1, 1024),
        "attention.topk": (0, MOST_CHOSEN),
        "attention.sink_blocks": (0, 1 << 20),
        "attention.local_blocks": (1, 1 << 20),
        "attention.from_tokens": (0, 1 << 40),
        "speculation.gamma": (1, MAX_QUERIES - 1),
        "speculation.longest": (1, 8),
        "speculation.window": (1, 1 << 40),
        "speculation.remembered": (16, 1 << 24),
        "schedule.stall_ms": (1, 60_000),
        "schedule.decode_share": (0.0, 0.99),
        "schedule.run_ms": (0.1, 10_000),
        "schedule.patience_s": (0, 86_400),
        "schedule.lease": (1, 1 << 24),
        "serve.port": (0, 65535),
        "serve.body_mib": (1, 1 << 16),
        "serve.waiting": (1, 1 << 20),
        "serve.slow_s": (0.1, 86400),
        "serve.restarts": (0, 1 << 20),
        "serve.hang_s": (1, 86400),
        "serve.drain_s": (0, 86400),
        "comm.timeout_s": (0.1, 600),  # kernels that wait for other GPUs count no further (comm/symm_mem.py)
    }
    for key, (least, most) in ranges.items():
        if (value := _get(config, key)) is not None and not least <= value <= most:
            raise ValueError(f"{key}={value!r} must be from {least} to {most}")
    for origin in config.serve.cors:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            raise ValueError(
                f"serve.cors has {origin!r}, which is no origin: write scheme and host, as https://chat.example, or *"
            )
    speculation = config.speculation
    if not 0 < speculation.sparsity <= 1:
        raise ValueError(f"speculation.sparsity={speculation.sparsity!r} must be above 0 and at most 1")
    if config.attention.policy != "dense" and config.blocks.page != config.attention.block:
        raise ValueError(
            f"kv.page_size={config.kv.page_size} and attention.block={config.attention.block} differ, but a block is a "
            f"page: leave out kv.page_size, or set attention.block={config.kv.page_size}"
        )
    check_parts(config)
    check_tier(config)
    if not 0 < config.kv.memory_fraction <= 1:
        raise ValueError(f"kv.memory_fraction={config.kv.memory_fraction!r} must be above 0 and at most 1")
    for key in ("snapshots", "host_snapshots"):
        if (count := getattr(config.kv, key)) < 0:
            raise ValueError(f"kv.{key}={count} must be at least 0")
    if config.kv.host_snapshots and not (config.kv.snapshots and config.kv.prefix_cache):
        raise ValueError(
            f"kv.host_snapshots={config.kv.host_snapshots} takes what kv.snapshots={config.kv.snapshots} has no room "
            f"for, and kv.prefix_cache is {str(config.kv.prefix_cache).lower()}: set kv.snapshots to 1 or more and "
            "kv.prefix_cache=true, or leave out kv.host_snapshots"
        )
    if config.decode.resume and config.decode.output is None:
        raise ValueError("decode.resume=true continues decode.output, which is not set")


def check_parts(config: Config) -> None:
    """Raises ValueError where parts of blocks cannot be chosen."""
    attention = config.attention
    if attention.part is None:
        return
    if attention.part & (attention.part - 1) or attention.block % attention.part or attention.block == attention.part:
        raise ValueError(
            f"attention.part={attention.part} must be a power of two that cuts attention.block={attention.block} into "
            "equal parts: set another, or leave it out"
        )
    if attention.score != "bounds":
        raise ValueError(
            f"attention.part={attention.part} needs bounds, and attention.score is {attention.score}: set "
            "attention.score=bounds, or leave out attention.part"
        )
    if attention.choice == "global":
        raise ValueError(
            f"attention.part={attention.part} is chosen by each rank from its own blocks: set "
            "attention.choice=local, or leave out attention.part"
        )
    if config.kv.tier == "host" and config.kv.dtype != "auto":
        raise ValueError(
            f"attention.part={attention.part} with kv.tier=host needs keys and values of equal size, and kv.dtype is "
            f"{config.kv.dtype}: leave out one of the two"
        )


def check_tier(config: Config) -> None:
    """Raises ValueError where keys and values cannot lie in host memory."""
    kv = config.kv
    for key, given in (("host_bytes", kv.host_bytes), ("gpu_bytes", kv.gpu_bytes)):
        if given is not None and kv.tier == "gpu":
            raise ValueError(f"kv.{key}={given:.0f} is for kv.tier=host, and kv.tier is gpu: set kv.tier=host")
        if given is not None and not given > 0:
            raise ValueError(f"kv.{key}={given!r} must be positive")
    if kv.tier == "gpu":
        if kv.ahead:
            raise ValueError("kv.ahead=true is for kv.tier=host, and kv.tier is gpu: nothing has to come")
        return
    if config.attention.policy == "dense":
        raise ValueError(
            "kv.tier=host with attention.policy=dense would read the whole cache over the link in each step: set "
            "attention=block_sparse, or kv.tier=gpu"
        )
    if config.speculation.drafter in ("mtp", "eagle3"):
        raise ValueError(
            f"kv.tier=host moves the model's own layers, and speculation.drafter={config.speculation.drafter} has one "
            "more in their pages: set speculation=ngram or another drafter, or kv.tier=gpu"
        )
    if config.speculation.drafter == "sparse":
        raise ValueError(
            "kv.tier=host with speculation.drafter=sparse would verify over the whole cache in each step: set "
            "speculation=ngram or another drafter, or kv.tier=gpu"
        )
    if kv.ahead and config.attention.topk == 0:
        raise ValueError(
            "kv.ahead=true guesses what attention.topk=0 never chooses: set it to 1 or more, or leave out kv.ahead"
        )
    if kv.host_bytes is None:
        raise ValueError(
            "kv.tier=host needs kv.host_bytes, the bytes of host memory that each rank pins: a machine's memory may "
            "grow on demand, so that what is free says nothing"
        )


def _get(config: Config, key: str) -> Any:
    return attrgetter(key)(config)
