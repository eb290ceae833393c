"""SmolLM2's tokenizer and weights are those that its GGUF file says, and its chats are those of its template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from safetensors.torch import load_file

from launch.client.chat_tokenizer import ChatTokenizer, byte_decoder
from tests.real.smollm2 import CHATS, GGUF, MODEL, ids_of, licence, theirs, tokenizer

pytestmark = pytest.mark.real
CHARACTERS = {byte: character for character, byte in byte_decoder().items()}
# Bytes that no text had which the vocabulary was made of: control characters, planes 4 to 11, and what is no UTF-8.
WITHOUT_TOKEN = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


def test_weights_are_those_that_transformers_reads() -> None:
    ours, wanted = load_file(MODEL / "model.safetensors"), theirs().state_dict()
    assert ours.keys() == wanted.keys() - {"lm_head.weight"}
    assert all(torch.equal(ours[name], wanted[name]) for name in ours)


def test_the_tokenizer_is_what_the_file_says() -> None:
    expected = {
        name: field.contents() for name, field in GGUFReader(GGUF).fields.items() if name.startswith("tokenizer.")
    }
    content = json.loads((MODEL / "tokenizer.json").read_text())
    texts, types = expected["tokenizer.ggml.tokens"], expected["tokenizer.ggml.token_type"]
    assert tokenizer().get_vocab() == {text: i for i, text in enumerate(texts)}
    assert [" ".join(merge) for merge in content["model"]["merges"]] == expected["tokenizer.ggml.merges"]
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    assert special == {i for i, kind in enumerate(types) if kind == 3} == {t["id"] for t in content["added_tokens"]}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        assert getattr(tokenizer(), f"{name}_token_id") == expected[f"tokenizer.ggml.{key}_token_id"]
    assert tokenizer().chat_template == expected["tokenizer.chat_template"]
    assert tokenizer().encode("a") == tokenizer().encode("a", add_special_tokens=False), "add_bos_token=false"
    assert [tokenizer().decode([i]) for i in tokenizer().encode(" in 1984,")] == [" in", " ", "1", "9", "8", "4", ","]
    steps = [step["type"] for step in content["pre_tokenizer"]["pretokenizers"]]
    assert (expected["tokenizer.ggml.pre"], steps, content["decoder"]["type"]) == (
        "smollm", ["Digits", "ByteLevel"], "ByteLevel"
    )  # fmt: skip


def test_bytes_go_there_and_back() -> None:
    """Texts, and what is no text: any run of the bytes that have a token."""
    vocab = tokenizer().get_vocab()
    assert {byte for byte in range(256) if CHARACTERS[byte] not in vocab} == WITHOUT_TOKEN
    guided = LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=len(vocab), eos_token=2)

    @given(st.lists(st.sampled_from(sorted(set(range(256)) - WITHOUT_TOKEN)), max_size=24))
    @example([byte for byte in range(256) if byte not in WITHOUT_TOKEN])
    def bytes_are_kept(content: list[int]) -> None:
        ids = [vocab[CHARACTERS[byte]] for byte in content]
        assert guided.decode_bytes(ids) == bytes(content)
        assert tokenizer().decode(ids) == bytes(content).decode("utf-8", "replace")

    @given(st.text())
    @example("naïve 12345 你好 🙂\r\n\t don't  ½٣")
    def texts_are_kept(text: str) -> None:
        ids = tokenizer().encode(text)
        encodable = bytes(
            byte for byte in text.encode() if byte not in WITHOUT_TOKEN
        )  # llama.cpp leaves them out as well
        assert guided.decode_bytes(ids) == encodable and tokenizer().decode(ids) == encodable.decode("utf-8", "replace")

    bytes_are_kept()
    texts_are_kept()


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_that_of_the_template(name: str) -> None:
    chat = CHATS[name]
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat) + "<|im_start|>assistant\n"
    if chat[0]["role"] != "system":
        default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        expected = f"<|im_start|>system\n{default}<|im_end|>\n{expected}"
    tokens = ChatTokenizer(str(MODEL))
    assert tokens._special is not None, "turns are tokenized apart, so that those before are looked up"
    assert tokens.encode_segments(expected).tolist() == list(ids_of(chat)) == tokenizer().encode(expected)


def test_a_converted_directory_is_what_transformers_writes_too(tmp_path: Path) -> None:
    """Whatever it loads and saves again has the same tokens."""
    tokenizer().save_pretrained(tmp_path)
    shutil.copy(MODEL / "config.json", tmp_path)
    again = ChatTokenizer(str(tmp_path)).encode_segments(licence(3000)[0]["content"])
    assert again.tolist() == tokenizer().encode(licence(3000)[0]["content"])
