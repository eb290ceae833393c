"""Dense attention of verification that also stores a score of each key."""

from __future__ import annotations

from torch import Tensor

from helix.attention.base import LayerAttention
from helix.attention.dense import DenseAttention
from helix.worker.kv_cache import LayerCache
from helix.worker.score_pages import ScorePages
from helix.worker.step import Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.split_kv import PartialAttention


class CollectingAttention(DenseAttention):
    """Exact attention; layers without a window store the scores of their keys.

    Args:
        scores: buffers of the scores.
    """

    def __init__(self, scores: ScorePages) -> None:
        self.scores = scores

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is not None or layer.window is not None:
            return super().attend(q, cache, step, layer)
        n = len(step.block_tables)
        lo, hi = (bound.view(n, -1) for bound in step.bounds(None))
        keys = cache.paged(step.block_tables, lo, hi, layer.scale, layer.sinks)
        scores = self.scores.layer(cache.index, slice(step.first, step.first + n))
        return decode_parts(
            q.unflatten(0, (n, -1)), keys, sms=layer.sms(q.device), early=True, scores=scores, lane=layer.chunk
        )
