"""Shared by the two Hopper kernels of `kernels.mla.decode`: supported tensors and TMA descriptors.

TMA loads tiles of 64 keys in two pieces: the left half of the latents with the rope values, and the right half.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.schedule_sm90 import TILE
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.sm90 import SHARED


def fits(q: torch.Tensor, keys: PagedKeys) -> bool:
    """Returns whether these kernels support these arguments of `kernels.mla.decode.mla_decode`."""
    planes = (keys.k,) if keys.rope is None else (keys.k, keys.rope)
    return (
        (keys.v.shape[-1], q.shape[3]) == (512, 576)
        and q.dtype in (torch.bfloat16, torch.float16)
        and keys.page_size % TILE.value == 0
        and all(plane.stride(0) % plane.shape[2] == 0 and plane.data_ptr() % 16 == 0 for plane in planes)
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def score_args(scores: KeyScores | None) -> tuple[Any, ...]:
    """Returns the kernels' arguments: planes, table, and the strides of planes, their pages and the table."""
    if scores is None:
        return None, None, 0, 0, 0
    return scores.planes, scores.table, scores.planes.stride(0), scores.planes.stride(1), scores.table.stride(0)


@gluon.jit
def collecting_of(scoring, bounds, b, t, tile_m, share, T: gl.constexpr, COLLECT: gl.constexpr):
    """Returns `collecting` of `attend_left` for sequence b and the queries t [rows] of a tile of rows."""
    key_scores, score_table, score_plane, score_page, score_table_b = scoring
    lo, hi, lo_b, lo_t, hi_b, hi_t, _ = bounds
    first = gl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
    last = gl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)
    counts = first < last  # queries that read no key come before all others, or after them
    if COLLECT == "ends":
        earliest, latest = T, -1
        for token in gl.static_range(T):
            reads = gl.load(lo + b * lo_b + token * lo_t) < gl.load(hi + b * hi_b + token * hi_t)
            earliest = gl.minimum(earliest, gl.where(reads, token, T))
            latest = gl.maximum(latest, gl.where(reads, token, -1))
        counts = counts & ((t == earliest) | (t == latest))
    return key_scores + tile_m * score_plane, score_table + b * score_table_b, score_page, counts, share


@gluon.jit
def score_page_of(tile, collecting, PAGE: gl.constexpr, COLLECT: gl.constexpr):
    """Looks up a tile's page of key scores; 0 if there are none."""
    page = 0
    if COLLECT is not None:
        page = gl.load(collecting[1] + tile * TILE // PAGE)
    return page


@gluon.jit
def store_scores(found, key, start, stop, page, collecting, PAGE: gl.constexpr):
    """Stores the scores [TILE] of keys from `key` on in their page."""
    to, _, score_page, _, share = collecting
    n = key + gl.arange(0, TILE, layout=found.type.layout)
    at = to + gl.to_tensor(page).to(gl.int64) * score_page + n % PAGE
    gl.store(at, (found * share).to(to.dtype.element_ty), mask=(n >= start) & (n < stop))


@gluon.jit
def key_scores_of(scores, collecting, ROWS_DIM: gl.constexpr, COLLECT: gl.constexpr):
    """Reduces scores to one per key: the maximum over the rows that count, or their sum; other rows may be NaN."""
    counts = gl.expand_dims(collecting[3], 1 - ROWS_DIM)
    if COLLECT == "any":
        found = gl.max(gl.where(counts, scores, float("-inf")), ROWS_DIM)
        return gl.where(found == float("-inf"), 0.0, found)  # no row of this tile counts
    else:
        return gl.sum(gl.where(counts, scores, 0.0), ROWS_DIM)


def pieces(keys: PagedKeys) -> tuple[int, torch.Tensor | TensorDescriptor, TensorDescriptor]:
    """Returns a page's stride in slots, and the sources of half a tile's latents and of its rope values.

    Both are descriptors of the same slots; for e4m3: the latents' words, and a descriptor of the rope plane.
    """
    if keys.rope is not None:
        page_rows, slots = _rows(keys.rope)
        return page_rows, keys.k.view(torch.int32), _tiles(slots, slots.shape[1])
    page_rows, slots = _rows(keys.k)
    latent = keys.v.shape[-1]
    return page_rows, _tiles(slots, latent // 2), _tiles(slots, slots.shape[1] - latent)


def _rows(plane: torch.Tensor) -> tuple[int, torch.Tensor]:
    width = plane.shape[2]
    page_rows = plane.stride(0) // width
    return page_rows, plane.as_strided(((plane.shape[0] - 1) * page_rows + plane.shape[1], width), (width, 1))


def _tiles(slots: torch.Tensor, columns: int) -> TensorDescriptor:
    return TensorDescriptor(slots, list(slots.shape), [slots.shape[1], 1], [TILE.value, columns], SHARED.value)
