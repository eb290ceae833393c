"""Which heads, columns, experts and tokens each rank owns; pure arithmetic.

In every layer the N ranks form two grids, one after the other (Helix Parallelism, arXiv:2507.07120, section 2):

    attention   KVP x TPA    rank = tpa_rank * kvp + kvp_rank: TPA splits heads, KVP splits the KV sequence;
                or DP        rank = dp_rank: every rank has all heads and attends its own sequences
    FFN         TPF x EP     rank = ep_rank * tpf + tpf_rank: TPF splits columns, EP splits experts

Shares are contiguous and differ by at most one, larger ones first; nothing has to divide evenly, and a share may be
empty.

Shape legend of the project
    B sequences, T query tokens of a sequence in one step, N tokens of one step over all its sequences,
    S KV length (S_local on a rank), Hq / Hkv query / KV heads, D head dim, H hidden, F FFN width, V vocabulary,
    E experts, R MLA latent, W ranks, K ranks of one kvp group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

MODES = ("helix", "tp", "medha", "dp")

# Token arithmetic uses only // % and abs, so that it works on int, numpy and torch integers.
Int = TypeVar("Int", int, Any)


def share(total: int, parts: int, index: int, block: int = 1) -> range:
    """Returns the `index`-th of `parts` contiguous shares of `total` items; sizes differ by at most one.

    With `block`, shares are whole blocks, if there are as many blocks as shares.
    """
    if block > 1 and total % block == 0 and total // block >= parts:
        blocks = share(total // block, parts, index)
        return range(blocks.start * block, blocks.stop * block)
    size, larger = divmod(total, parts)
    begin = index * size + min(index, larger)
    return range(begin, begin + size + (index < larger))


def _clamp(x: Int, upper: int) -> Int:
    # min(max(x, 0), upper)
    return (abs(x) - abs(x - upper) + upper) // 2


@dataclass(frozen=True)
class HelixLayout:
    """Layout of a model over N ranks: `kvp x tpa`, or `dp`, in attention, `tpf x ep` in the FFN.

    Modes:
    - `helix`: the paper's.
    - `tp`: kvp=1; replicates KV heads if N exceeds them.
    - `medha`: KV over all ranks; output projection and FFN only on the `tpf = tpa` ranks with kvp_rank 0.
    - `dp`: kvp=tpa=1; each of `dp` ranks attends its own sequences, with all attention weights.

    Raises:
        ValueError: the widths do not form a layout of this mode.
    """

    mode: str
    kvp: int
    tpa: int
    tpf: int
    ep: int
    dp: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"layout.mode={self.mode!r} is unknown; known: {', '.join(MODES)}")
        for name in ("kvp", "tpa", "tpf", "ep", "dp"):
            width = getattr(self, name)
            if type(width) is not int or width < 1:
                raise ValueError(f"layout.{name}={width!r} must be an integer of at least 1")
        if self.mode == "tp" and self.kvp != 1:
            raise ValueError(
                f"layout.mode=tp has no KV parallelism, but layout.kvp={self.kvp}: set layout.kvp=1 or "
                "layout.mode=helix"
            )
        if self.mode == "dp" and self.kvp * self.tpa != 1:
            raise ValueError(
                f"layout.mode=dp attends each sequence on one rank, but layout.kvp={self.kvp} and "
                f"layout.tpa={self.tpa}: set both to 1, and layout.dp to the number of ranks"
            )
        if self.mode != "dp" and self.dp != 1:
            raise ValueError(
                f"layout.dp={self.dp} needs layout.mode=dp, but layout.mode={self.mode}: set layout.kvp and layout.tpa "
                "instead"
            )
        if self.tpf * self.ep != self.ffn_ranks:
            ranks = {"medha": "tpa", "dp": "dp"}.get(self.mode, "kvp*tpa")
            raise ValueError(
                f"layout.tpf*ep = {self.tpf}*{self.ep} = {self.tpf * self.ep}, but layout.mode={self.mode} runs the "
                f"FFN on {ranks} = {self.ffn_ranks} ranks: leave out layout.tpf, and it is {ranks}/ep"
            )

    @classmethod
    def create(
        cls, mode: str = "helix", kvp: int = 1, tpa: int = 1, tpf: int | None = None, ep: int = 1, dp: int = 1
    ) -> HelixLayout:
        """Creates a layout; `tpf` defaults to the FFN ranks divided by `ep`."""
        if tpf is None:
            ranks = tpa if mode == "medha" else dp * kvp * tpa
            if ep < 1 or ranks % ep:
                raise ValueError(
                    f"layout.ep={ep} does not divide the {ranks} ranks of the FFN: set layout.ep to a divisor of "
                    f"{ranks}"
                )
            tpf = ranks // ep
        return cls(mode, kvp, tpa, tpf, ep, dp)

    def __str__(self) -> str:
        attention = f"dp={self.dp}" if self.mode == "dp" else f"kvp={self.kvp} tpa={self.tpa}"
        return f"{self.mode} {attention} -> tpf={self.tpf} ep={self.ep}"

    # ---- ranks and groups

    @property
    def world_size(self) -> int:
        return self.dp * self.kvp * self.tpa

    @property
    def ranks(self) -> str:
        """The number of ranks and the settings that determine it, for messages."""
        if self.mode == "dp":
            return f"layout.dp = {self.dp} ranks"
        return f"layout.kvp*tpa = {self.kvp}*{self.tpa} = {self.world_size} ranks"

    @property
    def ffn_ranks(self) -> int:
        """Number of ranks that hold FFN and output-projection weights."""
        return self.tpa if self.mode == "medha" else self.world_size

    def dp_rank(self, rank: int) -> int:
        """Returns the index of the data-parallel group; 0 unless the mode is dp."""
        return rank // (self.kvp * self.tpa)

    def kvp_rank(self, rank: int) -> int:
        return rank % self.kvp

    def tpa_rank(self, rank: int) -> int:
        return rank // self.kvp % self.tpa

    def kvp_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same heads and split the KV sequence, in kvp order."""
        first = rank // self.kvp * self.kvp
        return tuple(range(first, first + self.kvp))

    def kvp_groups(self) -> list[tuple[int, ...]]:
        return [self.kvp_group(first) for first in range(0, self.world_size, self.kvp)]

    def ffn_index(self, rank: int) -> int | None:
        """Returns this rank's index among the FFN ranks; None if it is idle in the FFN."""
        if self.mode == "medha":
            return self.tpa_rank(rank) if self.kvp_rank(rank) == 0 else None
        return rank

    # ---- heads

    def check_heads(self, q_heads: int, kv_heads: int) -> None:
        """Raises ValueError, with the layouts that fit, unless these heads can be split over `tpa`."""
        if q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} KV heads")
        if self._heads_fit(q_heads, kv_heads):
            return
        rule = (
            "tp needs N to divide the KV heads, or the KV heads to divide N with N at most the query heads"
            if self.mode == "tp"
            else "tpa must divide the KV heads (MLA has one): a larger tpa would duplicate the cache; use kvp instead"
        )
        fitting = ", ".join(feasible_layouts(self.world_size, q_heads, kv_heads))
        raise ValueError(
            f"layout.tpa={self.tpa} does not fit a model of {q_heads} query and {kv_heads} KV heads ({rule}). "
            f"Layouts of {self.world_size} ranks that fit: {fitting}"
        )

    def _heads_fit(self, q_heads: int, kv_heads: int) -> bool:
        if self.mode == "tp" and self.tpa > kv_heads:
            return self.tpa % kv_heads == 0 and self.tpa <= q_heads
        return kv_heads % self.tpa == 0

    def kv_heads(self, rank: int, kv_heads: int) -> range:
        """Returns the KV heads in this rank's cache; the same for all ranks of a kvp group."""
        a = self.tpa_rank(rank)
        if self.tpa > kv_heads:  # mode tp: every KV head on tpa/Hkv ranks
            first = a // (self.tpa // kv_heads)
            return range(first, first + 1)
        return share(kv_heads, self.tpa, a)

    def q_heads(self, rank: int, q_heads: int, kv_heads: int) -> range:
        """Returns the query heads that this rank projects and attends; the same for all ranks of a kvp group."""
        group = q_heads // kv_heads
        kv = self.kv_heads(rank, kv_heads)
        first, last = kv.start * group, kv.stop * group
        if self.tpa > kv_heads:
            copies = self.tpa // kv_heads
            part = share(group, copies, self.tpa_rank(rank) % copies)
            return range(first + part.start, first + part.stop)
        return range(first, last)

    def head_shares(self, rank: int, q_heads: int, kv_heads: int) -> list[int]:
        """Returns how many of the kvp group's query heads each kvp rank owns after the exchange."""
        heads = len(self.q_heads(rank, q_heads, kv_heads))
        if self.mode == "medha":  # all on kvp rank 0, the only one with the output projection
            return [heads] + [0] * (self.kvp - 1)
        return [len(share(heads, self.kvp, k)) for k in range(self.kvp)]

    def o_heads(self, rank: int, q_heads: int, kv_heads: int) -> range:
        """Returns the query heads that this rank owns after the exchange."""
        shares = self.head_shares(rank, q_heads, kv_heads)
        k = self.kvp_rank(rank)
        begin = self.q_heads(rank, q_heads, kv_heads).start + sum(shares[:k])
        return range(begin, begin + shares[k])

    def hidden_columns(self, rank: int, q_heads: int, kv_heads: int, head_dim: int) -> range:
        heads = self.o_heads(rank, q_heads, kv_heads)
        return range(heads.start * head_dim, heads.stop * head_dim)

    def state_heads(self, rank: int, heads: int) -> range:
        """Returns this rank's heads of a recurrent layer, sharded over all ranks like columns of an FFN."""
        return self.ffn_columns(rank, heads)

    # ---- FFN, experts, vocabulary

    def ffn_columns(self, rank: int, width: int, block: int = 1) -> range:
        """Returns this rank's columns of a dense FFN: TP over all FFN ranks, regardless of tpf and ep."""
        index = self.ffn_index(rank)
        return range(0) if index is None else share(width, self.ffn_ranks, index, block)

    def experts(self, rank: int, experts: int) -> range:
        index = self.ffn_index(rank)
        return range(0) if index is None else share(experts, self.ep, index // self.tpf)

    def expert_columns(self, rank: int, width: int, block: int = 1) -> range:
        index = self.ffn_index(rank)
        return range(0) if index is None else share(width, self.tpf, index % self.tpf, block)

    def vocab_rows(self, rank: int, vocab: int) -> range:
        """Returns this rank's rows of the embedding and the LM head; all rows in mode dp."""
        return share(vocab, self.kvp * self.tpa, rank % (self.kvp * self.tpa))

    # ---- tokens: round-robin blocks over the kvp ranks (section 2.3)

    def token_owner(self, token: Int, block: int, start: Int = 0) -> Int:
        """Returns the kvp rank that stores a token: round-robin blocks of `block` tokens, the first on rank `start`."""
        return (token // block + start) % self.kvp

    def token_slot(self, token: Int, block: int) -> Int:
        """Returns a token's local position on its owner; local order follows global order."""
        return token // (block * self.kvp) * block + token % block

    def token_at(self, slot: Int, kvp_rank: int, block: int, start: Int = 0) -> Int:
        """Returns the global position of a local position: the inverse of `token_slot`."""
        return (slot // block * self.kvp + (kvp_rank - start) % self.kvp) * block + slot % block

    def local_length(self, length: Int, kvp_rank: int, block: int, start: Int = 0) -> Int:
        """Returns how many of a sequence's first `length` tokens a kvp rank stores."""
        cycle = block * self.kvp
        first = (kvp_rank - start) % self.kvp * block
        return length // cycle * block + _clamp(length % cycle - first, block)

    def local_bounds(
        self, position: Int, kvp_rank: int, block: int, start: Int = 0, window: int | None = None
    ) -> tuple[Int, Int]:
        """Returns the local keys `[lo, hi)` that a causal query at `position` reads; `window` includes its own key."""
        hi = self.local_length(position + 1, kvp_rank, block, start)
        if window is None:
            return hi * 0, hi
        before = position + 1 - window
        return self.local_length((before + abs(before)) // 2, kvp_rank, block, start), hi


def feasible_layouts(world_size: int, q_heads: int, kv_heads: int) -> list[str]:
    """Lists the attention grids of `world_size` ranks that fit these heads, as command-line settings."""
    names = []
    for mode in ("helix", "tp", "medha"):
        for tpa in range(1, world_size + 1):
            kvp = world_size // tpa
            if world_size % tpa or (mode == "tp" and kvp != 1) or (mode == "medha" and kvp == 1):
                continue
            if HelixLayout.create(mode, kvp, tpa)._heads_fit(q_heads, kv_heads):
                names.append(f"[mode={mode} kvp={kvp} tpa={tpa}]")
    return [*names, f"[mode=dp dp={world_size}]"]
