"""The schema of everything in `conf/`: what a user can set, as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from helix.sampling_params import SamplingParams
from helix.schema import FilePath, ImportPath, Range

MAX_QUERIES = 32  # of a sequence in one decode step, for which the attention kernels are made
MOST_SEQUENCES = 1 << 16  # in a batch
MAX_SELECTED = 128  # blocks that a query chooses on a rank, for which the selecting kernel is made
LEAST_KEYS = 256  # that drafts of a model for itself choose of a sequence at least, over all ranks

STORED = "a checkpoint says itself how its weights are stored; fp8 rounds unquantised ones"
TOKENS = "tokens, such as 128K or 1M, and not bytes; kv.memory_fraction=0.5 takes half of the free memory"
Width = Annotated[int, Range(1)]
Count = Annotated[int, Range(1, 1 << 40)]
DrafterName = Literal["none", "suffix", "model", "mtp", "eagle3", "sparse"]
HopBChunks = Literal["none", "auto", "best", "2", "4", "8"]
Share = Annotated[float, Range(above=0, maximum=1)]


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

    path: FilePath | None = None
    config: dict[str, Any] = field(default_factory=dict)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load: Literal["checkpoint", "random"] = "checkpoint"
    weights: Annotated[Literal["auto", "bf16", "fp8"], STORED] = "auto"


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

    mode: Literal["helix", "tp", "medha", "dp", "auto"] = "helix"
    kvp: Width = 1
    tpa: Width = 1
    tpf: Width | None = None
    ep: Width = 1
    dp: Width = 1


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
    offload: none: keys and values are on the GPU; host: in pinned host memory, and each step fetches the blocks that it
        selects over the link (attention=block_sparse only).
    offload_host_bytes: host memory for the keys and values of each rank, with offload=host.
    offload_gpu_bytes: GPU memory for the keys and values of each rank, with offload=host; unset: from memory_fraction.
    offload_prefetch: with offload=host, predicts the blocks of the next layer and fetches them while the current layer
        computes; blocks that the prediction missed are fetched when they are selected.
    """

    dtype: Literal["auto", "fp8", "fp8_all", "k16v8"] = "auto"
    append_block: Annotated[int, Range(1, 1 << 24)] | None = None
    page_size: Annotated[int, Range(1, 1 << 14)] | None = None  # offsets in a page are int32 to kernels
    tokens: Annotated[int, Range(1, 1 << 50), TOKENS] | None = None
    memory_fraction: Share = 0.9
    prefix_cache: bool = True
    snapshots: Annotated[int, Range(0)] = 8
    host_snapshots: Annotated[int, Range(0)] = 0
    offload: Literal["none", "host"] = "none"
    offload_host_bytes: Annotated[float, Range(above=0)] | None = None
    offload_gpu_bytes: Annotated[float, Range(above=0)] | None = None
    offload_prefetch: bool = False


@dataclass
class AttentionConfig:
    """Attributes:
    policy: which keys a query of a decode step reads: dense: all; block_sparse (lossy): the first blocks of the
        sequence, the last ones, and those between that promise most, by the bounds of their keys. Prefill reads all.
        MODULE:NAME: a subclass of helix.attention.block_sparse:BlockSparseAttention, with the same settings.
    block: tokens of a block, which is a page of the cache.
    subblock_size: tokens of a subblock; queries select subblocks instead of whole blocks. Unset: blocks.
    num_candidate_blocks: best blocks by their own bounds, over all ranks, whose subblocks are scored.
    num_blocks: blocks, or subblocks, that each KV head selects over all ranks; 0: none. 32 blocks lose half of the
        needles in 32K of text; attention=parts (subblock_size=16, num_candidate_blocks=256, num_blocks=128) finds them.
    sink_blocks: first blocks, always read.
    local_blocks: last blocks, the unfinished one included, always read.
    choice: local (each kvp rank takes its share of num_blocks from its own blocks) or global (one choice over all
        ranks: the same blocks on every layout, for one exchange more in each layer).
    from_tokens: shorter sequences read all.
    """

    policy: Literal["dense", "block_sparse"] | ImportPath = "dense"
    block: Annotated[int, Range(1, 1 << 14)] = 128
    subblock_size: Annotated[int, Range(1, 1 << 13)] | None = None
    num_candidate_blocks: Annotated[int, Range(1, 1024)] = 256
    num_blocks: Annotated[int, Range(0, MAX_SELECTED)] = 32
    sink_blocks: Annotated[int, Range(0, 1 << 20)] = 1
    local_blocks: Annotated[int, Range(1, 1 << 20)] = 4
    choice: Literal["local", "global"] = "local"
    from_tokens: Annotated[int, Range(0, 1 << 40)] = 32768

    @property
    def parts(self) -> int:
        """Number of equal parts of a block among which a query chooses; 1: it chooses blocks."""
        return self.block // self.subblock_size if self.subblock_size and self.num_blocks else 1

    @property
    def candidate_blocks(self) -> int:
        """Number of blocks whose parts are considered; 0 where blocks are chosen."""
        return self.num_candidate_blocks if self.parts > 1 else 0


