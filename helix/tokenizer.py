"""A checkpoint's tokenizer: reads its files as transformers does, on top of the `tokenizers` library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from helix.files import read_json, read_text

OTHER_TOKENIZERS = ("tiktoken.model", "tekken.json", "tokenizer.model")  # formats that only their authors' code reads
LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")
# Names of special tokens in tokenizer_config.json.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# WordPiece's spaces before punctuation, which `clean_up_tokenization_spaces` removes.
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# Chat templates by model type, for checkpoints that have code in their place.
OWN_TEMPLATES = Path(__file__).with_name("chat_templates")


class Tokenizer:
    """Tokenizer of a checkpoint directory with `tokenizer.json`, equal to transformers' PreTrainedTokenizerFast.

    It pre-tokenizes as `tokenizer.json` says. For some classes in `tokenizer_config.json`, such as LlamaTokenizerFast
    of DeepSeek's distilled models, AutoTokenizer would replace that by the class's own pre-tokenizer.

    Attributes:
        backend_tokenizer: the `tokenizers.Tokenizer`.
        special_tokens: special tokens by name, such as `eos_token`; chat templates read them.
        chat_templates: chat templates by name; a single one is `default`.
    """

    def __init__(self, path: Path) -> None:
        backend = self.backend_tokenizer = Backend.from_file(str(path / "tokenizer.json"))
        config = _read(path / "tokenizer_config.json")
        listed, named, more = _added_tokens(path, config, backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = config.get("split_special_tokens", False)
        self.chat_templates = _chat_templates(path, config.get("chat_template"))
        self.special_tokens = {name: str(token) for name, token in named.items()}
        self._add_tokens(listed, [*named.values(), *more])
        # With BPE, cleaning up would remove spaces of the text itself.
        self._cleans = config.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE"
        bos = self.special_tokens.get("bos_token")
        # DeepSeek's tokenizers add BOS only through the config, for a class that respected it before transformers 5.
        if bos is not None and config.get("add_bos_token") is True and config.get("tokenizer_class") in LLAMA:
            begin = self.token_to_id(bos)
            if begin not in self.encode(""):
                single, pair = f"{bos}:0 $A:0", f"{bos}:0 $A:0 {bos}:1 $B:1"
                backend.post_processor = processors.TemplateProcessing(single, pair, [(bos, begin)])

    def _add_tokens(self, listed: Iterable[AddedToken], special: list[AddedToken | str]) -> None:
        # Adds tokens that `tokenizer.json` lacks, or has with other options.
        known = self.added_tokens.values()
        options = {repr(token) for token in known}
        missing: list[AddedToken | str] = [token for token in listed if repr(token) not in options]
        texts = {token.content for token in known} | {str(token) for token in missing}
        for token in special:
            if str(token) not in texts and token not in missing:
                missing.append(token)
        for token in missing:
            if isinstance(token, AddedToken) and token.content in self.special_tokens.values():
                token.special = True
        tokens = [AddedToken(token, special=True) if isinstance(token, str) else token for token in missing]
        self.backend_tokenizer.add_tokens(tokens)

    @property
    def added_tokens(self) -> dict[int, AddedToken]:
        """Tokens that are matched before pre-tokenization, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        text: str = self.backend_tokenizer.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens)
        for spaced in CLEANED if self._cleans else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def id_to_token(self, token: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token)

    def token_to_id(self, name: str) -> int | None:
        return self.backend_tokenizer.token_to_id(name)


def has_tokenizer(path: str | Path | None) -> bool:
    """Returns whether a checkpoint directory has a `tokenizer.json`."""
    return path is not None and os.path.lexists(Path(path) / "tokenizer.json")


def without_tokenizer(path: str | Path | None) -> str:
    """Says what a model without a tokenizer lacks, for messages: it has `no tokenizer.json`."""
    if path is None:
        return "no tokenizer"
    others = [name for name in OTHER_TOKENIZERS if os.path.lexists(Path(path) / name)]
    return "no tokenizer.json" + (f" ({' and '.join(others)} cannot be read)" if others else "")


def default_template(templates: Mapping[str, str]) -> str:
    """Returns the default chat template, else the first; empty if there is none."""
    return templates.get("default") or next(iter(templates.values()), "")


