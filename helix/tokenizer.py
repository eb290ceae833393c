"""Loading of a checkpoint directory's tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from helix.files import read_json

LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")


def has_tokenizer(path: str | Path | None) -> bool:
    return path is not None and os.path.lexists(Path(path) / "tokenizer.json")


def check_tokenizer_files(path: str | Path | None) -> None:
    """Raises ValueError if a file is not a JSON object; transformers would ignore files that are not regular."""
    for file in sorted(Path(str(path)).glob("*token*.json")) if has_tokenizer(path) else ():
        read_json(file)


def load_tokenizer(path: str | Path | None) -> Any | None:
    """Loads the tokenizer of a checkpoint directory; returns None if it has none.

    It splits texts as `tokenizer.json` says. For some classes that `tokenizer_config.json` names, such as
    LlamaTokenizerFast of DeepSeek's distilled models, AutoTokenizer would put the class's own splitting in its place.

    Raises:
        ValueError: it cannot be read.
    """
    if not has_tokenizer(path):
        return None
    assert path is not None
    from transformers import PreTrainedTokenizerFast  # takes seconds, and only rank 0 needs it

    check_tokenizer_files(path)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        begin, empty = tokenizer.bos_token_id, tokenizer.backend_tokenizer.encode("").ids
        if begin is not None and begin not in empty and _begins_texts(Path(path)):
            tokenizer.add_bos_token = True
        return tokenizer
    except BaseException as error:  # of any type that the library raises for bad files, including panics
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        what = " ".join(str(error).split())
        raise ValueError(f"the tokenizer in {path} cannot be read: {type(error).__name__}: {what:.300}") from error


def read_end_token(path: Path) -> int | None:
    """Reads the id of the tokenizer's `eos_token` from the files of a checkpoint directory; None if it has none.

    Raises:
        ValueError: a file is not a JSON object.
    """
    if not has_tokenizer(path):
        return None

    def read(name: str) -> dict[str, Any]:
        return read_json(path / name) if os.path.lexists(path / name) else {}

    config = read("tokenizer_config.json")
    known = config.get("added_tokens_decoder")
    text = config.get("eos_token")
    if not isinstance(known, dict) or not known:  # transformers merges the other file only then
        known, text = {}, read("special_tokens_map.json").get("eos_token", text)
    text = text.get("content") if isinstance(text, dict) else text
    if not isinstance(text, str):
        return None
    for i, token in known.items():
        if isinstance(token, dict) and token.get("content") == text and i.isdecimal():
            return int(i)
    whole = read("tokenizer.json")
    try:
        added, vocab = whole.get("added_tokens") or (), whole["model"]["vocab"]
        pieces = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
        return next(
            (i for piece, i in [*((one["content"], one["id"]) for one in added), *pieces] if piece == text), None
        )
    except (AttributeError, KeyError, TypeError, ValueError):  # `load_tokenizer` tells what is wrong
        return None


def _begins_texts(path: Path) -> bool:
    """Returns whether texts begin with a special token by `tokenizer_config.json`; DeepSeek's say so there alone.

    It counts for the class whose tokenizers followed it before version 5 of transformers, which ignores it.
    """
    config = read_json(path / "tokenizer_config.json") if os.path.lexists(path / "tokenizer_config.json") else {}
    return config.get("add_bos_token") is True and config.get("tokenizer_class") in LLAMA
