"""GGUF files become checkpoints: weights, config and tokenizer of what was written; what is not known is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import struct
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from launch import convert
from launch.client.chat_tokenizer import byte_decoder, read_defaults
from launch.inputs import conversion
from launch.inputs.compose import compose_config
from launch.inputs.gguf_tokenizer import PRE_TOKENIZERS, make_tokenizer
from launch.inputs.preflight import prepare_run
from tests.bad_inputs.tables import lines
from tests.e2e.checkpoints import DEMO

FIRST = 500  # of a tokenizer's tokens: few are read in little time
COMMON: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=512, vocab_size=520, rms_norm_eps=1e-5, initializer_range=0.1,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama 3.1": lambda: LlamaConfig(**COMMON | dict(max_position_embeddings=16384), rope_parameters=LLAMA3),
    "qwen2": lambda: Qwen2Config(**COMMON, rope_parameters=YARN),
    "qwen3": lambda: Qwen3Config(**COMMON, rope_parameters=dict(rope_type="linear", rope_theta=1e6, factor=2.0)),
    "qwen3moe": lambda: Qwen3MoeConfig(
        **COMMON, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj", **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads", "key_length": "head_dim",
    "head_count_kv": "num_key_value_heads", "layer_norm_rms_eps": "rms_norm_eps",
}  # fmt: skip
TEXTS = [
    "Hello, world! 1234567",
    "  def f(x):\r\n\treturn x\n\n\n",
    "naïve café 🙂👩‍👩‍👧",
    "I'LL we'll ½ ٣٤",
    "e\u0301",
    " ",
]
Change = Callable[[GGUFWriter], None]


@cache
def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases are no ones and zeros
    return model


def vocabulary() -> dict[str, Any]:
    """The demo model's first tokens and merges, tokens of the other types, and rows that nobody uses."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    texts = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)[: FIRST - 2]
    texts += ["12", "123"]  # which those have whose digits are no words of their own
    types = [TokenType.NORMAL if i else TokenType.CONTROL for i in range(len(texts))]
    texts += ["<|im_start|>", "<|im_end|>", "<tool_call>", "[PAD1]"]
    types += [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED]
    merges = [" ".join(merge) for merge in content["model"]["merges"] if "".join(merge) in texts]
    merges += ["1 2", "12 3"]
    return {"tokens": texts, "types": types, "merges": merges}


def write(path: Path, kind: str, pre: str = "smollm", change: Change | None = None, quantized: Any = None) -> Path:
    """A file as llama.cpp's converter writes it: for Llama with the halves of rotated pairs side by side."""
    model = model_of(kind)
    config, architecture = model.config, kind.split()[0]
    writer = GGUFWriter(path, architecture)
    for theirs, ours in KEYS.items():
        getattr(writer, f"add_{theirs}")(getattr(config, ours))
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 512))
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    known = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(known["tokens"])
    writer.add_token_types(known["types"])
    writer.add_token_merges(known["merges"])
    writer.add_bos_token_id(500)
    writer.add_eos_token_id(501)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    for name, values in tensors_of(model, architecture).items():
        if quantized is not None and values.ndim > 1:
            writer.add_tensor(name, gguf.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, values)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    config, state = model.config, {name: t.numpy() for name, t in model.state_dict().items()}
    found = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER.items():
            for kind in ("weight", "bias"):
                values = state.get(f"model.layers.{layer}.{theirs}.{kind}")
                if values is None:
                    continue
                if architecture == "llama" and ours in ("attn_q", "attn_k"):
                    heads = values.shape[0] // config.head_dim
                    values = values.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
                found[f"blk.{layer}.{ours}.{kind}"] = values.copy()
        if architecture == "qwen3moe":
            both = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            gate, up = np.split(both, 2, axis=1)
            down = state[f"model.layers.{layer}.mlp.experts.down_proj"]
            for name, values in (("gate", gate), ("up", up), ("down", down)):
                found[f"blk.{layer}.ffn_{name}_exps.weight"] = values.copy()
    if (rope := config.rope_parameters)["rope_type"] == "llama3":
        found["rope_freqs.weight"] = np.float32([stretched(2 * i, rope, config.head_dim) for i in range(16)])
    return found


