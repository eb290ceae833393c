"""Bits of scores of tokens that an indexer chooses from; numbers are compared by `tests/kernels/test_suite.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.indexer.reference import index_scores as reference
from kernels.indexer.reference import ordered
from kernels.indexer.scores import index_scores
from kernels.indexer.select_topk import PLANES
from tests.kernels.cases_indexer import make_scores


@pytest.mark.parametrize("op", [index_scores, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("heads, page_size", [(1, 7), (6, 16), (32, 128), (64, 1)])
def test_single_queries_count_first_digits(
    op: Any, heads: int, page_size: int, few: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Counts are of the very scores that are written, NaN and zeros of either sign too, and are added."""
    lengths = [300, 0, 7, 130]
    given = make_scores(
        counts=[1] * 4, lengths=lengths, heads=heads, width=16, page_size=page_size, dtype=dtype, few=few, device=device
    ).given
    given["cache"][given["tables"][3, 0].long()] = torch.tensor(-0.0).to(given["cache"].dtype)
    given["q"][2] = torch.nan
    for cu_q in (None, torch.arange(5, device=device).int()):
        numbers = torch.full((PLANES, 6, 256), 5, dtype=torch.int32, device=device)[:, 1:5]  # of some rows
        op(**given | dict(cu_q=cu_q, digit_counts=numbers))
        codes = [ordered(given["scores"][n, :length]) >> 24 for n, length in enumerate(lengths)]
        assert torch.equal(numbers[0] - 5, torch.stack([code.bincount(minlength=256).int() for code in codes]))
        assert numbers[0, 1].eq(5).all() and numbers[0, 2, 255] == 12 and (numbers[1:] == 5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("heads, rows", [(32, 5), (32, 6), (32, 8), (32, 9), (64, 3), (64, 5)])
def test_scores_are_the_same_bit_for_bit_alone_and_in_a_group(
    heads: int, rows: int, few: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Verification has to choose what plain decoding chooses."""
    shape: dict[str, Any] = dict(counts=[rows], lengths=[500], heads=heads, width=128, page_size=64)
    given = make_scores(**shape, dtype=dtype, few=few, device=device).given
    alone = given["scores"].clone()
    index_scores(**given)
    for n in range(rows):
        row = {name: given[name][n : n + 1] for name in ("q", "weights", "hi")}
        index_scores(**given | row | dict(max_q=1, scores=alone[n : n + 1]))
    assert torch.equal(given["scores"], alone)
