"""Points of a search, as arrays: layouts of GPUs and numbers of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.planner.hardware import BYTES, FEW_BITS, Array

# The runtime's three (helix/layout.py), and `dp`: whole sequences on groups of ranks, with experts over all ranks, as
# DeepSeek-R1 is served.
MODES = ("tp", "dp", "medha", "helix")
TP, DP, MEDHA, HELIX = range(4)


@dataclass(frozen=True)
class Points:
    """Points as arrays [n]: `pp` stages of `dp` groups of `kvp x tpa` ranks each; `batch` sequences per stage."""

    mode: Array
    pp: Array
    dp: Array
    kvp: Array
    tpa: Array
    tpf: Array
    ep: Array
    batch: Array

    @classmethod
    def of(
        cls,
        mode: str,
        batch: int = 1,
        *,
        pp: int = 1,
        dp: int = 1,
        kvp: int = 1,
        tpa: int = 1,
        tpf: int | None = None,
        ep: int = 1,
    ) -> Points:
        """Creates a single point; an unset `tpf` takes all FFN ranks that `ep` leaves.

        Raises:
            ValueError: the mode is unknown, or `ep` does not divide the ranks.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(MODES)}")
        ranks = tpa if mode == "medha" else dp * kvp * tpa
        if tpf is None and ranks % max(ep, 1):
            raise ValueError(f"ep={ep} does not divide the {ranks} FFN ranks")
        row = (MODES.index(mode), pp, dp, kvp, tpa, ranks // max(ep, 1) if tpf is None else tpf, ep, batch)
        return cls(*(np.array([value]) for value in row))

    @classmethod
    def crossed(cls, layouts: list[tuple[int, ...]], batches: Array) -> Points:
        """Combines all layouts (mode, pp, dp, kvp, tpa, tpf, ep) with all batches."""
        columns = np.repeat(np.array(layouts, dtype=np.int64).reshape(-1, 7), len(batches), axis=0).T
        return cls(*[*columns, np.tile(batches.astype(np.int64), len(layouts))])

    @classmethod
    def joined(cls, parts: Sequence[Points]) -> Points:
        """Concatenates several sets of points."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.mode)

    def __getitem__(self, chosen: Array) -> Points:
        return Points(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def ranks(self) -> Array:
        """Number of ranks of a pipeline stage."""
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
        """Describes point `i` in words, without widths of 1 and derived ones."""
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
    """Block-sparse decode: each KV head reads the sequence's first and last blocks and the best-scored ones between.

    Attributes:
        topk: chosen blocks, or parts, over all ranks; each rank chooses its share, rounded up.
        sink_blocks, local_blocks: first and last blocks, always read.
        block: tokens of a block; the choice reads two vectors of key size per block.
        choice: `local`, or `global`: ranks exchange the scores of their best blocks.
        from_tokens: shorter sequences read all blocks.
        parts: parts of a block among which the choice is; it reads two vectors of each part of the candidates, too.
        candidates: blocks whose parts are considered, over all ranks.
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
        """Computes the blocks that the fullest rank reads; parts as the blocks that they would fill."""
        return -(-self.topk // (kvp * self.parts)) - (-(self.sink_blocks + self.local_blocks) // kvp)

    def scored(self, length: int, kvp: Array) -> Array:
        """Computes the blocks, and the parts of candidates, whose vectors the choice reads on a rank."""
        blocks = length / self.block / kvp
        if self.parts == 1:
            return blocks
        return blocks + np.minimum(blocks, -(-self.candidates // kvp)) * self.parts

    @property
    def chosen(self) -> str:
        """The choice in words."""
        return f"{self.topk} chosen {'blocks' if self.parts == 1 else 'parts'} of {self.block // self.parts} tokens"

    @property
    def touched(self) -> int:
        """Number of blocks between the first and the last ones of which anything is read, over all ranks."""
        return self.topk if self.parts == 1 else min(self.topk, self.candidates)

    @property
    def kept(self) -> int:
        """Number of pairs of vectors that are kept of a block."""
        return 1 if self.parts == 1 else 1 + self.parts


@dataclass(frozen=True)
class Tier:
    """A cache in host memory, from which a block-sparse step fetches the chosen blocks that are not on the GPU.

    Attributes:
        hits: share of the chosen blocks that are on the GPU already.
        host_bytes: host memory for one rank's keys and values; infinite: as much as needed.
        gpu_bytes: GPU memory of the cache; None: the share of the memory that weights leave.
        ahead: share of the other chosen blocks that a guess predicts, so that they are fetched while the layer before
            computes (`kv.ahead`); None: no guesses.
    """

    hits: float
    host_bytes: float = np.inf
    gpu_bytes: float | None = None
    ahead: float | None = None


@dataclass(frozen=True)
class LayerDrafts:
    """Layer that drafts, one run a draft.

    Attributes:
        spec: a model of this one layer, with the vocabulary of its head.
        joined: width of what its first run of a step projects to its own.
        joined_again: the same of further runs; 0: they project nothing.
        shared_head: whether the head is the model's.
    """

    spec: DecoderSpec
    joined: int
    joined_again: int
    shared_head: bool


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: drafts per step, their acceptance and their cost.

    Attributes:
        gamma: drafts per step.
        acceptance: probability that a draft is accepted, given that those before it were.
        draft_s: seconds per draft of another drafter.
        sparsity: share of a sequence's keys that drafts of self-speculation read; None: another drafter.
        layer: the layer that drafts; None: another drafter.
    """

    gamma: int
    acceptance: float
    draft_s: float = 0.0
    sparsity: float | None = None
    layer: LayerDrafts | None = None

    @property
    def tail(self) -> int:
        """Most keys newer than the candidates: those of the last step, and drafts."""
        return 2 * self.gamma + 1


@dataclass(frozen=True)
class Options:
    """Options that all points share.

    Attributes:
        weights, kv, messages: dtypes, see `helix.planner.hardware.BYTES`.
        experts: dtype of routed experts; None: that of other weights.
        other: dtype of the embedding, head, routers, and MLA's up-projections of latents; None: that of other weights.
        arithmetic: dtype of products; None: that of the weights.
        hopb: whether the exchange of some sequences overlaps the attention of others (mode helix only).
        chunks: number of HOP-B chunks; None: the best number for each point.
        exchange: `batched` (one message for all sequences) or `serial` (one collective for each).
        output: division of the output projection over `all` ranks that serve a sequence, or over `tpa` (appendix A).
        queries: in MLA, every rank computes those of `all` its heads (the paper), or ranks gather them if that is
            `faster` (the runtime).
        shared: shared experts are a `dense` FFN (the paper), or among the `routed` experts if these are as wide and on
            all ranks, ep = 1 (the runtime).
        dispatch: in mode dp, rows go to the ranks of their `chosen` experts (all-to-all, the papers' baseline), or to
            `all` ranks, with shared experts divided among these (all-gather and reduce-scatter, the runtime).
        tier: cache in host memory for block-sparse steps; None: it is on the GPU.
        memory_fraction: share of the memory left by weights that KV may take.
        prompt_chunk: most tokens of a prefill step, for which memory is left; None: as many as the engine chooses.
        append_block, page_size: those of the cache, to which its size is rounded up.
    """

    weights: str = "fp4"
    kv: str = "fp4"
    messages: str = "fp4"
    experts: str | None = None
    other: str | None = None
    arithmetic: str | None = None
    hopb: bool = True
    chunks: int | None = None
    exchange: str = "batched"
    output: str = "all"
    queries: str = "faster"
    shared: str = "routed"
    dispatch: str = "chosen"
    sparse: Sparse | None = None
    tier: Tier | None = None
    speculation: Speculation | None = None
    memory_fraction: float = 0.9
    prompt_chunk: int | None = None
    append_block: int = 16
    page_size: int = 64

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str | None, ...]] = {key: tuple(BYTES) for key in ("weights", "messages")}
        choices["kv"] = (*dict.fromkeys((*BYTES, *FEW_BITS)),)
        choices |= dict.fromkeys(("experts", "other", "arithmetic"), (None, *BYTES))
        choices |= {"exchange": ("batched", "serial"), "output": ("all", "tpa"), "queries": ("all", "faster")}
        choices |= {"shared": ("dense", "routed"), "dispatch": ("chosen", "all")}
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{key}={getattr(self, key)!r} is unknown; choose one of {', '.join(map(str, known))}")
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"chunks={self.chunks} must be at least 1")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction} must be above 0 and at most 1")
        if (s := self.speculation) is not None and not (s.gamma >= 0 and 0 <= s.acceptance <= 1 and s.draft_s >= 0):
            raise ValueError(f"{s}: gamma and draft_s must not be negative, acceptance must be between 0 and 1")
        if s is not None and s.sparsity is not None and not 0 < s.sparsity <= 1:
            raise ValueError(f"sparsity={s.sparsity:g} must be above 0 and at most 1")
        if (p := self.sparse) is not None and not (min(p.topk, p.sink_blocks) >= 0 < min(p.local_blocks, p.block)):
            raise ValueError(f"{p}: blocks must not be negative, local_blocks and block must be at least 1")
        if (t := self.tier) is not None and not (0 <= t.hits <= 1 and min(t.host_bytes, t.gpu_bytes or 1) > 0):
            raise ValueError(f"{t}: hits must be from 0 to 1, and bytes positive")
        if (t := self.tier) is not None and not 0 <= (t.ahead or 0) <= 1:
            raise ValueError(f"{t}: ahead must be from 0 to 1")

    @property
    def step_tokens(self) -> int:
        """Number of query tokens per sequence and step."""
        return 1 + (self.speculation.gamma if self.speculation is not None else 0)


def check(spec: DecoderSpec, options: Options) -> None:
    """Raises ValueError for combinations that are not modelled."""
    drafts = options.speculation is not None and options.speculation.sparsity is not None
    if options.tier is not None and options.speculation is not None and options.speculation.layer is not None:
        raise ValueError("tier=host moves the model's own layers, and a layer that drafts is one more: leave out tier")
    if drafts and options.sparse is not None:
        raise ValueError("drafter=sparse is verified over all keys, and block-sparse attention reads a part of them")
    if drafts:
        what, remedy = "drafter=sparse", "take other drafts"
    elif options.sparse is not None:
        what, remedy = "block-sparse attention", "take dense attention"
    else:
        return
    if drafts and spec.has_states:
        raise ValueError(f"{what} is not supported for models whose layers keep states (Gated DeltaNet): {remedy}")
    if spec.attention.latent is not None:
        raise ValueError(f"{what} chooses by the keys of heads, and the model has latents (MLA): {remedy}")
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: {remedy}")


def problems(spec: DecoderSpec, p: Points) -> list[tuple[str, Array]]:
    """Lists the rules of layouts, each with the points that break it; in the runtime's modes these are its rules."""
    grid = (p.mode == HELIX) | (p.mode == MEDHA)
    heads, experts = spec.attention, 1 if spec.experts is None else spec.experts.experts
    tpa = np.maximum(p.tpa, 1)  # a width of 0 breaks the first rule
    whole = (heads.kv_heads % tpa == 0) | ((p.tpa % heads.kv_heads == 0) & (p.tpa <= heads.q_heads))
    return [
        ("every width and the batch are at least 1", np.min([getattr(p, f.name) for f in fields(p)[1:]], axis=0) < 1),
        ("tpf * ep is the number of FFN ranks", p.tpf * p.ep != p.ffn_ranks),
        (f"in modes helix and medha tpa divides the {heads.kv_heads} KV heads", grid & (heads.kv_heads % tpa != 0)),
        ("in modes tp and dp tpa divides the KV heads, or they divide it and it is at most the query heads", ~whole),
        ("modes tp and dp have kvp = 1", ~grid & (p.kvp > 1)),
        ("modes tp and medha have dp = 1", ((p.mode == TP) | (p.mode == MEDHA)) & (p.dp > 1)),
        ("modes other than dp are for models whose layers keep states", (p.dp > 1) & spec.has_states),
        ("mode dp has dp of at least 2", (p.mode == DP) & (p.dp < 2)),
        ("dp is at most the batch: other groups would idle", p.dp > p.batch),
        (f"ep is at most the {experts} experts (1 in a dense model)", p.ep > experts),
        (f"pp is at most the {len(spec.layers)} layers", p.pp > len(spec.layers)),
    ]


def check_points(spec: DecoderSpec, p: Points) -> None:
    """Raises ValueError, with the rule, for the first point that breaks one."""
    for rule, broken in problems(spec, p):
        if broken.any():
            i = int(np.argmax(broken))
            widths = " ".join(f"{field.name}={getattr(p, field.name)[i]}" for field in fields(p)[1:])
            raise ValueError(f"mode={MODES[p.mode[i]]} {widths}: {rule}")