def stretched(dimension: int, rope: dict[str, float], head_dim: int) -> float:
    """By how much llama.cpp's converter slows a dimension down."""
    trained, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    turns = trained / (2 * math.pi * rope["rope_theta"] ** (dimension / head_dim))
    if turns < low or turns > high:
        return rope["factor"] if turns < low else 1.0
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def converted(directory: Path, *arguments: str) -> Path:
    convert.main([str(directory / "x.gguf"), str(directory / "out"), *arguments])
    return directory / "out"


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_model_is_the_one_that_was_written(kind: str, tmp_path: Path) -> None:
    """Weights to the bit, logits behind the context that was trained, and a directory that is served."""
    write(tmp_path / "x.gguf", kind)
    out = converted(tmp_path)
    read, model = AutoModelForCausalLM.from_pretrained(out), model_of(kind)
    assert read.dtype == torch.float32
    assert all(torch.equal(t, read.state_dict()[name]) for name, t in model.state_dict().items())
    prompt = torch.arange(1, 401)[None]
    with torch.no_grad():
        assert torch.equal(read(prompt).logits, model(prompt).logits)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [501, 0]
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-5
    config = compose_config([f"model.path={out}", "decode.prompts=assets/prompts.jsonl"])
    assert prepare_run(config).layout.world_size == 1


@pytest.mark.parametrize("kind", ["Q4_1", "F16", "BF16"])
def test_stored_numbers_are_those_that_transformers_reads(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "x.gguf", "llama", quantized=GGMLQuantizationType[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32).state_dict()
    ours = load_file(converted(tmp_path, "dtype=float32") / "model.safetensors")
    assert f"GB in float32, from {kind}" in capsys.readouterr().err
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    shutil.rmtree(tmp_path / "out")
    config = json.loads((converted(tmp_path) / "config.json").read_text())
    assert config["dtype"] == {"F16": "float16"}.get(kind, "bfloat16")


def test_quantized_experts_are_the_nearest_numbers(tmp_path: Path) -> None:
    """transformers reads no such file: it takes the experts' width for that of one checkpoint."""
    write(tmp_path / "x.gguf", "qwen3moe", quantized=GGMLQuantizationType.Q8_0)
    read = AutoModelForCausalLM.from_pretrained(converted(tmp_path, "dtype=float32")).state_dict()
    for name, values in model_of("qwen3moe").state_dict().items():
        step = values.abs().max() / 127  # of the blocks with the largest numbers; their scale is a float16
        assert (read[name] - values).abs().max() <= step * 0.52, name


def test_many_weights_lie_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SHARD_BYTES", 1 << 18)
    write(tmp_path / "x.gguf", "qwen3moe")
    out = converted(tmp_path)
    assert len(list(out.glob("*.safetensors"))) > 2
    read = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(t, read[name]) for name, t in model_of("qwen3moe").state_dict().items())
    assert (
        prepare_run(compose_config([f"model.path={out}", "decode.prompts=assets/prompts.jsonl"])).layout.world_size == 1
    )


