"""Tiny random checkpoints of every family, written by transformers, and what transformers makes of them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.e2e.parity import Continuation

DEMO = Path(__file__).parents[2] / "assets" / "demo-model"

FIRST_TOKENS = 6

# Odd where a share should not come out even: vocabulary, FFN width, heads over ranks.
_COMMON: dict[str, Any] = dict(
    vocab_size=257,
    intermediate_size=97,
    num_hidden_layers=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    initializer_range=0.12,  # wide enough for logits that tell tokens apart
)

# Small contexts, so that a prompt of 300 tokens is far in the stretched part.
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=8.0, original_max_position_embeddings=64)

FAMILIES: dict[str, Any] = {
    "llama-llama3": lambda: LlamaConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=8, head_dim=16, rope_parameters=_LLAMA3, **_COMMON
    ),
    "llama-yarn-biased-tied": lambda: LlamaConfig(
        hidden_size=60,
        num_attention_heads=15,
        num_key_value_heads=3,
        head_dim=8,
        rope_parameters=_YARN,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "qwen2": lambda: Qwen2Config(hidden_size=112, num_attention_heads=28, num_key_value_heads=4, **_COMMON),
    "qwen2-windowed-tied": lambda: Qwen2Config(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "qwen3": lambda: Qwen3Config(hidden_size=72, num_attention_heads=12, num_key_value_heads=6, head_dim=16, **_COMMON),
    "mistral-windowed": lambda: MistralConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=16, sliding_window=19, **_COMMON
    ),
}


@functools.cache
def checkpoint(family: str) -> Path:
    """Directory of the family's random checkpoint (or of the demo model), the same for the whole test session."""
    if family == "demo":
        return DEMO
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # transformers starts them at 0 and 1, where mistakes hide
                parameter.add_(torch.randn_like(parameter) * 0.3)
    directory = Path(tempfile.mkdtemp(prefix=f"helix-{family}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model.save_pretrained(directory)
    return directory


def kv_heads(family: str) -> int:
    """What decides which layouts fit; the demo model has 2."""
    return 2 if family == "demo" else FAMILIES[family]().num_key_value_heads


@functools.cache
def oracle(family: str, lengths: tuple[int, ...], new_tokens: int) -> list[Continuation]:
    """Greedy continuations of random prompts by transformers, fp32, eager attention, no stop at EOS.

    Args:
        lengths: of the prompts; the first one is continued by FIRST_TOKENS alone.
    """
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(11)
    found = []
    for number, length in enumerate(lengths):
        prompt = torch.randint(1, model.config.vocab_size, (1, length), generator=generator)
        done = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens if number else FIRST_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(done.logits).float()  # [new_tokens, V]
        found.append(Continuation(tuple(prompt[0].tolist()), tuple(done.sequences[0, length:].tolist()), logits))
    return found
