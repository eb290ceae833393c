"""Runs a long prefill step as two micro-batches: one computes while the other communicates.

See `comm.dual_batch_overlap`. A stage ends with communication, or with the GEMMs that hide the other micro-batch's. KV
is appended one stage before it is attended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from comm import dual_batch_overlap
from comm.base import Communicator
from comm.dual_batch_overlap import DualBatchOverlap
from helix.layers.attention import Attention
from helix.models.layer import DecoderLayer, ForwardPass, Parts
from helix.worker.kv_cache import KVCache
from helix.worker.step import Step

Begin = Callable[[Step], tuple[Parts, ForwardPass]]
End = Callable[[Parts, Tensor, ForwardPass], tuple[Tensor, Tensor]]


def should_split(comm: Communicator, layers: Sequence[DecoderLayer], cache: KVCache, step: Step) -> bool:
    """Returns whether to split a step; `comm` is of the ranks that attend the same sequences."""
    # No overlap if all layers share the GPU pages of a chunk (offloaded cache), nor with recurrent states, which depend
    # on all earlier tokens, nor with small all-reduces, whose LL buffers belong to one stream. On two ranks that only
    # all-reduce, in one kernel with the norm, a split costs more than it hides.
    few = (
        comm.fuses_all_reduce_norm
        and comm.world_size <= dual_batch_overlap.MAX_UNSPLIT_RANKS
        and len(comm.kvp_group) == 1
    )
    if few or comm.world_size == 1 or step.cu_q is None or step.staged is not None or cache.has_states:
        return False
    if step.row_shard is not None or len(step.tokens) < 2 * dual_batch_overlap.MIN_MICRO_BATCH_TOKENS:
        return False
    return not any(isinstance(layer.mixer, Attention) and layer.mixer.reduces_squares for layer in layers)


def run(
    overlap: DualBatchOverlap, layers: Sequence[DecoderLayer], step: Step, begin: Begin, end: End | None
) -> list[tuple[Any, Tensor]]:
    """Runs both micro-batches through the layers, stage by stage.

    Args:
        begin: computes a micro-batch's input [n, H] of the first layer.
        end: gets the last layer's results; None: stop after the queries of the last layer.

    Returns:
        Per micro-batch: the result of `end`, or the last layer's queries; and the residual stream [n, H].
    """

    def enter(micro_batch: Step) -> tuple[ForwardPass, Tensor, Tensor]:
        parts, fwd = begin(micro_batch)
        return fwd, *layers[0].join_mixer(parts, None, fwd)

    micro_batches = step.micro_batches()
    with overlap.micro_batches() as run_both:
        fwds, normed, x = zip(*run_both(enter, micro_batches), strict=True)
        for layer in layers:
            q = run_both(layer.project, normed, x, fwds)
            if layer.next_layer is None and end is None:
                return [*zip(q, x, strict=True)]
            parts = run_both(layer.attend, q, fwds)
            normed, x = zip(*run_both(layer.join_ffn, parts, x, fwds), strict=True)
            del parts  # FFN activations are a chunk's largest tensors
            parts = run_both(layer.run_ffn, normed, fwds)
            join = end if layer.next_layer is None else layer.next_layer.join_mixer
            normed, x = zip(*run_both(join, parts, x, fwds), strict=True)
            del parts
        return [*zip(normed, x, strict=True)]


def select_rows(found: Sequence[tuple[Any, ...]], rows: Tensor) -> tuple[Any, ...]:
    """Selects rows [n] of equally nested tensors, which are whole or split in two micro-batches."""

    def select(parts: tuple[Any, ...]) -> Any:
        if parts[0] is None:
            return None
        if not isinstance(parts[0], Tensor):
            return type(parts[0])(*map(select, zip(*parts, strict=True)))
        if len(parts) == 1:
            return parts[0].index_select(0, rows)
        middle = len(parts[0])
        first = parts[0].index_select(0, rows.clamp(max=middle - 1))
        second = parts[1].index_select(0, (rows - middle).clamp(min=0))
        return torch.where((rows < middle).view(-1, *[1] * (first.dim() - 1)), first, second)

    return tuple(map(select, zip(*found, strict=True)))
