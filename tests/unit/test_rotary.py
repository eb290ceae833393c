"""RoPE against transformers' own, kind by kind, and far out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from helix.layers.rotary import Rotary, frequencies
from helix.layers.specs import RopeSpec
from helix.models import spec_from_config
from kernels.dense.reference import rotate

KINDS: dict[str, dict[str, Any]] = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256),
    "yarn-attention-factor": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=256, attention_factor=1.3
    ),
    "yarn-mscale": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=256, mscale=0.7, mscale_all_dim=1.2
    ),
    "yarn-not-truncated": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=256, truncate=False, beta_fast=20, beta_slow=2
    ),
}


def rope(config: dict[str, Any]) -> RopeSpec:
    return spec_from_config({"architectures": ["LlamaForCausalLM"], "head_dim": 64, **config}).rope


@pytest.mark.parametrize("context", [64, 256])
@pytest.mark.parametrize("factor", [{}, {"factor": 8.0}, {"attention_factor": 1.7}])
def test_longrope_takes_the_list_of_the_context(context: int, factor: dict[str, float]) -> None:
    """Where transformers takes that of the longest position in a call."""
    short, long = [1.0, 1.1, 1.3, 2.0], [1.5, 3.0, 9.0, 30.0]
    scaling = dict(rope_type="longrope", short_factor=short, long_factor=long, original_max_position_embeddings=64)
    parameters = scaling | factor | {"rope_theta": 10_000.0}
    shape = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=context)
    shape |= {"original_max_position_embeddings": 64}  # as published; it overrides the one in the parameters
    config = Phi3Config(**shape, rope_parameters=parameters)
    wanted, attention = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=context)
    ours = spec_from_config({"architectures": ["Phi3ForCausalLM"], **shape, "rope_parameters": parameters}).rope
    divisors, scale = frequencies(ours)
    torch.testing.assert_close(divisors, wanted, rtol=1e-6, atol=0)
    assert scale == pytest.approx(attention) and ours.scaling["divisors"] == tuple(long if context > 64 else short)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_same_rotation_as_transformers(kind: str, dim: int) -> None:
    parameters = KINDS[kind] | {"rope_theta": 50_000.0}
    config = LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=1024,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    gen = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 1, 17, 255, 256, 1000, 5000])
    q = torch.randn(len(positions), 4, dim, generator=gen)
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    ours = Rotary(RopeSpec.from_config(config, dim), torch.float32, torch.device("cpu"))
    # Angles up to 5000 in fp32 differ by a unit in the last place, 5000 x 2^-24 = 3e-4, times values up to 4.
    found = ours.angles(positions)
    torch.testing.assert_close(rotate(q, found.cos, found.sin), expected[0].transpose(0, 1), atol=1.5e-3, rtol=0)
    inv_freq, factor = frequencies(RopeSpec.from_config(config, dim))
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_both_spellings_of_a_config_mean_the_same() -> None:
    scaling = KINDS["llama3"]
    new = {"rope_parameters": scaling | {"rope_theta": 5e5}, "max_position_embeddings": 1024}
    old = {"rope_scaling": scaling, "rope_theta": 5e5, "max_position_embeddings": 1024}
    older = {"rope_scaling": {"type" if k == "rope_type" else k: v for k, v in scaling.items()}, "rope_theta": 5e5}
    specs = [rope(c) for c in (new, old, older | {"max_position_embeddings": 1024})]
    assert all(s.kind == "llama3" and s.theta == 5e5 for s in specs)
    assert torch.equal(frequencies(specs[0])[0], frequencies(specs[1])[0])
    assert torch.equal(frequencies(specs[0])[0], frequencies(specs[2])[0])
    assert rope({}).theta == 10_000.0
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}, "rope_scaling": scaling}
    assert rope(both).kind == "llama3"  # the older key, which model cards tell users to add, is not overlooked
    # Outside of the parameters it wins over the one within, as in transformers.
    outside = rope(new | {"original_max_position_embeddings": 512})
    assert outside.scaling["original_max_position_embeddings"] == 512


def test_a_million_tokens_out() -> None:
    """fp32 angles: off by at most half a unit of 2^20 (0.0625) in the fastest dimension, as in transformers; the
    rotation keeps lengths all the same."""
    rotary = Rotary(RopeSpec("default", 1e6, 128), torch.float32, torch.device("cpu"))
    positions = torch.tensor([1_000_000, 4_000_000])
    found = rotary.angles(positions)
    cos, sin = found.cos, found.sin
    exact = positions.double()[:, None] * rotary.inv_freq.double()
    error = (cos.double() - exact.cos()).abs()
    bound = positions.double()[:, None] * rotary.inv_freq.double() * 2**-24 + 1e-6
    assert (error <= bound).all()
    assert torch.allclose(cos**2 + sin**2, torch.ones(()), atol=1e-6)
