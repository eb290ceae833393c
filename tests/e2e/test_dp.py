"""Mode dp gives what transformers gives: attention of whole sequences by rank, experts over all ranks."""

from __future__ import annotations

import pytest

from helix.layout import HelixLayout
from tests.e2e.checkpoints import MOE_FAMILIES, checkpoint, oracle
from tests.e2e.deepseek import MLA_FAMILIES
from tests.e2e.parity import check, loopback
from tests.e2e.test_parity import LENGTHS, MOE_LENGTHS, MOE_TOKENS, NEW_TOKENS


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_dense_models(dp: int) -> None:
    wanted = oracle("qwen2", LENGTHS, NEW_TOKENS)
    check(loopback(checkpoint("qwen2"), HelixLayout.create("dp", dp=dp), 16, wanted), wanted)


@pytest.mark.parametrize("dp, ep", [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("family", [*MOE_FAMILIES, "gpt-oss-mxfp4", *MLA_FAMILIES])
def test_experts(family: str, dp: int, ep: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create("dp", dp=dp, ep=ep), 16, wanted), wanted)
