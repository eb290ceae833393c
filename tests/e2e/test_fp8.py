"""FP8 checkpoints continue prompts as transformers does with the same weights, unpacked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from helix.layout import HelixLayout
from tests.e2e.checkpoints import checkpoint, continuations, write_fp8
from tests.e2e.parity import Continuation, build_kept, check, loopback

BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16]}, (16, 16)
WIDE = {"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128)
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, (None, None)  # Ministral-3
ROWS = {"quant_method": "fbgemm_fp8"}, (1, None)


def quantised(tmp_path: Path, family: str, stored: Any) -> tuple[Path, list[Continuation]]:
    """A family's checkpoint in FP8, and how transformers continues with its unpacked weights."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    shutil.copytree(checkpoint(family), plain)
    packed.mkdir()
    save_file(write_fp8(plain, packed, *stored), plain / "model.safetensors", metadata={"format": "pt"})
    return packed, continuations(plain, (5, 40), 12)


@pytest.mark.parametrize(
    "family, stored",
    [
        *(("llama-llama3", ROWS), ("qwen3", BLOCKS), ("qwen3-moe", BLOCKS), ("deepseek-v3-yarn", BLOCKS)),
        *(("qwen3-next", BLOCKS), ("qwen3.5-moe", ROWS), ("glm-5", BLOCKS), ("ministral3", STATIC)),
    ],
)
def test_tokens_are_those_of_the_unpacked_weights(tmp_path: Path, family: str, stored: Any) -> None:
    packed, wanted = quantised(tmp_path, family, stored)
    for kvp in (1, 2):
        check(loopback(packed, HelixLayout.create("helix", kvp, 1), 16, wanted), wanted)


@pytest.mark.parametrize(
    "family, stored",
    [
        *(("wide-llama", WIDE), ("wide-llama", ROWS), ("wide-qwen3-moe", WIDE), ("wide-deepseek-v3", WIDE)),
        ("wide-qwen3.5-moe", WIDE),
    ],
)
def test_tokens_are_those_of_weights_as_they_are_stored(tmp_path: Path, family: str, stored: Any) -> None:
    """Over grids whose ranks begin inside blocks."""
    packed, wanted = quantised(tmp_path, family, stored)
    widest = 1 if "deepseek" in family else 2
    for kvp, tpa, ep in ((1, 1, 1), (3, 1, 1), (2, widest, 2)):
        layout = HelixLayout.create("helix", kvp, tpa, ep=ep)
        check(loopback(packed, layout, 16, wanted, build=build_kept), wanted)


def test_tokens_are_those_of_packed_experts() -> None:
    wanted = continuations(checkpoint("gpt-oss"), (5, 40), 12)
    for kvp, tpa, ep in ((1, 1, 1), (2, 2, 2)):
        layout = HelixLayout.create("helix", kvp, tpa, ep=ep)
        check(loopback(checkpoint("gpt-oss-mxfp4"), layout, 16, wanted, build=build_kept), wanted)
