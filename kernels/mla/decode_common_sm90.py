"""Shared by the two Hopper kernels of `kernels.mla.decode`: supported tensors and TMA descriptors.

TMA loads tiles of 64 keys in two pieces: the left half of the latents with the rope values, and the right half.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.schedule_sm90 import TILE
from kernels.paged_keys import PagedKeys
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