def read_chat_template(path: Path) -> str:
    """Reads the default chat template of a checkpoint directory, which loading the tokenizer would take longer for.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return default_template(_chat_templates(path, _read(path / "tokenizer_config.json").get("chat_template")))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the chat template in {path} cannot be read: {type(error).__name__}: {error}") from error


def read_added_tokens(path: Path) -> dict[int, str]:
    """Reads the ids and texts of added tokens from a tokenizer's files; empty where they do not list them."""
    listed = _read(path / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        return {int(i): str(one.get("content")) for i, one in listed.items() if i.isdecimal() and isinstance(one, dict)}
    added = _read(path / "tokenizer.json").get("added_tokens")
    tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return {one["id"]: str(one.get("content")) for one in tokens if isinstance(one.get("id"), int)}


def check_tokenizer_files(path: str | Path | None) -> None:
    """Raises ValueError if a file is not a JSON object."""
    for file in sorted(Path(str(path)).glob("*token*.json")) if has_tokenizer(path) else ():
        read_json(file)


def load_tokenizer(path: str | Path | None) -> Tokenizer | None:
    """Loads the tokenizer of a checkpoint directory; returns None if it has none.

    Raises:
        ValueError: it cannot be read.
    """
    if not has_tokenizer(path):
        return None
    check_tokenizer_files(path)
    try:
        return Tokenizer(Path(str(path)))
    except BaseException as error:  # the library raises any type for bad files, including Rust panics
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

    config = _read(path / "tokenizer_config.json")
    known = config.get("added_tokens_decoder")
    text = config.get("eos_token")
    if not isinstance(known, dict) or not known:  # only then transformers merges the other file
        known, text = {}, _read(path / "special_tokens_map.json").get("eos_token", text)
    text = text.get("content") if isinstance(text, dict) else text
    if not isinstance(text, str):
        return None
    for i, token in known.items():
        if isinstance(token, dict) and token.get("content") == text and i.isdecimal():
            return int(i)
    whole = _read(path / "tokenizer.json")
    try:
        added, vocab = whole.get("added_tokens") or (), whole["model"]["vocab"]
        pieces = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
        return next(
            (i for piece, i in [*((one["content"], one["id"]) for one in added), *pieces] if piece == text), None
        )
    except (AttributeError, KeyError, TypeError, ValueError):  # `load_tokenizer` reports what is wrong
        return None


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if os.path.lexists(file) else {}


def _chat_templates(path: Path, configured: Any) -> dict[str, str]:
    # Template files take precedence over `tokenizer_config.json`, and both over a template of ours.
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if os.path.lexists(path / "chat_template.jinja"):
        files = {"default": path / "chat_template.jinja"} | files
    if files:
        configured = {name: read_text(file) for name, file in files.items()}
    elif isinstance(configured, list):
        configured = {one["name"]: one["template"] for one in configured}
    if configured is None:
        own = OWN_TEMPLATES / f"{_read(path / 'config.json').get('model_type')}.jinja"
        return {"default": read_text(own)} if own in OWN_TEMPLATES.iterdir() else {}
    templates = configured if isinstance(configured, dict) else {"default": configured}
    if not all(isinstance(text, str) for item in templates.items() for text in item):
        raise TypeError("chat_template must be a string or a list of named strings")
    return templates


def _added_tokens(
    path: Path, config: dict[str, Any], backend: Backend
) -> tuple[list[AddedToken], dict[str, AddedToken | str], list[AddedToken | str]]:
    """Reads the added tokens of the files next to `tokenizer.json`, merged as in transformers.

    Args:
        config: content of `tokenizer_config.json`; changed in place.

    Returns:
        The listed tokens in id order, special tokens by name, and more special tokens.
    """
    if "additional_special_tokens" in config:
        config.setdefault("extra_special_tokens", config.pop("additional_special_tokens"))
    custom = {name: config.pop(name) for name in [*config] if _is_custom(name) and isinstance(config[name], str)}
    if isinstance(config.get("extra_special_tokens"), dict):
        custom |= config.pop("extra_special_tokens")
    if "added_tokens_decoder" in config:
        listed = {int(i): AddedToken(**token) for i, token in config["added_tokens_decoder"].items()}
    else:
        listed = _merge_older_files(path, config) | backend.get_added_tokens_decoder()
    if isinstance(config.get("extra_special_tokens"), dict):
        custom |= config.pop("extra_special_tokens")
    if backend.padding is not None:
        config.setdefault("pad_token", backend.padding["pad_token"])
    tokens = {name: _token(token) for name, token in config.items() if name in NAMED or _is_custom(name)}
    texts = {token.content: token for token in listed.values()}
    named = {name: texts.get(str(token), token) for name in NAMED if (token := tokens.get(name)) is not None}
    named |= {name: t for name, t in tokens.items() if name not in NAMED and isinstance(t, str | AddedToken)} | custom
    more = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    more = [_token(token) for token in more or ()]
    for name, token in [*named.items(), *(("extra_special_tokens", token) for token in more)]:
        if not isinstance(token, str | AddedToken):
            raise TypeError(f"{name} is a {type(token).__name__}, not a token")
    return [token for _, token in sorted(listed.items(), key=lambda item: item[0])], named, more


def _merge_older_files(path: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    # For configs without `added_tokens_decoder`: special_tokens_map.json and added_tokens.json.
    for name, value in _read(path / "special_tokens_map.json").items():
        if name == "extra_special_tokens" and isinstance(value, list):
            tokens = [AddedToken(**token, special=True) if isinstance(token, dict) else token for token in value]
            config[name] = [*(config.get(name) or ()), *tokens]
        elif name != "extra_special_tokens" and isinstance(value, dict):
            config[name] = AddedToken(**(value | {"special": True}))
        else:
            config[name] = value
    named = [config.get(name) for name in NAMED]
    special = {str(token) for token in [*named, *(config.get("extra_special_tokens") or ())] if token}
    return {
        i: AddedToken(text, normalized=text not in special, special=text in special)
        for text, i in _read(path / "added_tokens.json").items()
    }


def _is_custom(name: str) -> bool:
    return name.endswith("_token") and name not in NAMED


def _token(value: Any) -> Any:
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{name: option for name, option in value.items() if name != "__type"})
    return value
