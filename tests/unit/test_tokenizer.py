"""load_tokenizer: texts are split as `tokenizer.json` says, and begin as `tokenizer_config.json` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from helix.models.gguf_tokenizer import LLAMA3_WORDS
from helix.tokenizer import load_tokenizer

TEXT = "hello world 1234567 foo(bar) don't stop"


def write(directory: Path) -> Tokenizer:
    """Writes a byte-level tokenizer that splits texts as Llama 3's does."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "the quick brown fox 1999 2024 12345"] * 50, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", "LlamaTokenizerFast"),  # DeepSeek-R1-Distill-Llama
        ("qwen3", "LlamaTokenizerFast"),  # DeepSeek-R1-0528-Qwen3-8B
        ("llama", "GPT2Tokenizer"),
        ("qwen3", "Qwen2Tokenizer"),
        ("deepseek_v3", "LlamaTokenizerFast"),
        ("llama", None),
    ],
)
def test_texts_are_split_as_the_file_says(tmp_path: Path, model_type: str, named: str | None) -> None:
    raw = write(tmp_path)
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({"tokenizer_class": named} if named else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = raw.encode(TEXT).ids
    assert tokenizer(TEXT)["input_ids"] == ids
    assert tokenizer.decode(ids) == TEXT and tokenizer.eos_token == "</s>"


@pytest.mark.parametrize(
    ("named", "asked", "begins"),
    [
        ("LlamaTokenizerFast", True, True),  # DeepSeek-V3, R1 and the distilled models
        ("LlamaTokenizerFast", False, False),
        ("LlamaTokenizerFast", None, False),
        ("PreTrainedTokenizerFast", True, False),
    ],
)
def test_texts_begin_as_the_config_says(tmp_path: Path, named: str, asked: bool | None, begins: bool) -> None:
    raw = write(tmp_path)
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": named, "add_eos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": asked}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = raw.encode(TEXT).ids
    begin = [tokenizer.bos_token_id] * begins
    assert tokenizer.backend_tokenizer.encode(TEXT).ids == [*begin, *ids]
    assert tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids == ids
