"""The schema of `conf/`: every setting, as dataclasses. `--info` and docs/reference/config.md show their docstrings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from helix.sampling_params import SamplingParams
from helix.schema import FilePath, ImportPath, Range

MAX_QUERIES = 32  # per sequence in a decode step; limit of the attention kernels
MOST_SEQUENCES = 1 << 16  # in a batch
MAX_SELECTED = 128  # blocks that a query selects on a rank; limit of the selection kernel
LEAST_KEYS = 256  # that sparse drafts read of a sequence, over all ranks

STORED = "the checkpoint determines how its weights are stored; fp8 rounds unquantized ones"
TOKENS = "tokens, such as 128K or 1M, not bytes; kv.memory_fraction=0.5 takes half of the free memory"
Width = Annotated[int, Range(1)]
Count = Annotated[int, Range(1, 1 << 40)]
DrafterName = Literal["none", "suffix", "model", "mtp", "eagle3", "sparse"]
HopBChunks = Literal["none", "auto", "best"] | Annotated[int, Range(2)]
Share = Annotated[float, Range(above=0, maximum=1)]


@dataclass
class ModelConfig:
    """The model and its weights.

    Attributes:
        path: Hugging Face checkpoint directory.
        config: config.json keys to merge into those of `path`, or a whole config if `path` is unset. Objects merge
            (`model.config.rope_scaling.factor=4` keeps the rest of RoPE, in either spelling), lists replace, null
            deletes a key. Unknown keys are refused; keys that the model's family ignores cause a warning.
        dtype: float32, bfloat16, float16, or auto: the checkpoint's on a GPU, float32 on a CPU.
        load: checkpoint, or random (random weights of the config's shape; reads none).
        weights: fp8: quantized matrices stay as the checkpoint stores them; unquantized ones are rounded to e4m3 with
            a scale per 128 x 128 block, which is lossy. bf16: unpack to dtype. auto: as stored on a GPU, unpacked on a
            CPU.
        activations: fp8: where weights are e4m3, steps of 256 tokens or more (prompts) round their activations to e4m3,
            too, with a scale per token and 128 values, which is lossy. auto: in dtype.
    """

    path: FilePath | None = None
    config: dict[str, Any] = field(default_factory=dict)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load: Literal["checkpoint", "random"] = "checkpoint"
    weights: Annotated[Literal["auto", "bf16", "fp8"], STORED] = "auto"
    activations: Literal["auto", "fp8"] = "auto"


@dataclass
class LayoutConfig:
    """How the ranks share the model.

    Attributes:
        mode: helix, tp, medha, dp, or auto: the planner chooses the mode and the widths.
        kvp: KV-parallel width of attention.
        tpa: tensor-parallel width of attention.
        tpf: tensor-parallel width of routed experts; unset: the FFN's ranks divided by ep.
        ep: expert-parallel width.
        dp: number of ranks with mode=dp, each of which attends its own sequences.
    """

    mode: Literal["helix", "tp", "medha", "dp", "auto"] = "helix"
    kvp: Width = 1
    tpa: Width = 1
    tpf: Width | None = None
    ep: Width = 1
    dp: Width = 1


@dataclass
class KVConfig:
    """The KV cache.

    Attributes:
        append_block: consecutive tokens on one kvp rank before the next one takes over; unset: attention.block with
            block-sparse attention, 64 with speculation=sparse, else 16.
        page_size: tokens per page; unset: attention.block with block-sparse attention, else 64.
        dtype: fp8: keys and values in e4m3, with a scale per token and head; latents (MLA) with a scale per 128 values,
            their rotated part in model.dtype. fp8_all: index keys (DSA), too, with a scale each; tokens of nearly equal
            score may be selected differently. k16v8: keys in 16 bits, values in e4m3; use it when FP8 keys cost
            accuracy; not available with latents. auto: all in model.dtype. Layers with a window keep model.dtype.
        tokens: capacity in tokens over all ranks; unset: from memory_fraction.
        memory_fraction: share of the memory that is free after the weights are loaded.
        prefix_cache: whether to reuse the KV cache for prompts with a common prefix.
        snapshots: for models with recurrent states or sliding windows: number of snapshots of these to keep, from which
            prompts with a common prefix continue. Each takes as much memory as a sequence's states and windows. auto:
            two for each sequence of the batch, in at most a sixteenth of the cache's memory, but at least 8.
        host_snapshots: number of further snapshots in pinned host memory, to which the least valuable ones are evicted.
        snapshot_every: also take a snapshot every so many tokens of a prompt, rounded down to whole stripes
            (page_size x layout.kvp tokens); 0: only where its last message begins, where it leaves a cached prefix, and
            at its end.
        prefix_host_bytes: pinned host memory per rank for prefixes that leave the GPU; they are copied back where that
            is faster than prefill; 0: none.
        prefix_dir: directory for prefixes that leave host memory, and that outlive the server; needs prefix_host_bytes
            and prefix_disk_bytes. It holds the tokens of prompts and answers.
        prefix_disk_bytes: disk space per rank, with prefix_dir.
        offload: none: the KV cache is on the GPU; host: it is in pinned host memory, and each step fetches what it
            selects over the link: blocks, with attention=block_sparse, or the latents that the model's indexers select
            (DSA).
        offload_host_bytes: host memory for keys and values, or latents, per rank, with offload=host.
        offload_gpu_bytes: GPU memory for keys and values per rank, with offload=host; unset: from memory_fraction.
        offload_prefetch: with offload=host, predicts the blocks of the next layer and fetches them while the current
            layer computes; blocks that the prediction missed are fetched when they are selected.
    """

    dtype: Literal["auto", "fp8", "fp8_all", "k16v8"] = "auto"
    append_block: Annotated[int, Range(1, 1 << 24)] | None = None
    page_size: Annotated[int, Range(1, 1 << 14)] | None = None  # kernels use int32 offsets in a page
    tokens: Annotated[int, Range(1, 1 << 50), TOKENS] | None = None
    memory_fraction: Share = 0.9
    prefix_cache: bool = True
    snapshots: Literal["auto"] | Annotated[int, Range(0)] = "auto"
    host_snapshots: Annotated[int, Range(0)] = 0
    snapshot_every: Annotated[int, Range(0), TOKENS] = 0
    prefix_host_bytes: Annotated[float, Range(0)] = 0.0
    prefix_dir: FilePath | None = None
    prefix_disk_bytes: Annotated[float, Range(0)] = 0.0
    offload: Literal["none", "host"] = "none"
    offload_host_bytes: Annotated[float, Range(above=0)] | None = None
    offload_gpu_bytes: Annotated[float, Range(above=0)] | None = None
    offload_prefetch: bool = False


@dataclass
class AttentionConfig:
    """Which keys a query reads.

    Attributes:
        policy: dense: decode steps read all keys; block_sparse (lossy): they read the first and the last blocks of the
            sequence, and the best-scoring blocks in between, by bounds of their keys. Prefill reads all. MODULE:NAME: a
            subclass of helix.attention.block_sparse:BlockSparseAttention, with the same settings.
        block: tokens per block, which is a page of the cache.
        subblock_size: tokens of a subblock; queries select subblocks instead of whole blocks. Unset: blocks.
        num_candidate_blocks: number of best blocks by their own bounds, over all ranks, whose subblocks are scored.
        num_blocks: blocks, or subblocks, that each KV head selects over all ranks; 0: none. 32 blocks lose half of the
            needles in 32K of text; attention=parts (subblock_size=16, num_candidate_blocks=256, num_blocks=128) finds
            them.
        sink_blocks: first blocks, always read.
        local_blocks: last blocks, including the unfinished one, always read.
        choice: local (each kvp rank selects its share of num_blocks from its own blocks) or global (one selection over
            all ranks: the same blocks on every layout, at the cost of one more exchange per layer).
        from_tokens: shorter sequences read all keys.
        shared_prefix: decode steps read a prefix that sequences share in the prefix cache once for all of them, with
            exact attention and keys on the GPU. auto: where it saves reads worth the launches; always: any shared page;
            none: each sequence reads its own.
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
    shared_prefix: Literal["auto", "always", "none"] = "auto"

    @property
    def parts(self) -> int:
        """Subblocks per block; 1: queries select blocks."""
        return self.block // self.subblock_size if self.subblock_size and self.num_blocks else 1

    @property
    def candidate_blocks(self) -> int:
        """Number of blocks whose subblocks are scored; 0 if queries select blocks."""
        return self.num_candidate_blocks if self.parts > 1 else 0


@dataclass
class CommConfig:
    """Communication between ranks.

    Attributes:
        backend: symm_mem (Helix's kernels between the GPUs of one host, NCCL for large messages), nccl, gloo, or auto:
            the first of these that works here. emulated (benchmarks only): one or two GPUs run one rank each of a
            larger layout and exchange the messages for the absent ranks; times are realistic (on one GPU, without the
            link's), tokens are not. NCCL_P2P_DISABLE=1: through host memory.
        timeout_s: deadline of each collective, seconds.
    """

    backend: Literal["auto", "gloo", "nccl", "symm_mem", "emulated"] = "auto"
    timeout_s: Annotated[float, Range(0.1, 600)] = 300.0  # kernels that wait count up to 600 s


@dataclass
class HopBConfig:
    """HOP-B: overlap of the exchange with attention.

    Attributes:
        chunks: into how many chunks to split the batch, so that one is exchanged while the next is in attention. none
            (hopb=off): one exchange of the whole batch. A number: that many, at most one per sequence. best (hopb=on):
            the fastest of 2, 4 and 8, timed at startup for each batch size. auto: like best, or none if that is
            faster, from the sequence length on at which chunks pay off.
    """

    chunks: HopBChunks = "auto"

    @property
    def may_cut(self) -> bool:
        """Whether steps may be split into chunks even if that is slower."""
        return self.chunks not in ("none", "auto")

    def __str__(self) -> str:
        return "hopb=on" if self.chunks == "best" else f"hopb.chunks={self.chunks}"


@dataclass
class DraftLayoutConfig:
    """The draft model's layout, over all ranks of the run.

    Attributes:
        mode, tpf, ep: as in layout.
        kvp, tpa: as in layout; unset: the widest tpa that divides the draft model's KV heads; kvp takes the rest.
    """

    mode: Literal["helix", "tp", "medha"] = "helix"
    kvp: Width | None = None
    tpa: Width | None = None
    tpf: Width | None = None
    ep: Width = 1


@dataclass
class SpeculationConfig:
    """Speculative decoding.

    Attributes:
        drafter: none; suffix: proposes what followed the last earlier occurrence of the sequence's final tokens, in
            the sequence or in answers to earlier requests; model: a smaller model; mtp: the checkpoint's
            multi-token-prediction layer; sparse: the model itself, reading few keys; eagle3: a layer with its own
            checkpoint, trained to read the model's hidden states.
        gamma: maximum number of tokens to propose per sequence and step; the step verifies them.
        adaptive: propose fewer than gamma, or none, when more do not pay off, by recent acceptance and step times. With
            `model` it changes which tokens a sampled request gets, but not their distribution.
        prompt_lookup_max: maximum number of final tokens that suffix matches.
        suffix_pool_tokens: maximum number of tokens of earlier answers that suffix searches, for requests with the
            same cache_salt; 0 (speculation=ngram): it searches only the sequence itself.
        policy: which keys sparse reads: any: those that score best for any query of the previous verification; c2q:
            for its first and last query; window: the latest keys; quest: pages that each draft scores best by their
            bounds (not with MLA). With indexers (DSA), any: tokens that they selected in the previous verification; not
            c2q. MODULE:NAME: a function that makes the drafts' attention, given a cache and the engine's sizes.
        sparsity: share of a sequence's keys that sparse reads, at least 256 keys; no effect on what indexers selected.
        recent: for any, c2q and quest: share of these keys that are the first and the latest, whatever they score.
        reach: for any and c2q: a key's score is the best of its own and those of this many keys before it; 0 or a
            power of two.
        heads: for any and c2q. each: each KV head selects its own keys; all: the KV heads of a rank share one
            selection, by the sum of their scores. policy=c2q recent=0 reach=0 heads=all is the rule of Vegas
            (arXiv:2602.07223).
        noise: for sparse, mtp and eagle3. shared: drafts are sampled with the target's noise, and every token is the
            same as without drafts; own: drafts are sampled independently and verified by rejection sampling, which
            changes which tokens a request gets.
        path: directory of eagle3's checkpoint.
        window: latest tokens of a sequence that eagle3 reads; unset: max_position_embeddings of its config.json, its
            training length.
        model: the smaller model, with the same vocabulary.
        layout: how the ranks share the smaller model.
    """

    drafter: DrafterName = "none"
    gamma: Annotated[int, Range(1, MAX_QUERIES - 1)] = 4
    adaptive: bool = True
    prompt_lookup_max: Annotated[int, Range(1, 8)] = 3
    suffix_pool_tokens: Annotated[int, Range(0, 1 << 24)] = 1 << 18
    policy: Literal["any", "c2q", "window", "quest"] | ImportPath = "any"
    sparsity: Share = 0.07
    recent: Annotated[float, Range(0, 1)] = 0.5
    reach: Annotated[int, Range(0, 16)] = 8
    heads: Literal["each", "all"] = "each"
    noise: Literal["shared", "own"] = "shared"
    path: FilePath | None = None
    window: Count | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: DraftLayoutConfig = field(default_factory=DraftLayoutConfig)


@dataclass
class DecodeConfig:
    """What `helix run` decodes, and the sizes of steps.

    Attributes:
        prompts: file of prompts, JSON lines.
        output: file of results, JSON lines; unset: only text on the terminal.
        resume: keep what `output` already holds and run the rest.
        max_batch: maximum number of sequences in a batch, or auto: as many as there are prompts and memory, up to 512
            tokens a step; 8 on CPUs and with kv.offload=host. More prompts wait. With mode=dp, each rank has its share,
            rounded up.
        max_length: maximum tokens of a sequence, prompt and answer; unset: as many as the model and the cache allow.
        prefill_chunk: maximum prompt tokens per step, or auto: as many as are fast and leave memory to the cache.
        stream: print text as it is generated.
        max_tokens, temperature, top_k, top_p, min_p, seed, stop: defaults for prompt lines that leave them unset.
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
    """How the scheduler shares the ranks between requests, offline and in a server.

    Attributes:
        goal: latency, balance or throughput; sets the defaults of max_prefill_stall_ms and decode_share. balance widens
            them while prompts wait.
        max_prefill_stall_ms: maximum milliseconds of prefill between two decode steps; unset: from goal.
        decode_share: share of the time for decode steps while prompts wait and any sequence decodes; unset: from goal.
        max_decode_run_ms: maximum milliseconds of decode steps between two scheduling decisions.
        patience_s: seconds for which others may overtake a request that does not fit; then pages are reserved for it.
        lookahead_tokens: number of new tokens for which a sequence allocates pages at a time.
    """

    goal: Literal["latency", "balance", "throughput"] = "balance"
    max_prefill_stall_ms: Annotated[float, Range(1, 60_000)] | None = None
    decode_share: Annotated[float, Range(0.0, 0.99)] | None = None
    max_decode_run_ms: Annotated[float, Range(0.1, 10_000)] = 20.0
    patience_s: Annotated[float, Range(0, 86_400)] = 30.0
    lookahead_tokens: Annotated[int, Range(1, 1 << 24)] = 1024


@dataclass
class ServeConfig:
    """The HTTP server.

    Attributes:
        socket: Unix socket on which rank 0 serves; unset: the ranks decode `decode.prompts`. `helix serve` sets it for
            the ranks that it starts.
        attach: socket of ranks that are already running; unset: `helix serve` and `helix run` start ranks. `helix run`
            ends them after its last prompt.
        host: address to listen on.
        port: port to listen on; 0: any free port.
        processes: how many processes answer HTTP at `port`; the kernel spreads connections over them. One serves
            20,000 to 25,000 tokens per second.
        name: the model's name in the API; unset: the name of its directory.
        aliases: other names under which clients may ask for the model; `*` stands for any text, as in claude-*.
        chat_template: file with the chat template, also for prompt files and from Python; unset: the model's own.
        dialect: the format of the model's reasoning and tool calls, by its name in docs/serving.md; none: answers are
            not split; unset: the one that reads back a call that the chat template writes.
        api_keys: file of keys, lines of OWNER KEY; unset: no key is needed.
        open: allow an address that other hosts can reach without api_keys.
        cors: origins whose pages may use the server, such as https://chat.example; `*` is all.
        body_mib: maximum size of a request's body, MiB; unset: 64, or 16 bytes per token of the longest sequence if
            that is more.
        max_queue: maximum number of requests that wait for the engine.
        write_timeout_s: how long to wait for a client to read its response, seconds.
        heartbeat_s: a stream without news for this time sends an event that clients count as a sign of life, seconds.
        stored_responses: maximum number of answers of /v1/responses kept in memory per API key, the newest ones, for
            `previous_response_id`; 0: none.
        stored_mib: maximum size of these per API key, MiB of JSON.
        restarts: how often the ranks may restart within ten minutes before the server exits.
        hang_s: restart the ranks after this time without progress while there are requests, seconds.
        drain_s: how long running requests may continue after the server is asked to stop, seconds.
    """

    socket: FilePath | None = None
    attach: FilePath | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    processes: Annotated[int, Range(1, 64)] = 1
    name: str | None = None
    aliases: list[str] = field(default_factory=list)
    chat_template: FilePath | None = None
    dialect: str | None = None
    api_keys: FilePath | None = None
    open: bool = False
    cors: list[str] = field(default_factory=list)
    body_mib: Annotated[int, Range(1, 1 << 16)] | None = None
    max_queue: Annotated[int, Range(1, 1 << 20)] = 256
    write_timeout_s: Annotated[float, Range(0.1, 86_400)] = 60.0
    heartbeat_s: Annotated[float, Range(0.01, 240)] = 10.0
    stored_responses: Annotated[int, Range(0, 1 << 20)] = 1024
    stored_mib: Annotated[int, Range(1, 1 << 20)] = 64
    restarts: Annotated[int, Range(0, 1 << 20)] = 3
    hang_s: Annotated[float, Range(1, 86_400)] = 60.0
    drain_s: Annotated[float, Range(0, 86_400)] = 30.0


class Blocks(NamedTuple):
    """Tokens per append block and per page."""

    append: int
    page: int


@dataclass
class Config:
    """All settings of a run.

    Attributes:
        record: file for the run's record, JSON.
        seed: seed of the random weights.
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

    # Old settings and their replacements, kept for one release; {} is the old value.
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
        """The configured sizes; unset ones default to what attention and the drafter need."""
        page, append = 64, 16
        if self.attention.policy != "dense":
            page = append = self.attention.block
        elif self.speculation.drafter == "sparse":
            append = 64  # drafts look at a key's neighbors in the text, which should be on the same rank
        return Blocks(self.kv.append_block or append, self.kv.page_size or page)
