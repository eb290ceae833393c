"""Tokenizer: its ids and texts are those of transformers, which reads the same files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from helix.tokenizer import load_tokenizer
from launch.inputs.gguf_tokenizer import LLAMA3_WORDS

DEMO = Path(__file__).parents[2] / "assets" / "demo-model"
TEXT = "hello world 1234567 foo(bar) don't stop"
TEXTS = [TEXT, "the quick brown fox 1999 2024 12345", "it 's , a  test . \n\n\tdef f(x):\n    return 'é🙂日本'"]
OPENS, CLOSES, PAD = "<s>", "</s>", "[PAD]"
ADDED = [OPENS, CLOSES, PAD, "<|im_start|>", "<tool>", " spaced ", "▁", "fox", "[UNK]"]


def byte_level() -> tuple[Tokenizer, Any]:
    """A byte-level tokenizer that splits texts as Llama 3's does."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[OPENS, CLOSES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def sentence_piece(model: Any, trainer: type, **options: Any) -> tuple[Tokenizer, Any]:
    """One with a token for each byte, whose words begin with `▁`: Llama 2's and Gemma's."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", OPENS, CLOSES, *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer, trainer(vocab_size=400, special_tokens=tokens, show_progress=False, **options)


def word_piece() -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", OPENS], show_progress=False)


KINDS = ("bytes", "bpe", "unigram", "words")


@cache
def made(kind: str) -> str:
    """Returns the `tokenizer.json` of a kind."""
    tokenizer, trainer = {
        "bytes": byte_level,
        "bpe": lambda: sentence_piece(models.BPE(unk_token="<unk>", byte_fallback=True), trainers.BpeTrainer),
        "unigram": lambda: sentence_piece(models.Unigram(), trainers.UnigramTrainer, unk_token="<unk>"),
        "words": word_piece,
    }[kind]()
    tokenizer.train_from_iterator(TEXTS * 50, trainer)
    return tokenizer.to_str()


def compare(path: Path, *texts: str) -> None:
    """Everything that we read of a directory is what transformers reads."""
    theirs = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    ours = load_tokenizer(path)
    assert ours is not None
    assert ours.special_tokens == theirs.special_tokens_map
    assert {i: repr(t) for i, t in ours.added_tokens.items()} == {
        i: repr(t) for i, t in theirs.added_tokens_decoder.items()
    }
    templates = {} if theirs.chat_template is None else theirs.chat_template
    assert ours.chat_templates == (templates if isinstance(templates, dict) else {"default": templates})
    for text in (*texts, "".join(texts), "".join(ours.special_tokens.values())):
        for special in (False, True):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    for i in range(0, len(theirs) + 3, 7):
        assert ours.id_to_token(i) == theirs.convert_ids_to_tokens(i)
        assert i >= len(theirs) or ours.decode([i]) == theirs.decode([i])


@pytest.mark.parametrize("kind", ["demo", *KINDS])
def test_tokenizers_without_a_config_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    if kind != "demo":
        (tmp_path / "tokenizer.json").write_text(made(kind))
    compare(DEMO if kind == "demo" else tmp_path, *TEXTS)


ANY = st.sampled_from
FLAGS = st.fixed_dictionaries({}, optional={name: st.booleans() for name in ("lstrip", "rstrip", "normalized")})
SINGLE = st.builds(lambda text, flags: {"content": text, **flags}, ANY(ADDED), FLAGS)
TAGGED = SINGLE.map(lambda token: {"__type": "AddedToken", **token})
NAMES = ANY(["bos_token", "eos_token", "unk_token", "pad_token", "image_token"])
TEMPLATES = ANY(
    ["{{ a }}", [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}], {"x": "C"}, ""]
)
CONFIG = st.builds(
    lambda tokens, rest: tokens | rest,
    st.dictionaries(NAMES, ANY(ADDED) | TAGGED | st.none(), max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "added_tokens_decoder": st.dictionaries(ANY(["0", "1", "2", "700", "701"]), SINGLE, max_size=4),
            "additional_special_tokens": st.lists(ANY(ADDED) | TAGGED, max_size=3),
            "extra_special_tokens": st.lists(ANY(ADDED), max_size=3)
            | st.dictionaries(ANY(["audio_token", "x"]), ANY(ADDED)),
            "clean_up_tokenization_spaces": st.booleans(),
            "split_special_tokens": st.booleans(),
            "add_bos_token": st.booleans(),
            "chat_template": TEMPLATES,
        },
    ),
)
OLDER = st.fixed_dictionaries(
    {},
    optional={
        "bos_token": ANY(ADDED) | SINGLE,
        "sep_token": SINGLE,
        "video_token": ANY(ADDED) | SINGLE,
        "additional_special_tokens": st.lists(ANY(ADDED), max_size=2),
        "extra_special_tokens": st.lists(ANY(ADDED) | SINGLE, max_size=2),
    },
)
FILES = st.fixed_dictionaries(
    {"tokenizer_config.json": CONFIG},
    optional={
        "special_tokens_map.json": OLDER,
        "added_tokens.json": st.lists(ANY(ADDED), unique=True, max_size=3).map(
            lambda texts: {text: 600 + i for i, text in enumerate(texts)}
        ),
        "chat_template.jinja": ANY(["{# file #}", ""]),
        "additional_chat_templates/tool_use.jinja": st.just("{# tools #}"),
    },
)
BACKEND = st.tuples(ANY([*KINDS]), *[st.booleans()] * 3)


@settings(max_examples=80, deadline=None)
@given(files=FILES, backend=BACKEND, text=st.lists(ANY([*ADDED, *TEXTS, " ", "\n"]), max_size=6).map("".join))
def test_files_are_merged_as_transformers_merges_them(
    files: dict[str, Any], backend: tuple[str, bool, bool, bool], text: str
) -> None:
    kind, pads, cuts, ends = backend
    tokenizer = Tokenizer.from_str(made(kind))
    if pads:
        tokenizer.enable_padding(length=4, pad_token=PAD)
    if cuts:
        tokenizer.enable_truncation(3)
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {OPENS}", None, [(OPENS, 0)])
    with TemporaryDirectory() as name:
        directory = Path(name)
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "additional_chat_templates").mkdir()
        for file, content in files.items():
            (directory / file).write_text(content if isinstance(content, str) else json.dumps(content))
        try:
            PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        except Exception:
            with pytest.raises(ValueError, match="cannot be read: "):
                load_tokenizer(directory)
            return
        compare(directory, text)


@pytest.mark.parametrize(
    ("model_type", "named", "bos", "begins"),
    [
        ("llama", "LlamaTokenizerFast", None, False),  # DeepSeek-R1-Distill-Llama
        ("qwen3", "LlamaTokenizerFast", False, False),  # DeepSeek-R1-0528-Qwen3-8B
        ("llama", "GPT2Tokenizer", None, False),
        ("deepseek_v3", "LlamaTokenizerFast", True, True),  # DeepSeek-V3, R1 and the distilled models
        ("llama", "PreTrainedTokenizerFast", True, False),
        ("llama", None, None, False),
    ],
)
def test_texts_are_split_as_the_file_says_and_begin_as_the_config_says(
    tmp_path: Path, model_type: str, named: str | None, bos: bool | None, begins: bool
) -> None:
    raw = Tokenizer.from_str(made("bytes"))
    (tmp_path / "tokenizer.json").write_text(made("bytes"))
    config = {"bos_token": OPENS, "eos_token": CLOSES, "add_bos_token": bos, "add_eos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | ({"tokenizer_class": named} if named else {})))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = raw.encode(TEXT).ids
    assert tokenizer.encode(TEXT) == [*[tokenizer.token_to_id(OPENS)] * begins, *ids]
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == TEXT and tokenizer.special_tokens["eos_token"] == CLOSES