@dataclass
class CommConfig:
    """Attributes:
    backend: symm_mem (kernels of our own between the GPUs of one host, NCCL for large messages), nccl, gloo, or auto:
        the first of these that works here. emulated (benchmarks only): one or two GPUs run one rank each of a larger
        layout and send each other what is for the absent ranks; times are realistic (over one GPU, without the
        link's), tokens are not. NCCL_P2P_DISABLE=1: through host memory.
    timeout_s: deadline of each collective, seconds.
    """

    backend: Literal["auto", "gloo", "nccl", "symm_mem", "emulated"] = "auto"
    timeout_s: Annotated[float, Range(0.1, 600)] = 300.0  # kernels that wait for GPUs count no further


@dataclass
class HopBConfig:
    """Attributes:
    chunks: of the batch, one of which is exchanged while the next is in attention. none (hopb=off): one exchange of the
        whole batch. 2, 4, 8: that many, at most one per sequence. best (hopb=on): the fastest of 2, 4 and 8, timed at
        the start for each batch size. auto: the same, or none where that is faster, from the length on at which chunks
        pay.
    """

    chunks: HopBChunks = "auto"

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

    mode: Literal["helix", "tp", "medha"] = "helix"
    kvp: Width | None = None
    tpa: Width | None = None
    tpf: Width | None = None
    ep: Width = 1


