"""Builds tokenizers from GGUF files: byte-level BPE with its pre-tokenizer, special tokens and chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True)
class PreTokenizer:
    """How a pre-tokenizer splits text into words, within which bytes are merged.

    Attributes:
        pattern: regular expression of a word; None: GPT-2's.
        split_digits: first split off each digit as a word.
        nfc: normalize to NFC.
        ignore_merges: a word that is in the vocabulary becomes one token, without merges.
        bos: texts begin with BOS unless the file says otherwise.
    """

    pattern: str | None = None
    split_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


# By `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(split_digits=True),
    "qwen2": PreTokenizer(QWEN2_WORDS, nfc=True),
    "llama-bpe": PreTokenizer(LLAMA3_WORDS, ignore_merges=True, bos=True),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # `tokenizer.ggml.token_type`
TYPES = {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}
NAMES = {name: name for name in ("bos", "eos", "mask", "cls")} | {
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
}
IDS = (*NAMES.values(), "eot", "eom")  # `tokenizer.ggml.*_token_id`
# Types of the keys after `tokenizer.ggml.` that are read, or that do not change the tokens of a text: scores (merges
# decide) and infill tokens (the caller writes them into the prompt).
KEYS: dict[str, type] = {
    "model": str, "pre": str, "tokens": list, "token_type": list, "merges": list, "scores": list,
    "add_bos_token": bool, "add_eos_token": bool,
    **{f"{name}_token_id": int for name in IDS},
    **{f"fim_{name}_token_id": int for name in ("pre", "suf", "mid", "pad", "rep", "sep")},
    **{f"{name}_token_id": int for name in ("prefix", "suffix", "middle")},
}  # fmt: skip


def make_tokenizer(metadata: dict[str, Any]) -> Any:
    """Creates a transformers tokenizer from a file's metadata.

    Raises:
        ValueError: the tokenizer is not supported, or its parts are inconsistent.
    """
    from transformers import PreTrainedTokenizerFast

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, pre = value("model"), value("pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={kind} is not supported; supported: gpt2 (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre={pre} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    pre_tokenizer = PRE_TOKENIZERS[pre]
    for key, element in (("tokens", str), ("token_type", int), ("merges", str)):
        if not value(key) or not all(isinstance(entry, element) for entry in value(key)):
            what = f"is missing, empty or not a list of {element.__name__}: texts would be tokenized differently"
            raise ValueError(f"tokenizer.ggml.{key} {what}; use a file that was converted with it")
    texts, types, merges = value("tokens"), value("token_type"), [tuple(m.split(" ")) for m in value("merges")]
    if len(types) != len(texts):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries, but tokenizer.ggml.tokens {len(texts)}")
    if unknown := set(types) - TYPES:
        raise ValueError(f"tokenizer.ggml.token_type has {min(unknown)}, which is not supported for byte-level BPE")
    vocabulary = {text: i for i, (text, type_) in enumerate(zip(texts, types, strict=True)) if type_ != UNUSED}
    _check(texts, types, merges, vocabulary)
    in_use = {None, *vocabulary.values()}
    for key in IDS:
        if (token := value(f"{key}_token_id")) not in in_use:
            raise ValueError(f"tokenizer.ggml.{key}_token_id={token} is not one of the {len(vocabulary)} tokens in use")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre_tokenizer.ignore_merges))
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre_tokenizer.split_digits else []
    if pre_tokenizer.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre_tokenizer.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=type_ != USER_DEFINED)
            for text, type_ in zip(texts, types, strict=True)
            if type_ in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    special = {}
    for name, key in NAMES.items():
        if (token := value(f"{key}_token_id")) is not None:
            special[f"{name}_token"] = texts[token]
    around = [
        special.get(f"{name}_token") if value(f"add_{name}_token", default) else None
        for name, default in (("bos", pre_tokenizer.bos), ("eos", False))
    ]
    if any(around):
        before, after = around
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*filter(None, [before]), "$A", *filter(None, [after])],
            special_tokens=[(text, vocabulary[text]) for text in dict.fromkeys(filter(None, around))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=_templates(metadata), **special
    )


def _check(texts: list[str], types: list[int], merges: list[tuple[str, ...]], vocabulary: dict[str, int]) -> None:
    if len(vocabulary) != sum(type_ != UNUSED for type_ in types):
        raise ValueError("tokenizer.ggml.tokens has duplicates")
    known = {*pre_tokenizers.ByteLevel.alphabet()}
    for text, type_ in zip(texts, types, strict=True):
        if type_ == NORMAL and not known >= set(text):
            raise ValueError(f"tokenizer.ggml.tokens has {text!r}, which is not byte-level text")
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            text = " ".join(merge)
            raise ValueError(f"tokenizer.ggml.merges has {text!r}, which does not merge two tokens into a token")


def _templates(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    key = "tokenizer.chat_template"
    named = {k.removeprefix(f"{key}."): v for k, v in metadata.items() if k.startswith(f"{key}.")}
    default = {"default": metadata[key]} if key in metadata else {}
    return named | default if named else default.get("default")
