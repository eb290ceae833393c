"""Declarations of the data that layers keep of sequences: the only source of the memory's layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # bytes of a number; names are torch's
LATENT_GROUP = 128  # numbers of a latent in e4m3 that share a scale, as in `kernels.scaled_keys`
MAX_RING_TOKENS = 1024  # tokens of a window that a slot has a ring for
LISTS = 3  # lists of blocks to fetch from host memory: for the choice, and for the guesses of two layers


def dtype_name(dtype: object) -> str:
    """Returns the name by which specs know a torch dtype."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine, the same on every rank; in mode dp those of each rank's own sequences.

    Attributes:
        slots: sequences at a time.
        length: most tokens of a sequence, prompt and new ones.
        chunk: most tokens of a prefill step.
        drafts: most drafts that a decode step verifies for each sequence.
        pages: pages of the cache.
        snapshots: copies of states on the GPU, beside those of the slots.
        run_steps: most decode steps of a decision; pages are allocated for so many, also if schedule.max_decode_run_ms
            means less.
    """

    slots: int
    length: int = 1
    chunk: int = 1
    drafts: int = 0
    pages: int = 0
    snapshots: int = 0
    run_steps: int = 32

    @property
    def queries(self) -> int:
        """Most tokens of a sequence in a decode step."""
        return self.drafts + 1


@dataclass(frozen=True)
class KVCacheSpec:
    """One kind of data that a layer keeps on a rank.

    Attributes:
        name: for example keys, values, latents, bounds, state.
        entry: shape of one entry.
        dtype: one of ITEMSIZE.
        per: unit with one entry. `token`: each token that the rank owns. `page`: each page of such tokens. `slot`: each
            sequence of the batch. `row`: each token of a sequence's last decode step, drafts included. `recent`: each
            such token, and `before` tokens before them.
        reach: size of the sliding window, in tokens, the query's own included; None: queries read all entries.
        before: see `recent`.
        by_head: whether a page holds its entries [heads] head by head, [heads, page_size].
    """

    name: str
    entry: tuple[int, ...]
    dtype: str
    per: Literal["token", "page", "slot", "row", "recent"] = "token"
    window: int | None = None
    before: int = 0
    by_head: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of an entry."""
        return math.prod(self.entry) * ITEMSIZE[self.dtype]

    @property
    def is_paged(self) -> bool:
        """Whether it lies in pages, which sequences can share."""
        return self.per in ("token", "page") and self.window is None


def keys_and_values(heads: int, width: int, dtype: str, kv: str, window: int | None) -> tuple[KVCacheSpec, ...]:
    """Lists what a layer keeps of keys and values: those of a window in `dtype`, others as kv.dtype (`kv`) has it.

    Numbers in e4m3 have a scale for each token and head, see `kernels.scaled_keys`.
    """
    specs: list[KVCacheSpec] = []
    for name, is_fp8 in (("keys", kv in ("fp8", "fp8_all")), ("values", kv != "auto")):
        is_fp8 = is_fp8 and window is None
        specs.append(KVCacheSpec(name, (heads, width), "float8_e4m3fn" if is_fp8 else dtype, window=window))
        if is_fp8:
            specs.append(KVCacheSpec(f"{name[:-1]}_scales", (heads,), "float32", by_head=True))
    return tuple(specs)


def latents(latent: int, rope: int, dtype: str, kv: str) -> tuple[KVCacheSpec, ...]:
    """Lists what a layer keeps of latents: all numbers of an entry in `dtype`, or as kv.dtype=fp8 (`kv`) has it.

    Then latents are e4m3, with a scale for each 128 numbers of a token, and rotated values lie apart in `dtype`.
    """
    if kv == "auto":
        return (KVCacheSpec("latents", (latent + rope,), dtype),)
    assert kv != "k16v8", f"latents are keys and values at once: kv.dtype={kv}"
    return (
        KVCacheSpec("latents", (latent,), "float8_e4m3fn"),
        KVCacheSpec("latent_scales", (-(-latent // LATENT_GROUP),), "float32", by_head=True),
        KVCacheSpec("ropes", (rope,), dtype),
    )


def token_bytes(specs: Iterable[KVCacheSpec]) -> int:
    """Counts the bytes of a token in paged memory on the rank that owns it, without entries per page."""
    return sum(k.bytes for k in specs if k.is_paged and k.per == "token")


def page_bytes(specs: Iterable[KVCacheSpec], page_size: int) -> int:
    """Counts the bytes of a page of paged memory."""
    return sum(k.bytes * (page_size if k.per == "token" else 1) for k in specs if k.is_paged)


def recomputed_tokens(layer_specs: Iterable[Iterable[KVCacheSpec]]) -> float:
    """Counts the tokens before a position that are computed again if only their pages are cached.

    A layer with a window is exact one window after its input is exact; a state needs all tokens from the first on.

    Args:
        keeps: data that each layer keeps, in order.
    """
    tokens = 0.0
    for layer in layer_specs:
        specs = [*layer]
        if any(k.per == "slot" for k in specs):
            return math.inf
        tokens += max((k.window - 1 for k in specs if k.window is not None), default=0)
    return tokens


def score_planes(queries: int, group: int, width: int, dtype: str) -> int:
    """Counts the planes of scores of keys, of steps of `queries` tokens with `group` query heads for each KV head.

    One for each tile of rows of `kernels.attention.flash_decode`, which asserts that there are as many.
    """
    rows = 32 if dtype == "float32" else 128 if width <= 128 else 64
    return -(-queries * group // rows)
