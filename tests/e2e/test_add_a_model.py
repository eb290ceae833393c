"""A made-up family is added by the text of the page that says how, and gives what its class in transformers gives."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, Glm4MoeConfig, Glm4MoeForCausalLM

from helix.layers import attention
from helix.layout import HelixLayout
from helix.models import FAMILIES, spec_from_config
from tests.e2e import checkpoints
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import check, loopback
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "add-a-model.md"
MODULE, LINE, TINY = re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


class XConfig(Glm4MoeConfig):
    """GLM's config under another name; its model has norms on heads and no experts."""

    model_type = "x"

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"use_qk_norm": True, "first_k_dense_replace": 99} | given)


class XForCausalLM(Glm4MoeForCausalLM):
    """A model of that config."""

    config_class = XConfig


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family as transformers has it, and as the page adds it."""
    monkeypatch.setattr(checkpoints.transformers, "XForCausalLM", XForCausalLM, raising=False)
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "x", XConfig)
    module = types.ModuleType("helix.models.x")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(MODULE, "helix/models/x.py", "exec"), module.__dict__)
    for name, family in eval(f"{{{LINE}}}", {"x": module}).items():
        monkeypatch.setitem(FAMILIES, name, family)
    for name, content in yaml.safe_load(TINY).items():
        monkeypatch.setitem(checkpoints.FAMILIES, name, content)


@pytest.mark.parametrize("mode, kvp, tpa", [("helix", 1, 1), ("helix", 2, 2), ("helix", 3, 1), ("tp", 1, 4)])
def test_the_family_of_the_page(added: None, mode: str, kvp: int, tpa: int) -> None:
    wanted = oracle("x", MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint("x"), HelixLayout.create(mode, kvp, tpa), 16, wanted), wanted)


def test_what_the_page_refuses_is_refused_by_name(added: None) -> None:
    content = {**XConfig(head_dim=128).to_dict(), "architectures": ["XForCausalLM"]}
    assert spec_from_config(content).rope.head_dim == 64
    with pytest.raises(ValueError, match=r"logit_softcap=30\.0 is not supported in x models"):
        spec_from_config(content | {"logit_softcap": 30.0})


def test_a_step_of_the_page_that_is_left_out_is_caught(added: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = oracle("x", MOE_LENGTHS, MOE_TOKENS)
    monkeypatch.setattr(attention, "rope_row_order", lambda head_dim, rotated: [range(head_dim)])
    results = loopback(checkpoint("x"), HelixLayout.create("helix", 2, 1), 16, wanted)
    assert torch.isfinite(torch.cat(list(results[0].logits.values()))).all()
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)