@dataclass
class SpeculationConfig:
    """Attributes:
    drafter: none; suffix: proposes what followed the last earlier occurrence of the sequence's final tokens, in itself
        or in answers to earlier requests; model: what a smaller model says; mtp: what the checkpoint's layer for
        multi-token prediction says; sparse: what the model itself says over few keys; eagle3: what a layer with a
        checkpoint of its own says, trained to read the model's hidden states.
    gamma: the most tokens proposed for each sequence and step, which the step verifies.
    adaptive: fewer than gamma, or none, where more do not pay, by what was accepted lately and how long steps took.
        With `model` it changes which tokens a sampled request gets, not how they are distributed.
    prompt_lookup_max: the most final tokens that suffix compares.
    suffix_pool_tokens: the most tokens of earlier answers in which suffix looks, for requests of the same salt; 0
        (speculation=ngram): it looks in the sequence alone.
    policy: which keys sparse reads: those that any query of the verification before scores best (any); that score best
        by the first and the last of them (c2q); the latest (window); pages that each draft judges best by their bounds
        (quest). MODULE:NAME: a function that makes the attention of drafts for a cache and the engine's sizes.
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

    drafter: DrafterName = "none"
    gamma: Annotated[int, Range(1, MAX_QUERIES - 1)] = 4
    adaptive: bool = True
    prompt_lookup_max: Annotated[int, Range(1, 8)] = 3
    suffix_pool_tokens: Annotated[int, Range(0, 1 << 24)] = 1 << 18
    policy: Literal["any", "c2q", "window", "quest"] | ImportPath = "any"
    sparsity: Share = 0.07
    noise: Literal["shared", "own"] = "shared"
    path: FilePath | None = None
    window: Count | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: DraftLayoutConfig = field(default_factory=DraftLayoutConfig)


@dataclass
class DecodeConfig:
    """Attributes:
    prompts: JSON lines of prompts.
    output: JSON lines of results; unset: text on the terminal alone.
    resume: keep what `output` already holds and run the rest.
    max_batch: slots, or auto: as many as there are prompts and memory, up to 512 tokens a step; 8 on CPUs and with
        kv.offload=host. More prompts wait for a free one. With mode=dp, each rank has its share, rounded up.
    max_length: most tokens of a sequence, prompt and new ones; unset: as many as the model and the cache allow.
    prefill_chunk: most prompt tokens in one step, or auto: as many as are fast and leave memory to the cache.
    stream: print text as it comes.
    max_tokens, temperature, top_k, top_p, min_p, seed, stop: what a prompt line leaves unset.
    """

    prompts: FilePath | None = None
    output: FilePath | None = None
    resume: bool = False
    max_batch: Literal["auto"] | Annotated[int, Range(1, MOST_SEQUENCES)] = "auto"
    max_length: Count | None = None
    prefill_chunk: Literal["auto"] | Annotated[int, Range(1, 999_999_999)] = "auto"
    stream: bool = True
    max_tokens: Count = 64
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
        max_prefill_stall_ms: most milliseconds of chunks of prompts between two decode steps; unset: as the goal has
            it.
        decode_share: share of the time for decode steps while prompts wait and any sequence decodes; unset: as the goal
            has it.
        max_decode_run_ms: most milliseconds of decode steps between two decisions of rank 0.
        patience_s: seconds for which others may overtake a request that does not fit; then pages are kept for it.
        lookahead_tokens: new tokens for which a sequence takes pages at a time.
    """

    goal: Literal["latency", "balance", "throughput"] = "balance"
    max_prefill_stall_ms: Annotated[float, Range(1, 60_000)] | None = None
    decode_share: Annotated[float, Range(0.0, 0.99)] | None = None
    max_decode_run_ms: Annotated[float, Range(0.1, 10_000)] = 20.0
    patience_s: Annotated[float, Range(0, 86_400)] = 30.0
    lookahead_tokens: Annotated[int, Range(1, 1 << 24)] = 1024


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
        max_queue: most requests that wait for the engine.
        write_timeout_s: for a client to take what is sent, seconds.
        restarts: of the ranks, in ten minutes, before the server gives up.
        hang_s: without progress of the engine, while it has requests, after which the ranks are restarted, seconds.
        drain_s: for running requests to end once the server is told to, seconds.
    """

    socket: FilePath | None = None
    attach: FilePath | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    name: str | None = None
    chat_template: FilePath | None = None
    api_keys: FilePath | None = None
    open: bool = False
    cors: list[str] = field(default_factory=list)
    body_mib: Annotated[int, Range(1, 1 << 16)] | None = None
    max_queue: Annotated[int, Range(1, 1 << 20)] = 256
    write_timeout_s: Annotated[float, Range(0.1, 86_400)] = 60.0
    restarts: Annotated[int, Range(0, 1 << 20)] = 3
    hang_s: Annotated[float, Range(1, 86_400)] = 60.0
    drain_s: Annotated[float, Range(0, 86_400)] = 30.0


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
    record: FilePath | None = None
    seed: int = 0

    # For one release; {} is the old value.
    RENAMED: ClassVar[dict[str, str]] = {
        "hopb=none": "hopb=off",
        "decode.max_new_tokens": "decode.max_tokens={}",
        "kv.tier=gpu": "kv.offload=none",
        "kv.tier": "kv.offload={}",
        "kv.ahead": "kv.offload_prefetch={}",
        "kv.gpu_bytes": "kv.offload_gpu_bytes={}",
        "kv.host_bytes": "kv.offload_host_bytes={}",
        "schedule.stall_ms": "schedule.max_prefill_stall_ms={}",
        "schedule.lease": "schedule.lookahead_tokens={}",
        "schedule.run_ms": "schedule.max_decode_run_ms={}",
        "speculation.longest": "speculation.prompt_lookup_max={}",
        "speculation.remembered": "speculation.suffix_pool_tokens={}",
        "attention.topk": "attention.num_blocks={}",
        "attention.part": "attention.subblock_size={}",
        "attention.candidates": "attention.num_candidate_blocks={}",
        "serve.slow_s": "serve.write_timeout_s={}",
        "serve.waiting": "serve.max_queue={}",
        "speculation.drafter=ngram": "speculation=ngram",
    }

    @property
    def blocks(self) -> Blocks:
        """The sizes that are set; where they are not, those that attention and the drafter want."""
        page, append = 64, 16
        if self.attention.policy != "dense":
            page = append = self.attention.block
        elif self.speculation.drafter == "sparse":
            append = 64  # a key's neighbours on a rank are mostly its neighbours in the text, which drafts look at
        return Blocks(self.kv.append_block or append, self.kv.page_size or page)
