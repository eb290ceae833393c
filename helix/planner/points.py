"""The planner's search space as arrays: layouts and batch sizes; and the options that all points share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

import numpy as np

from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.planner.hardware import Array, Stored

# The runtime's three (helix/layout.py), and `dp`: data-parallel attention on groups of ranks with experts over all
# ranks, as DeepSeek-R1 is served.
MODES = ("tp", "dp", "medha", "helix")
TP, DP, MEDHA, HELIX = range(4)


class Grid(NamedTuple):
    """A layout of `pp` stages of `dp` groups of `kvp x tpa` ranks each, with `tpf x ep` ranks of the FFN in a stage."""

    mode: int
    pp: int
    dp: int
    kvp: int
    tpa: int
    tpf: int
    ep: int


@dataclass(frozen=True)
class Points:
    """Points as arrays [n]: the widths of a `Grid`, and `batch` sequences per stage."""

    mode: Array
    pp: Array
    dp: Array
    kvp: Array
    tpa: Array
    tpf: Array
    ep: Array
    batch: Array

    @classmethod
    def of(cls, mode: str, batch: int = 1, *, tpf: int | None = None, **widths: int) -> Points:
        """Creates a single point; other widths default to 1, `tpf` to the FFN ranks divided by `ep`.

        Raises:
            ValueError: the mode is unknown, or `ep` does not divide the ranks.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; known: {', '.join(MODES)}")
        sizes = dict.fromkeys(("pp", "dp", "kvp", "tpa", "ep"), 1) | widths
        ranks = sizes["tpa"] if mode == "medha" else sizes["dp"] * sizes["kvp"] * sizes["tpa"]
        groups = max(sizes["ep"], 1)
        if tpf is None and ranks % groups:
            raise ValueError(f"ep={sizes['ep']} does not divide the {ranks} FFN ranks")
        grid = Grid(MODES.index(mode), tpf=ranks // groups if tpf is None else tpf, **sizes)
        return cls.crossed([grid], np.array([batch]))

    @classmethod
    def crossed(cls, grids: Sequence[Grid], batches: Array) -> Points:
        """Combines all layouts with all batches."""
        columns = np.repeat(np.array(grids, dtype=np.int64).reshape(-1, len(Grid._fields)), len(batches), axis=0).T
        return cls(*[*columns, np.tile(batches.astype(np.int64), len(grids))])

    def __len__(self) -> int:
        return len(self.mode)

    def __getitem__(self, indices: Array) -> Points:
        return Points(*(getattr(self, field.name)[indices] for field in fields(self)))

    @property
    def ranks(self) -> Array:
        """Ranks per pipeline stage."""
        return self.dp * self.kvp * self.tpa

    @property
    def ffn_ranks(self) -> Array:
        return np.where(self.mode == MEDHA, self.tpa, self.ranks)

    @property
    def gpus(self) -> Array:
        return self.pp * self.ranks

    @property
    def users(self) -> Array:
        """Number of sequences in flight: each stage works on its own batch."""
        return self.pp * self.batch

    def describe(self, i: int) -> str:
        words = [MODES[self.mode[i]]]
        words += [f"{key}={value}" for key in ("pp", "dp", "kvp", "tpa") if (value := getattr(self, key)[i]) > 1]
        words += [f"tpf={self.tpf[i]} ep={self.ep[i]}"] if self.ep[i] > 1 else []
        return " ".join(words)

    def layout(self, i: int) -> HelixLayout:
        """Converts point `i` to the runtime's layout.

        Raises:
            ValueError: the runtime has no such layout.
        """
        groups = self.dp[i] > 1 and (self.mode[i] != DP or self.tpa[i] > 1)
        if self.pp[i] > 1 or groups:
            raise ValueError(f"{self.describe(i)}: the runtime has neither pipeline stages nor groups of several ranks")
        return HelixLayout(MODES[self.mode[i]], *(int(getattr(self, k)[i]) for k in ("kvp", "tpa", "tpf", "ep", "dp")))


@dataclass(frozen=True)
class Sparse:
    """Block-sparse decode: each KV head reads the first and last blocks, and the best-scoring ones in between.

    Attributes:
        topk: selected blocks, or subblocks, over all ranks; each rank selects its share, rounded up.
        sink_blocks, local_blocks: first and last blocks, always read.
        block: tokens per block; selection reads two vectors of key size per block.
        choice: `local`, or `global`: ranks exchange the scores of their best blocks.
        from_tokens: shorter sequences read all blocks.
        parts: subblocks per block; selection also reads two vectors per subblock of the candidates.
        candidates: blocks whose subblocks are scored, over all ranks.
    """

    topk: int = 32
    sink_blocks: int = 1
    local_blocks: int = 4
    block: int = 128
    choice: str = "local"
    from_tokens: int = 0
    parts: int = 1
    candidates: int = 0

    def blocks(self, kvp: Array) -> Array:
        """Returns the blocks that the fullest rank reads; subblocks count as fractions."""
        return -(-self.topk // (kvp * self.parts)) - (-(self.sink_blocks + self.local_blocks) // kvp)

    def scored(self, length: int, kvp: Array) -> Array:
        """Returns the blocks, and subblocks of candidates, whose vectors selection reads on a rank."""
        blocks = length / self.block / kvp
        if self.parts == 1:
            return blocks
        return blocks + np.minimum(blocks, -(-self.candidates // kvp)) * self.parts

    @property
    def description(self) -> str:
        return f"{self.topk} chosen {'blocks' if self.parts == 1 else 'parts'} of {self.block // self.parts} tokens"

    @property
    def touched_blocks(self) -> int:
        """Blocks between the first and the last ones that are read at least in part, over all ranks."""
        return self.topk if self.parts == 1 else min(self.topk, self.candidates)

    @property
    def bounds_per_block(self) -> int:
        """Pairs of bound vectors stored per block."""
        return 1 if self.parts == 1 else 1 + self.parts


@dataclass(frozen=True)
class Offload:
    """KV cache in host memory, from which block-sparse steps fetch the selected blocks, and DSA the selected latents.

    Attributes:
        hit_rate: share of the selected blocks that are resident on the GPU.
        host_bytes: host memory for one rank's keys and values.
        gpu_bytes: GPU memory of the cache; None: from `Options.memory_fraction`.
        prefetch: share of the other selected blocks that prefetching predicts (`kv.offload_prefetch`); None: off.
    """

    hit_rate: float
    host_bytes: float = np.inf
    gpu_bytes: float | None = None
    prefetch: float | None = None


@dataclass(frozen=True)
class LayerDrafts:
    """A draft layer (MTP or EAGLE-3), which runs once per draft.

    Attributes:
        spec: a model of this single layer, with the vocabulary of its head.
        input_width: input width of the projection in the first run of a step.
        next_input_width: the same for later runs; 0: no projection.
        shared_head: whether it uses the model's LM head.
        matrices: how its matrices are stored; see `Options`.
    """

    spec: DecoderSpec
    input_width: int
    next_input_width: int
    shared_head: bool
    matrices: Mapping[str, Stored] = field(default_factory=dict)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: drafts per step, their acceptance and their cost.

    Attributes:
        gamma: drafts per step.
        acceptance: probability that a draft is accepted, given that those before it were.
        sparsity: share of a sequence's keys that drafts of self-speculation read; None: another drafter.
        layer: the draft layer; None: another drafter.
    """

    gamma: int
    acceptance: float
    sparsity: float | None = None
    layer: LayerDrafts | None = None

    @property
    def tokens(self) -> float:
        """Expected tokens per step: the accepted drafts, and one more."""
        return sum(self.acceptance**i for i in range(self.gamma + 1))

    @property
    def tail(self) -> int:
        """Most keys newer than the candidates: the last step's, and drafts."""
        return 2 * self.gamma + 1


@dataclass(frozen=True)
class Options:
    """Options that all points share.

    Attributes:
        weights, kv, messages: dtypes, see `helix.planner.hardware.DTYPE_BYTES`.
        experts: dtype of routed experts; None: `weights`.
        other: dtype of the embedding, head, routers, and MLA's up-projections of latents; None: `weights`.
        arithmetic: dtype of GEMMs; None: `weights`.
        matrices: how matrices are stored that are not in one of these dtypes, by kind: `weights` (inputs of attention),
            `output`, `dense`, `experts`, `shared_experts`, `other`, `head`.
        hopb: whether the exchange of some sequences overlaps the attention of others (mode helix only).
        chunks: number of HOP-B chunks; None: the best number for each point.
        exchange: `batched` (one message for all sequences) or `serial` (one collective per sequence).
        queries: MLA queries: every rank computes `all` its heads (the paper), or ranks gather them if that is `faster`
            (the runtime).
        shared: shared experts are a `dense` FFN (the paper), or `routed` experts if they have the same width and ep = 1
            (the runtime).
        overlap: modes that hide their all-reduces whole behind other work: a bound of what a schedule can hide.
        dispatch: in mode dp, rows go to the ranks of their `selected` experts (all-to-all, the papers' baseline), or to
            `all` ranks, which share the shared experts (all-gather and reduce-scatter, the runtime).
        offload: KV cache in host memory for block-sparse steps; None: on the GPU.
        memory_fraction: share of the memory left by weights that KV may take.
        prompt_chunk: tokens of a prefill step to reserve memory for; None: the engine's choice, which `plan` makes.
        append_block, page_size: of the cache.
        snapshots: number of snapshots of windows and states on the GPU; None: as kv.snapshots=auto says.
    """

    weights: str = "fp4"
    kv: str = "fp4"
    messages: str = "fp4"
    experts: str | None = None
    other: str | None = None
    arithmetic: str | None = None
    matrices: Mapping[str, Stored] = field(default_factory=dict)
    hopb: bool = True
    chunks: int | None = None
    exchange: Literal["batched", "serial"] = "batched"
    queries: Literal["faster", "all"] = "faster"
    shared: Literal["routed", "dense"] = "routed"
    overlap: tuple[str, ...] = ()
    dispatch: Literal["selected", "all"] = "selected"
    sparse: Sparse | None = None
    offload: Offload | None = None
    speculation: Speculation | None = None
    memory_fraction: float = 0.9
    prompt_chunk: int | None = None
    append_block: int = 16
    page_size: int = 64
    snapshots: int | None = 0

    def stored(self, kind: str) -> Stored:
        """Returns how matrices of a kind are stored, see `matrices`."""
        if kind in self.matrices:
            return self.matrices[kind]
        return Stored.of({"experts": self.experts, "other": self.other, "head": self.other}.get(kind) or self.weights)

    @property
    def step_tokens(self) -> int:
        return 1 + (self.speculation.gamma if self.speculation is not None else 0)


def check(spec: DecoderSpec, options: Options) -> None:
    """Raises ValueError for combinations that are not modeled."""
    s = options.speculation
    if options.offload is not None and s is not None and s.layer is not None and not spec.indexers:
        raise ValueError("kv.offload=host offloads only the model's own layers, not a draft layer: set kv.offload=none")
    if s is not None and s.sparsity is not None:
        what, remedy = "speculation=sparse", "use another drafter"
        if options.sparse is not None:
            raise ValueError(f"{what} verifies drafts with full attention: set attention=dense")
    elif options.sparse is not None:
        what, remedy = "block-sparse attention", "use dense attention"
        if spec.attention.latent is not None:
            raise ValueError(f"{what} does not support latents (MLA), which this model has: {remedy}")
    else:
        return
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model already has a sliding window: {remedy}")
    if spec.full_layers_differ:
        raise ValueError(f"{what} needs the same heads in every layer with full attention: {remedy}")


def problems(spec: DecoderSpec, p: Points) -> list[tuple[str, Array]]:
    """Lists the rules for layouts, each with the points that break it; in the runtime's modes they are its rules."""
    grid = (p.mode == HELIX) | (p.mode == MEDHA)
    experts = 1 if spec.experts is None else spec.experts.experts
    tpa = np.maximum(p.tpa, 1)  # a width of 0 breaks the first rule
    whole = [(kv % tpa == 0) | ((p.tpa % kv == 0) & (p.tpa <= q)) for q, kv in spec.heads]
    return [
        ("every width and the batch are at least 1", np.min([getattr(p, f.name) for f in fields(p)[1:]], axis=0) < 1),
        ("tpf * ep is the number of FFN ranks", p.tpf * p.ep != p.ffn_ranks),
        (f"in modes helix and medha tpa divides the {spec.kv_heads} KV heads", grid & (spec.kv_heads % tpa != 0)),
        (
            "in modes tp and dp tpa divides the KV heads, or they divide it and it is at most the query heads",
            ~np.all(whole, axis=0),
        ),
        ("modes tp and dp have kvp = 1", ~grid & (p.kvp > 1)),
        ("modes tp and medha have dp = 1", ((p.mode == TP) | (p.mode == MEDHA)) & (p.dp > 1)),
        ("models with recurrent states do not support dp", (p.dp > 1) & spec.has_states),
        ("mode dp has dp of at least 2", (p.mode == DP) & (p.dp < 2)),
        ("dp is at most the batch: other groups would idle", p.dp > p.batch),
        (f"ep is at most the {experts} experts (1 in a dense model)", p.ep > experts),
        (f"pp is at most the {len(spec.layers)} layers", p.pp > len(spec.layers)),
    ]


def check_points(spec: DecoderSpec, p: Points) -> None:
    """Raises ValueError for the first point that breaks a rule."""
    for rule, broken in problems(spec, p):
        if broken.any():
            i = int(np.argmax(broken))
            widths = " ".join(f"{field.name}={getattr(p, field.name)[i]}" for field in fields(p)[1:])
            raise ValueError(f"mode={MODES[p.mode[i]]} {widths}: {rule}")


def layouts(spec: DecoderSpec, gpus: Iterable[int], modes: Sequence[str] = MODES, pp: bool = True) -> list[Grid]:
    """Lists all layouts of exactly one of `gpus` GPUs, each once.

    Grids without KV or data parallelism appear only as `tp`; only baselines have pipeline stages.

    Raises:
        ValueError: a mode is unknown.
    """
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"modes={','.join(unknown)} is unknown; known: {', '.join(MODES)}")
    numbers = [MODES.index(name) for name in modes]
    grids: list[Grid] = []
    for total in sorted(set(gpus)):
        for stages in _divisors(total) if pp else [1]:
            ranks = total // stages
            for tpa in _divisors(ranks):
                for kvp in _divisors(ranks // tpa):
                    dp = ranks // tpa // kvp
                    allowed = {
                        TP: dp == kvp == 1,
                        DP: kvp == 1 and dp > 1,
                        MEDHA: dp == 1 and kvp > 1,
                        HELIX: dp * kvp > 1 and stages == 1,
                    }
                    for mode in (number for number in numbers if allowed[number]):
                        ffn = tpa if mode == MEDHA else ranks
                        grids += [Grid(mode, stages, dp, kvp, tpa, ffn // ep, ep) for ep in _divisors(ffn)]
    points = Points.crossed(grids, np.array([1 << 40]))  # a batch large enough for any number of groups
    broken = np.any([wrong for _, wrong in problems(spec, points)], axis=0)
    return [grid for grid, wrong in zip(grids, broken, strict=True) if not wrong]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
