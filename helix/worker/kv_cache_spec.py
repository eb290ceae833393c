"""`KVCacheSpec`: the data that layers store of sequences. The memory layout follows from these specs alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ITEMSIZE = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # bytes, by torch's names
LATENT_GROUP = 128  # elements of an e4m3 latent that share a scale, as in `kernels.scaled_keys`
MAX_RING_TOKENS = 1024  # longer windows are stored in pages
MIN_SNAPSHOTS = 8  # of kv.snapshots=auto
SNAPSHOTS_PER_SLOT = 2  # at most: a conversation continues from one of them
SNAPSHOTS_SHARE = 16  # they take at most 1 / SNAPSHOTS_SHARE of the cache's memory
LATENTS = ("latents", "latent_scales", "ropes")  # names of the specs of MLA latents
LISTS = 3  # lists of blocks to fetch from host memory: for the selection, and for the prefetches of two layers


def dtype_name(dtype: object) -> str:
    """Returns the name of a torch dtype in specs."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine, the same on every rank; in mode dp, of each rank's own sequences.

    Attributes:
        slots: maximum sequences at a time.
        length: maximum tokens of a sequence, prompt and output.
        chunk: maximum tokens of a prefill step.
        run_steps: maximum decode steps of a batch; pages are allocated for that many, also if
            schedule.max_decode_run_ms allows fewer.
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
        """Maximum tokens of a sequence in a decode step."""
        return self.drafts + 1


@dataclass(frozen=True)
class KVCacheSpec:
    """One kind of data that a layer stores on a rank.

    Attributes:
        name: for example keys, values, latents, bounds, state.
        entry: shape of one entry.
        dtype: a key of ITEMSIZE.
        per: unit with one entry. `token`: each token that the rank owns. `page`: each page of such tokens. `slot`: each
            sequence of the batch. `prompt`: each sequence, of the last token of its last prompt chunk. `row`: each
            token of a sequence's last decode step, drafts included. `recent`: these tokens, and `before` tokens before
            them.
        window: size of the sliding window, in tokens, the query's own included; None: queries read all entries.
        by_head: a page stores its entries [heads] head by head, [heads, page_size].
        on_host: it lies in host memory.
    """

    name: str
    entry: tuple[int, ...]
    dtype: str
    per: Literal["token", "page", "slot", "prompt", "row", "recent"] = "token"
    window: int | None = None
    before: int = 0
    by_head: bool = False
    on_host: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.entry) * ITEMSIZE[self.dtype]

    @property
    def is_paged(self) -> bool:
        """Whether it lies in pages, which sequences can share."""
        return self.per in ("token", "page") and self.window is None

    @property
    def in_snapshots(self) -> bool:
        """Whether a snapshot of a sequence has it."""
        return self.per in ("slot", "recent", "prompt") or self.window is not None


def keys_and_values(heads: int, width: int, dtype: str, kv: str, window: int | None) -> tuple[KVCacheSpec, ...]:
    """Returns the specs of keys and values: in `dtype` for layers with a window, else as kv.dtype=`kv` says.

    E4m3 has a scale for each token and head, see `kernels.scaled_keys`.
    """
    specs: list[KVCacheSpec] = []
    for name, is_fp8 in (("keys", kv in ("fp8", "fp8_all")), ("values", kv != "auto")):
        is_fp8 = is_fp8 and window is None
        specs.append(KVCacheSpec(name, (heads, width), "float8_e4m3fn" if is_fp8 else dtype, window=window))
        if is_fp8:
            specs.append(KVCacheSpec(f"{name[:-1]}_scales", (heads,), "float32", by_head=True))
    return tuple(specs)


def latents(latent: int, rope: int, dtype: str, kv: str) -> tuple[KVCacheSpec, ...]:
    """Returns the specs of MLA latents: in `dtype`, or as kv.dtype=`kv` says.

    With fp8, latents are e4m3 with a scale for each 128 elements of a token, and RoPE values are separate in `dtype`.
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
    """Counts the bytes of a token in paged memory on the rank that owns it, without per-page data."""
    return sum(k.bytes for k in specs if k.is_paged and k.per == "token")


def page_bytes(specs: Iterable[KVCacheSpec], page_size: int) -> int:
    """Counts the bytes of a page of paged memory on the GPU."""
    return sum(k.bytes * (page_size if k.per == "token" else 1) for k in specs if k.is_paged and not k.on_host)


def recomputed_tokens(layer_specs: Iterable[Iterable[KVCacheSpec]]) -> float:
    """Counts the tokens before a position to compute again if only their pages are cached.

    A layer with a window is exact one window after its input is exact; a state needs all tokens from the first on.
    """
    tokens = 0.0
    for layer in layer_specs:
        specs = [*layer]
        if any(k.per == "slot" for k in specs):
            return math.inf
        tokens += max((k.window - 1 for k in specs if k.window is not None), default=0)
    return tokens


def score_planes(queries: int, group: int, width: int | None, dtype: str) -> int:
    """Counts the planes of key scores that steps of `queries` tokens with `group` query heads per KV head write.

    One for each row tile of `kernels.attention.flash_decode`, or with latents (`width` is None) of
    `kernels.mla.decode`, which assert the number.
    """
    if width is None:
        rows = 16 if dtype == "float32" else 64
    else:
        rows = 32 if dtype == "float32" else 128 if width <= 128 else 64
    return -(-queries * group // rows)