def test_sampling_defaults_come_along_and_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """And keys that change no answer are taken."""
    given = dict(temp=0.6, top_k=20, top_p=0.95, min_p=0.1, penalty_repeat=1.1, penalty_last_n=-1, mirostat=0)
    keys = {f"general.sampling.{key}": value for key, value in given.items()} | {
        "general.source.url": "x", "general.tags": ["x"], "mradermacher.quantized_by": "x", "split.count": 0,
        "quantize.imatrix.file": "x", "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.fim_pre_token_id": 1,
        "general.sampling.mirostat_tau": 5.0, "tokenizer.ggml.scores": [0.5],
    }  # fmt: skip
    write(tmp_path / "x.gguf", "llama", change=lambda writer: [add(k, v)(writer) for k, v in keys.items()])
    write(tmp_path / "y.gguf", "llama", change=add("llama.rope.scaling.factor", 4.0))
    out = converted(tmp_path)
    wanted = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1)
    assert read_defaults(str(out)) == wanted
    assert json.loads((out / "generation_config.json").read_text())["do_sample"] is True
    convert.main([str(tmp_path / "x.gguf"), str(tmp_path / "mine"), "temperature=0.2", "top_p=0.9"])
    assert read_defaults(str(tmp_path / "mine")) == wanted | dict(temperature=0.2, top_p=0.9)
    convert.main([str(tmp_path / "y.gguf"), str(tmp_path / "linear")])
    rope = json.loads((tmp_path / "linear" / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


# ---- the tokenizer


def metadata(pre: str, /, **more: Any) -> dict[str, Any]:
    known = vocabulary()
    given = {"model": "gpt2", "pre": pre, "tokens": known["tokens"], "token_type": [int(t) for t in known["types"]]}
    given |= {"merges": known["merges"], "bos_token_id": 500, "eos_token_id": 501} | more
    return {f"tokenizer.ggml.{key}": value for key, value in given.items()}


# Words as llama.cpp splits them, for a reference of few lines.
WORDS = {
    "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"],
    "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
CHARACTERS = {byte: character for character, byte in byte_decoder().items()}


def words(pre: str, text: str) -> list[str]:
    parts = [text]
    for pattern in WORDS[pre]:  # what a pattern does not match is a word too
        parts = [w for part in parts for w in regex.split(f"({pattern})", part) if w]
    return parts


def merged(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    pieces = [CHARACTERS[byte] for byte in word.encode()]
    while len(pieces) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(pieces)))
        if rank == len(ranks):
            break
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    return pieces


@cache
def tokenizer_of(pre: str) -> tuple[Any, dict[str, int], dict[tuple[str, str], int]]:
    known = metadata(pre)
    vocab = {text: i for i, text in enumerate(known["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split()): i for i, merge in enumerate(known["tokenizer.ggml.merges"])}
    return make_tokenizer(known), vocab, ranks  # type: ignore[return-value]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_texts_become_the_tokens_of_the_reference(pre: str) -> None:
    @given(st.one_of(st.text(), st.text("aZé '\n\r\t 19½,.!🙂\u3000", max_size=40), st.sampled_from(TEXTS)))
    def check(text: str) -> None:
        tokenizer, vocab, ranks = tokenizer_of(pre)
        text_of_words = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        wanted: list[int] = []
        for word in words(pre, text_of_words):
            whole = "".join(CHARACTERS[byte] for byte in word.encode())
            pieces = [whole] if PRE_TOKENIZERS[pre].ignore_merges and whole in vocab else merged(word, ranks)
            wanted += [vocab[piece] for piece in pieces]
        assert tokenizer.encode(text, add_special_tokens=False) == wanted
        assert tokenizer.decode(wanted) == text_of_words

    check()


def test_bytes_of_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    """Every byte, and any run of them, be it UTF-8 or not, in texts and in grammars.

    Only 0xff, which no UTF-8 has, is nothing to llguidance: it marks special tokens with it.
    """
    make_tokenizer(metadata("smollm")).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    vocab = tokenizer.get_vocab()
    guided = LLTokenizer((tmp_path / "tokenizer.json").read_text(), n_vocab=520, eos_token=501)

    @given(st.binary(max_size=20))
    @example(bytes(range(256)))
    def check(content: bytes) -> None:
        ids = [vocab[CHARACTERS[byte]] for byte in content]
        assert guided.decode_bytes(ids) == content.replace(b"\xff", b"")
        assert tokenizer.decode(ids) == content.decode("utf-8", "replace")

    check()
    for text in TEXTS:
        assert guided.decode_bytes(tokenizer.encode(text, add_special_tokens=False)) == text.encode()


def test_special_tokens_are_tokens_and_others_are_text() -> None:
    tokenizer = make_tokenizer(metadata("smollm", unknown_token_id=0, padding_token_id=501))
    known = vocabulary()["tokens"]
    special = f"{known[0]}<|im_start|>user<|im_end|><tool_call>"
    ids = tokenizer.encode(special, add_special_tokens=False)
    assert [ids[0], ids[1], *ids[-2:]] == [0, 500, 501, 502]
    assert tokenizer.decode(ids) == special
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user<tool_call>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>", known[0]
    )  # fmt: skip
    assert 503 not in tokenizer.encode("[PAD1]") and len(tokenizer) == 503, "a row that nobody uses is no token"


@pytest.mark.parametrize(
    "pre, more, begins, ends",
    [
        ("smollm", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_what_stands_around_a_text(pre: str, more: dict[str, bool], begins: bool, ends: bool) -> None:
    inner = make_tokenizer(metadata(pre)).encode("a text", add_special_tokens=False)
    assert make_tokenizer(metadata(pre, **more)).encode("a text") == [*[500] * begins, *inner, *[501] * ends]


def test_chat_templates_come_along(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", "llama")
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nHello<|im_end|>\n"
    more = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    assert make_tokenizer(metadata("smollm") | more).chat_template == {"default": "A", "tool_use": "B"}
    del more["tokenizer.chat_template"]
    assert make_tokenizer(metadata("smollm") | more).chat_template == {"tool_use": "B"}


# ---- what is refused


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        convert.main(list(arguments))
    error = str(ended.value.code)
    assert error.startswith("error: ") and "\n" not in error and "Traceback" not in capsys.readouterr().err
    return error


def add(key: str, value: Any) -> Change:
    kinds = {str: "string", int: "int32", float: "float32", bool: "bool", list: "array"}
    return lambda writer: getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def tensor(name: str) -> Change:
    return lambda writer: writer.add_tensor(name, np.ones(96, np.float32))


def linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


@pytest.mark.parametrize("given, words", lines("gguf.txt"))
def test_keys_that_would_be_left_out_are_refused(
    given: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, *keys = given
    ((key, value),) = json.loads(" ".join(keys)).items()
    refuse(kind, add(key, value), words, tmp_path, capsys)


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("llama", tensor("rope_freqs.weight"), "the factors in rope_freqs.weight do not match Llama 3.1's"),
        ("llama 3.1", linear, "rope.scaling.type=linear together with rope_freqs.weight is not supported"),
        ("llama", tensor("blk.0.attn_sinks.weight"), "the tensor blk.0.attn_sinks.weight is not supported"),
        ("llama", tensor("blk.0.attn_output.bias"), "LlamaForCausalLM: model.layers.0.self_attn.o_proj.bias is [96]"),
        ("llama", tensor("blk.2.attn_norm.weight"), "layers.2.input_layernorm.weight is [96] and should be absent"),
    ],
)
def test_tensors_that_would_be_left_out_are_refused(
    kind: str, change: Change, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(kind, change, words, tmp_path, capsys)


def refuse(kind: str, change: Change, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "x.gguf", kind, change=change)
    error = refused(capsys, str(file), str(tmp_path / "out"))
    assert words in error and str(file) in error, error
    assert [f.name for f in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize("given, words", lines("gguf_tokenizers.txt"))
def test_tokenizers_that_are_not_known_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        make_tokenizer(metadata("smollm", **json.loads(" ".join(given))))
    assert words in str(refusal.value)


def damaged(content: bytes) -> dict[str, tuple[bytes, str]]:
    """A file's content with mistakes, and what is said of each."""
    moved, name = bytearray(content), b"output_norm.weight"  # then dimensions, one dimension, type and offset
    struct.pack_into("<Q", moved, content.index(name) + len(name) + 4 + 8 + 4, 0)
    cuts = {f"cut at {size}": (content[:size], "is truncated or damaged") for size in (6, 40, 20_000, -1000)}
    return cuts | {
        "text": (b"GGU, but not quite", "is not a GGUF file: it does not begin with GGUF"),
        "long": (content + bytes(100), "is damaged: 100 bytes follow its last tensor"),
        "moved": (bytes(moved), "is damaged: output_norm.weight is at byte"),
    }


def test_files_and_directories_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out, bad = write(tmp_path / "x.gguf", "llama"), str(tmp_path / "out"), tmp_path / "bad.gguf"
    for name, (content, words) in damaged(file.read_bytes()).items():
        bad.write_bytes(content)
        assert f"bad.gguf {words}" in refused(capsys, str(bad), out), name
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    architectures = "has the architecture mamba, which is not supported; supported: llama, qwen2, qwen3, qwen3moe"
    for arguments, words in (
        ((tmp_path / "no-such.gguf", out), "no-such.gguf cannot be read: No such file"),
        ((tmp_path, out), "it is a directory"),
        ((tmp_path / "other.gguf", out), architectures),
        ((file, tmp_path / "full"), "exists and is not an empty directory"),
        ((file, file), "exists and is not an empty directory"),
        ((file, file / "out"), "cannot be written: File exists"),
        ((file, tmp_path / ("x" * 300)), "cannot be written: File name too long"),
        ((file,), "expected FILE.gguf DIR"),
        ((file, "top_k=5"), "top_k=5: expected FILE.gguf DIR"),
        ((file, out, "dtype=int8"), "dtype=int8 must be one of auto, float32"),
        ((file, out, "dtyp=float32"), "dtyp is unknown"),
        ((file, out, "temperature=-1"), "x.gguf: sampling defaults: temperature=-1.0: Input should be greater"),
        ((file, out, "min_p=nan"), "min_p=nan"),
    ):
        assert words in refused(capsys, *map(str, arguments))
    assert not Path(out).exists()


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_an_empty_directory_is_filled(umask: int, mode: int, tmp_path: Path) -> None:
    """It stays the directory that it was: others may have mounted it, linked to it or be in it."""
    write(tmp_path / "x.gguf", "llama")
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    before, others = (tmp_path / "real").stat().st_ino, os.umask(umask)
    try:
        out = converted(tmp_path)
    finally:
        os.umask(others)
    assert (tmp_path / "real").stat().st_ino == before and out.is_symlink()
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {mode}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file.name for file in out.iterdir()}


ENDED = """
import os, runpy, signal, sys
sys.argv[0] = "-m"
from launch.inputs import conversion
conversion.save_file = lambda *_: os.kill(os.getpid(), signal.{})
runpy.run_module("launch.convert", run_name="__main__")
"""


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signals_leave_nothing_behind(name: str, code: int, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", "llama")
    ended = subprocess.run([sys.executable, "-c", ENDED.format(name), tmp_path / "x.gguf", tmp_path / "out"])
    assert ended.returncode == code and [file.name for file in tmp_path.iterdir()] == ["x.gguf"]


def test_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = str(write(tmp_path / "x.gguf", "llama")), str(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10**6))  # type: ignore[attr-defined]
        assert "out needs 0.07 GB, but only 0.00 GB is free on its disk" in refused(capsys, file, out)

    def full(*arguments: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(conversion, "save_file", full)
    assert "out cannot be written: Error while serializing: I/O error: No space left" in refused(capsys, file, out)
    assert [f.name for f in tmp_path.iterdir()] == ["x.gguf"], "nothing is left behind"


@pytest.mark.parametrize(
    "value, words",
    [
        (1e6, "has values beyond torch.float16: set dtype=bfloat16"),
        (math.inf, "has NaN or infinite values: the file is damaged"),
        (math.nan, "has NaN or infinite values: the file is damaged"),
    ],
)
def test_numbers_that_cannot_be_stored(
    value: float, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.tensors[0]["output_norm.weight"].tensor[0] = value

    file = write(tmp_path / "x.gguf", "llama", change=change)
    error = refused(capsys, str(file), str(tmp_path / "out"), "dtype=float16")
    assert "output_norm.weight" in error and words in error


@pytest.mark.parametrize("quantized", [None, GGMLQuantizationType.Q8_0])
def test_the_other_byte_order_is_refused(
    quantized: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(globals(), "GGUFWriter", partial(GGUFWriter, endianess=gguf.GGUFEndian.BIG))
    file = write(tmp_path / "x.gguf", "llama", quantized=quantized)
    error = refused(capsys, str(file), str(tmp_path / "out"))
    assert f"is in big-endian byte order: convert it first with `gguf-convert-endian {file} little`" in error


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "x.gguf", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'gguf>=0.17'" in refused(capsys, str(file), str(tmp_path / "out"))
