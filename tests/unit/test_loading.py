"""Reading checkpoints: every rank its slices, nothing twice, and every problem by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import helix.models.checkpoint as files
from comm.loopback import LoopbackWorld
from helix.hub import missing_files
from helix.layers.specs import Formats, unquantized
from helix.layers.weights import Slice, Weights
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import WeightFormat, fp8_format, read_config
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint, randomize
from kernels.scaled import ScaledMatrix, quantize_fp8
from tests.e2e.checkpoints import PACKINGS, checkpoint, write_fp8, write_packed
from tests.unit.test_files import as_nobody

CONFIG = dict(
    architectures=["LlamaForCausalLM"], vocab_size=37, hidden_size=24, intermediate_size=29, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=4, max_position_embeddings=64, attention_bias=True,
)  # fmt: skip


def decoder(
    layout: HelixLayout,
    rank: int,
    config: dict[str, Any] = CONFIG,
    dtype: torch.dtype = torch.float32,
    formats: Formats = unquantized,
    stored: Checkpoint | None = None,
) -> Decoder:
    spec = spec_from_config(config) if stored is None else stored.as_stored(spec_from_config(config))
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))
    return Decoder(spec, layout, comm, dtype, torch.device("cpu"), formats)


def load(
    path: Path,
    layout: HelixLayout,
    rank: int,
    config: dict[str, Any] = CONFIG,
    dtype: torch.dtype = torch.float32,
    formats: Formats = unquantized,
) -> Decoder:
    """A rank's model, checked and read."""
    opened = Checkpoint(path)
    model = decoder(layout, rank, config, dtype, formats, opened)
    opened.check(model.weights.slices, model.spec.unused)
    numbers = [p for p in model.weights.parameters if p.is_floating_point() and p.itemsize > 1]
    for parameter in numbers:
        parameter.fill_(torch.nan)
    progress: list[int] = []
    opened.load(model.weights, progress.append)
    assert progress == list(range(1, len(model.weights.slices) + 1))
    assert not any(p.isnan().any() for p in numbers), "a parameter was left unread"
    return model


def part(whole: torch.Tensor, s: Slice) -> torch.Tensor:
    return whole[tuple(slice(r.start, r.stop, r.step) for r in s.ranges)]


def tensors(config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """A whole checkpoint in which every element is a number of its own."""
    found, begin = {}, 0
    for s in decoder(HelixLayout.create(), 0, config).weights.slices:
        size = torch.Size(s.shape).numel()
        found[s.name] = torch.arange(begin, begin + size, dtype=torch.float32).view(s.shape)
        begin += size
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def shard(directory: Path, parts: int) -> None:
    """Cuts model.safetensors into files with an index."""
    whole = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(whole)
    weight_map = {name: f"model-{i % parts}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: whole[n] for n in names if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("kvp, tpa", [(1, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("files", [1, 3])
def test_the_ranks_together_hold_every_element(directory: Path, kvp: int, tpa: int, files: int) -> None:
    if files > 1:
        shard(directory, files)
    layout = HelixLayout.create("helix", kvp, tpa)
    whole = tensors()
    copies = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in whole.items()}
    for rank in range(layout.world_size):
        for s in load(directory, layout, rank).weights.slices:
            assert torch.equal(s.target, part(whole[s.name], s)), s.name
            part(copies[s.name], s).add_(1)
    for name, count in copies.items():
        on_all = "norm" in name
        in_group = any(projection in name for projection in ("q_proj", "k_proj", "v_proj"))
        assert (count == (layout.world_size if on_all else kvp if in_group else 1)).all(), name


@pytest.mark.parametrize("named", [False, True])
def test_one_file_beside_an_index_that_does_not_name_it_is_what_is_read(directory: Path, named: bool) -> None:
    whole = load_file(directory / "model.safetensors")
    shard(directory, 2)
    if named:
        (directory / "model-0.safetensors").rename(directory / "model.safetensors")
        index = directory / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-0.safetensors", "model.safetensors"))
    else:
        save_file({name: tensor + 1 for name, tensor in whole.items()}, directory / "model.safetensors")
    expected = whole["model.norm.weight"] + (not named)
    assert torch.equal(load(directory, HelixLayout.create(), 0).norm.pre_norm.weight, expected)
    assert missing_files(directory) == []


class Noted:
    """A file, or a tensor in it, whose reads are noted: the tensor's name and the number of elements."""

    def __init__(self, inner: Any, read: list[tuple[str, int]], name: str = "") -> None:
        self.inner, self.read, self.name = inner, read, name

    def __getattr__(self, key: str) -> Any:
        return getattr(self.inner, key)

    def __enter__(self) -> Noted:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.inner.__exit__(*error)

    def get_slice(self, name: str) -> Noted:
        return Noted(self.inner.get_slice(name), self.read, name)

    def __getitem__(self, index: Any) -> Any:
        tensor = self.inner[index]
        self.read.append((self.name, tensor.numel()))
        return tensor


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is fetched from files."""
    found: list[tuple[str, int]] = []
    real = files.safe_open
    monkeypatch.setattr(files, "safe_open", lambda *args, **kwargs: Noted(real(*args, **kwargs), found))
    return found


def test_only_slices_are_read(directory: Path, read: list[tuple[str, int]]) -> None:
    """No whole tensor is fetched where a part of it is wanted."""
    model = load(directory, HelixLayout.create("helix", 2, 2), 3)
    assert sum(n for _, n in read) == sum(p.numel() for p in model.weights.parameters)


def test_only_scales_of_a_share_are_read(tmp_path: Path, read: list[tuple[str, int]]) -> None:
    write_fp8(checkpoint("qwen3"), tmp_path, blocks(16, 16), (16, 16))
    model = load(tmp_path, HelixLayout.create("helix", 2, 2), 3, read_config(tmp_path))
    found = dict(read)
    assert sum(n for name, n in read if not name.endswith("_scale_inv")) == sum(
        p.numel() for p in model.weights.parameters
    )
    assert found["model.layers.0.self_attn.q_proj.weight_scale_inv"] == 6 * 5  # half of 192 rows, 72 columns
    assert found["model.layers.0.self_attn.o_proj.weight_scale_inv"] == 5 * 3  # 48 columns
    assert found["model.layers.1.mlp.up_proj.weight_scale_inv"] == 3 * 5  # rows 73 to 96


def test_a_packed_checkpoint_lacks_what_it_lacks(tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint("gpt-oss-mxfp4"), tmp_path / "packed")
    whole = load_file(copy / "model.safetensors")
    del whole["model.layers.1.mlp.experts.down_proj_scales"]
    del whole["model.layers.0.self_attn.sinks"]
    save_file(whole, copy / "model.safetensors")
    message = problem(copy, read_config(copy))
    assert "2 missing: model.layers.0.self_attn.sinks, model.layers.1.mlp.experts.down_proj_scales" in message
    # Without its key in the config it is an ordinary checkpoint, whose tensors have other names.
    unquantized = {k: v for k, v in read_config(copy).items() if k != "quantization_config"}
    assert "gate_up_proj_blocks" in problem(copy, unquantized)


def blocks(*size: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(size)}


def groups(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy} | more
    section = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return section | {"config_groups": {"group_0": {"weights": weights}}}


ROWS, ALL = (1, None), (None, None)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FBGEMM = {"quant_method": "fbgemm_fp8"}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """A section without a method, as ModelOpt writes it."""
    return {"quant_algo": algorithm, "producer": {"name": "modelopt"}, "ignore": ["lm_head"]} | more


MODELOPT_MIXED = modelopt(
    "MIXED_PRECISION",
    quantized_layers={
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8_PB_WO"},
    },
)


def blocks_in_mlp(name: str) -> Any:
    return (128, 128) if ".mlp." in name else ALL


# Blocks of modules. k_proj has 96 rows: its scales fit blocks of 32 rows, too.
MIXED: dict[str, Any] = {"q_proj": (32, 16), "k_proj": (40, 16), "v_proj": ROWS, "o_proj": (1, 24), "down_proj": None}


def mixed(name: str) -> Any:
    return MIXED.get(name.split(".")[-2], ALL)


def rows_but_down(name: str) -> Any:
    return None if "down_proj" in name else ROWS


def mixed_groups() -> dict[str, Any]:
    """A group for each block: targets are a pattern, a name, and a class."""
    section = groups("tensor", targets=["Linear"]) | {
        "format": "mixed-precision",
        "ignore": ["re:.*down_proj", "lm_head"],
    }
    strategies: dict[str, Any] = {
        "q_proj": dict(strategy="block", block_structure=[32, 16]),
        "k_proj": dict(strategy="block", block_structure=[40, 16]),
        "v_proj": dict(strategy="channel"),
        "o_proj": dict(strategy="group", group_size=24),
    }
    for name, weights in strategies.items():
        targets = [f"re:.*self_attn.{name}$"]
        if name == "k_proj":
            targets = [f"model.language_model.layers.{layer}.self_attn.k_proj" for layer in range(2)]
        found = {"format": "float-quantized", "targets": targets, "weights": {"num_bits": 8, "type": "float"} | weights}
        section["config_groups"][name] = found
    return section | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}


# Of a family: a section of its config and the blocks of its scales (None: as the checkpoint is), their type; whether
# weights are unpacked, kept as they are, or rounded to fp8.
FORMATS: list[Any] = [
    *((family, None, None, None, "unpacked") for family in ("gpt-oss", "gpt-oss-mxfp4", "mixtral", "qwen3-moe")),
    ("llama-llama3", blocks(16, 16), (16, 16), torch.float32, "unpacked"),
    ("qwen3", blocks(16, 16), (16, 16), torch.float32, "unpacked"),
    ("qwen3-moe", blocks(16, 16), (16, 16), torch.float32, "unpacked"),
    ("deepseek-v3-yarn", blocks(16, 16), (16, 16), torch.float32, "unpacked"),
    ("qwen3", blocks(8, 48), (8, 48), torch.bfloat16, "unpacked"),
    ("deepseek-v3-yarn", blocks(128, 128), (128, 128), torch.float32, "unpacked"),
    ("llama-llama3", blocks(16, 16) | {"scale_fmt": "ue8m0"}, (16, 16), torch.float8_e8m0fnu, "unpacked"),
    ("qwen3-moe", FBGEMM, ROWS, torch.float32, "unpacked"),
    ("qwen3", MODELOPT, ALL, torch.float32, "unpacked"),
    ("deepseek-v3-yarn", groups("tensor"), ALL, torch.float32, "unpacked"),
    ("qwen3-moe", groups("channel"), ROWS, torch.bfloat16, "unpacked"),
    ("llama-llama3", groups("block", block_structure=[16, 16]), (16, 16), torch.float32, "unpacked"),
    ("qwen3", mixed_groups(), mixed, torch.float32, "unpacked"),
    ("qwen3-moe", groups("group", group_size=16), (1, 16), torch.bfloat16, "unpacked"),
    ("qwen3", FBGEMM | {"modules_to_not_convert": ["down_proj"]}, rows_but_down, torch.float32, "unpacked"),
    ("qwen3", modelopt("FP8_PER_CHANNEL_PER_TOKEN"), ROWS, torch.float32, "unpacked"),
    ("wide-llama", modelopt("FP8_PER_CHANNEL_PER_TOKEN"), ROWS, torch.float32, "kept"),
    ("wide-llama", MODELOPT_MIXED, blocks_in_mlp, torch.float32, "kept"),
    ("wide-llama", modelopt("FP8_PB_WO"), (128, 128), torch.float32, "kept"),
    ("wide-qwen3-moe", groups("group", group_size=128), (1, 128), torch.float32, "kept"),
    ("wide-llama", blocks(128, 128), (128, 128), torch.float32, "kept"),
    ("wide-llama", groups("channel"), ROWS, torch.float32, "kept"),
    ("wide-llama", MODELOPT, ALL, torch.float32, "kept"),
    ("wide-qwen3-moe", blocks(64, 128), (64, 128), torch.float32, "kept"),
    ("wide-deepseek-v3", blocks(128, 128), (128, 128), torch.float32, "kept"),
    ("wide-step-moe", blocks(128, 128), (128, 128), torch.float32, "kept"),
    ("wide-step-moe", blocks(64, 128), (64, 128), torch.bfloat16, "unpacked"),
    ("packed-gpt-oss-mxfp4", None, None, None, "kept"),
    ("wide-llama", "int4 of 32", None, None, "kept"),  # on the rank with the last columns, no whole block, unpacked
    ("qwen3", "int4 of 32", None, None, "unpacked"),  # 72 and 97 columns: words and groups that are not full
    ("qwen3", "int4 with zeros", None, None, "unpacked"),
    ("qwen3", "int4 of rows", None, None, "unpacked"),
    *(("packed-llama", packing, None, None, held) for packing in PACKINGS for held in ("unpacked", "kept")),
    *(
        (family, packing, None, None, "kept")
        for family in ("packed-qwen3-moe", "packed-qwen3.5-moe", "packed-deepseek-v3")
        for packing in ("int4 with zeros", "gptq", "awq", "nvfp4", "nvfp4 divided")
    ),
    ("wide-qwen3-moe", None, None, None, "rounded"),
    ("wide-step-moe", None, None, None, "rounded"),
]
GRIDS = ("helix", 1, 1, 1), ("helix", 3, 2, 1), ("helix", 4, 2, 2), ("helix", 4, 2, 8), ("medha", 2, 2, 2)


@pytest.mark.parametrize("family, section, block, scaled_in, held", FORMATS)
def test_every_slice_is_that_of_the_unpacked_whole(
    tmp_path: Path, family: str, section: dict[str, Any] | str | None, block: Any, scaled_in: torch.dtype, held: str
) -> None:
    """Bit for bit, on every rank: blocks that are cut, ragged last blocks, stacked and interleaved parameters.

    Rounding is in the blocks of the whole matrix, so that every layout has the same numbers.
    """
    path = checkpoint(family) if section is None else tmp_path
    if section is None:
        whole = load_file(checkpoint(family.removesuffix("-mxfp4")) / "model.safetensors")
        whole |= {name: whole[name].mT for name in Checkpoint(path).quantized}  # of gpt-oss
    elif isinstance(section, str):
        whole = write_packed(checkpoint(family), tmp_path, section, decades=True)
    else:
        whole = write_fp8(checkpoint(family), tmp_path, section, block, scaled_in=scaled_in, decades=True)
    formats = {"unpacked": unquantized, "kept": Checkpoint(path).matrix_format, "rounded": fp8_format}[held]
    widest, cuts = 1 if "deepseek" in family else 2, set()
    for mode, kvp, tpa, ep in GRIDS if "moe" in family or "gpt" in family else GRIDS[:3]:
        layout = HelixLayout.create(mode, kvp, min(tpa, widest), ep=ep)
        dtype = torch.bfloat16 if ep == 2 and held == "unpacked" else torch.float32
        for rank in range(layout.world_size):
            weights, read = load(path, layout, rank, read_config(path), dtype, formats).weights, 0
            for s in weights.slices:
                tensor, target = whole[s.name], s.target
                if isinstance(target, ScaledMatrix):
                    cuts.add((s.name.split(".")[-2], target.begin, target.shape))
                    if held == "rounded":
                        matrices = [
                            quantize_fp8(m).dequantize() for m in (tensor if tensor.dim() == 3 else tensor[None])
                        ]
                        tensor = torch.stack(matrices) if tensor.dim() == 3 else matrices[0]
                    target = target.dequantize()
                assert torch.equal(target, part(tensor, s).to(target.dtype) + s.offset), s.name
                read += target.numel() * target.itemsize
            assert held == "unpacked" or "gpt" in family or weights.bytes < 0.6 * read
            assert held != "kept" or not family.startswith("packed") or not weights.unpacked
    if held != "unpacked":
        assert len(cuts) > 3 and (block != (128, 128) or any(begin for _, begin, _ in cuts)), cuts
    if held == "rounded":  # routers, embedding and head stay as they are
        assert {name for name, *_ in cuts} == {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}


def test_a_format_may_stand_beside_the_config(tmp_path: Path) -> None:
    """ModelOpt writes it so."""
    whole = write_fp8(checkpoint("wide-llama"), tmp_path, MODELOPT, ALL)
    config = read_config(tmp_path)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "F8_E4M3" in problem(tmp_path, config)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    for s in load(tmp_path, HelixLayout.create(), 0, read_config(tmp_path)).weights.slices:
        assert torch.equal(s.target, whole[s.name])
    # The config's own section comes first, also the one of a text part.
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4_AWQ"}}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": MODELOPT}}))
    assert Checkpoint(tmp_path).format == WeightFormat("modelopt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="modelopt with quant_algo='NVFP4_AWQ'"):
        Checkpoint(tmp_path)


def test_fp8_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    write_fp8(checkpoint("qwen3"), tmp_path, blocks(16, 16), (16, 16))
    config = read_config(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    good = stored[f"{name}_scale_inv"]  # 192 x 72

    def problem_with(**tensors: torch.Tensor | None) -> str:
        changed = {name + key: value for key, value in tensors.items()}
        save_file({k: v for k, v in (stored | changed).items() if v is not None}, tmp_path / "model.safetensors")
        return problem(tmp_path, config)

    assert f"1 missing: {name}_scale_inv" in problem_with(_scale_inv=None)
    misshaped = f"1 misshaped: {name}_scale_inv [12, 4] for [192, 72] in blocks of [16, 16]"
    assert misshaped in problem_with(_scale_inv=good[:, :4].contiguous())
    assert "U8, expected BF16 or F16 or F32 or F64 or F8_E8M0" in problem_with(_scale_inv=good.byte())
    assert f"1 unexpected: {name}_scale_2" in problem_with(_scale_2=good.clone())
    bad = good.clone()
    bad[-1, -1] = torch.nan
    save_file(stored | {f"{name}_scale_inv": bad}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} has scales that are NaN or infinite"):
        load(tmp_path, HelixLayout.create(), 0, config)


def test_groups_of_different_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    section = mixed_groups()
    write_fp8(checkpoint("qwen3"), tmp_path, section, mixed)
    config, stored = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    save_file(stored | {name: stored[name][:, :6].contiguous()}, tmp_path / "model.safetensors")
    assert f"1 misshaped: {name} [72, 6] for [72, 192] in blocks of [1, 24]" in problem(tmp_path, config)
    save_file(stored, tmp_path / "model.safetensors")
    del section["config_groups"]["k_proj"]["targets"]  # then either block fits k_proj
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    message = problem(tmp_path, config)
    assert (
        "2 misshaped: model.layers.0.self_attn.k_proj.weight_scale [3, 5] for [96, 72] in rows or as a whole or"
        in message
    )
    assert "blocks of [32, 16] or blocks of [40, 16]" in message


def test_an_adapter_next_to_whole_weights_is_reported(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen3"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert Checkpoint(tmp_path).skipped == ["the adapter of adapter_config.json: merge it into the weights to apply it"]


@pytest.mark.parametrize("quantized", [False, True])
def test_scales_of_a_kv_cache_are_ignored(tmp_path: Path, quantized: bool) -> None:
    plain = checkpoint("qwen3")
    whole = write_fp8(plain, tmp_path, groups("channel"), ROWS) if quantized else load_file(plain / "model.safetensors")
    if not quantized:
        shutil.copy(plain / "config.json", tmp_path)
    stored = load_file((tmp_path if quantized else plain) / "model.safetensors")
    assert Checkpoint(tmp_path if quantized else plain).skipped == []
    names = ["kv_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "prob_output_scale", "k_proj.k_scale"]
    names += ["v_proj.v_scale", "k_proj.output_scale"]
    scales = {f"model.layers.{layer}.self_attn.{name}": torch.ones(()) for layer in range(2) for name in names}
    save_file(stored | scales, tmp_path / "model.safetensors")
    assert [what.partition(":")[0] for what in Checkpoint(tmp_path).skipped] == ["the KV scales"]
    layout = HelixLayout.create("helix", 2)
    for rank in range(2):
        for s in load(tmp_path, layout, rank, read_config(tmp_path)).weights.slices:
            assert torch.equal(s.target, part(whole[s.name], s)), s.name
    save_file(stored | {"model.layers.0.self_attn.z_scale": torch.ones(())}, tmp_path / "model.safetensors")
    assert "1 unexpected: model.layers.0.self_attn.z_scale" in problem(tmp_path, read_config(tmp_path))


def problem(directory: Path, config: dict[str, Any] = CONFIG) -> str:
    model = decoder(HelixLayout.create(), 0, config)
    with pytest.raises(ValueError) as caught:
        Checkpoint(directory).check(model.weights.slices)
    return str(caught.value)


def test_missing_unexpected_and_misshaped_are_named_together(directory: Path) -> None:
    whole = tensors()
    del whole["model.norm.weight"]
    whole["model.extra.weight"] = torch.zeros(3)
    whole["lm_head.weight"] = torch.zeros(36, 24)
    save_file(whole, directory / "model.safetensors")
    message = problem(directory)
    assert "1 missing: model.norm.weight" in message and "1 unexpected: model.extra.weight" in message
    assert "1 misshaped: lm_head.weight [36, 24], expected [37, 24]" in message and str(directory) in message
    save_file({"a": torch.zeros(1)}, directory / "model.safetensors")
    assert "more" in problem(directory) and len(problem(directory)) < 1500, "long lists are cut"


def test_leftovers_are_no_problem(directory: Path) -> None:
    save_file(
        tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, directory / "model.safetensors"
    )
    load(directory, HelixLayout.create(), 0)


def test_a_head_of_its_own_is_kept_whatever_the_config_says(directory: Path) -> None:
    tied = spec_from_config(CONFIG | {"tie_word_embeddings": True})
    assert tied.tied and not Checkpoint(directory).as_stored(tied).tied
    whole = tensors()
    del whole["lm_head.weight"]
    save_file(whole, directory / "model.safetensors")
    assert Checkpoint(directory).as_stored(tied).tied
    assert not Checkpoint(directory).as_stored(spec_from_config(CONFIG)).tied


@pytest.mark.parametrize("dtype, name", [(torch.int16, "I16"), (torch.uint16, "U16"), (torch.int8, "I8")])
def test_weights_that_are_no_numbers_as_they_stand_are_refused(directory: Path, dtype: Any, name: str) -> None:
    whole = tensors()
    whole["model.norm.weight"] = whole["model.norm.weight"].to(dtype)
    save_file(whole, directory / "model.safetensors")
    assert f"1 of another type: model.norm.weight {name}, expected BF16 or F16 or F32 or F64" in problem(directory)


def test_a_shard_without_permission_is_named(directory: Path) -> None:
    (directory / "model.safetensors").chmod(0)
    with as_nobody(directory):
        assert "model.safetensors cannot be read: Permission denied" in problem(directory)


def reassign(directory: Path, entries: dict[str, str]) -> None:
    """Changes entries of an index."""
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": content["weight_map"] | entries}))


@pytest.mark.parametrize("of", ["a shard", "a file before", "a file behind"])
def test_the_index_says_which_copy_of_a_tensor_is_read(directory: Path, of: str) -> None:
    """A stale copy may lie in any other shard, before or behind the one that the index names."""
    whole, stale = tensors(), {"model.norm.weight": torch.full((24,), -1.0)}
    shard(directory, 2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    there = index["model.norm.weight"]
    other = {"a shard": "model-1.safetensors", "a file before": "a.safetensors", "a file behind": "z.safetensors"}[of]
    assert there == "model-0.safetensors"
    if of == "a shard":  # the file sorted last has the stale copy
        save_file(load_file(directory / other) | stale, directory / other)
    else:  # an overlay, which the index names, over a shard that has the old one
        save_file(load_file(directory / there) | stale, directory / there)
        save_file({"model.norm.weight": whole["model.norm.weight"]}, directory / other)
        reassign(directory, {"model.norm.weight": other})
    model = load(directory, HelixLayout.create(), 0)
    assert torch.equal(model.norm.pre_norm.weight, whole["model.norm.weight"])
    assert torch.equal(Checkpoint(directory).whole("model.norm.weight"), whole["model.norm.weight"])


def test_a_tensor_that_is_there_twice_is_refused(directory: Path) -> None:
    nested = {"model.language_model.norm.weight": torch.ones(24)}
    save_file(tensors() | nested, directory / "model.safetensors")
    message = problem(directory)
    assert (
        "has model.norm.weight twice" in message and "model.language_model.norm.weight in model.safetensors" in message
    )
    save_file(tensors(), directory / "model.safetensors")
    shard(directory, 2)
    for file in ("model-0.safetensors", "model-1.safetensors"):  # the index names neither
        save_file(load_file(directory / file) | {"more": torch.ones(1)}, directory / file)
    assert "has more twice: as more in model-0.safetensors, and as more in model-1.safetensors" in problem(directory)
    reassign(directory, {"more": "model-1.safetensors"})
    assert "1 unexpected: more" in problem(directory)


@pytest.mark.parametrize(
    "tensor, file", [("model.norm.weight", "model-1.safetensors"), ("model.ghost", "model-0.safetensors")]
)
def test_a_tensor_that_lies_elsewhere_than_the_index_says_is_refused(directory: Path, tensor: str, file: str) -> None:
    shard(directory, 2)
    reassign(directory, {tensor: file})
    assert f"names tensors that its files do not hold: {tensor} in {file}" in problem(directory)


@pytest.mark.parametrize("name", ["../x/s", "/x/s", "a/../s", "..", "", "a\0", None, 3, ["s"], {}])
def test_an_index_names_shards_of_its_own_directory(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ValueError, match=r"index\.json has model\.norm\.weight in .*, which is not a path within "):
        Checkpoint(tmp_path)


def test_shards_may_be_links_and_lie_in_folders(directory: Path) -> None:
    """Hugging Face's cache keeps a snapshot as links to blobs above it."""
    shard(directory, 2)
    blobs, snapshot = directory / "blobs", directory / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in list(directory.glob("model*")):
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    load(snapshot, HelixLayout.create(), 0)
    (snapshot / "deep").symlink_to(blobs)
    index = snapshot / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"deep/model-'))
    assert set(Checkpoint(snapshot).files.values()) == {"deep/model-0.safetensors", "deep/model-1.safetensors"}


def test_generation_config_has_the_last_word_on_eos(directory: Path) -> None:
    assert read_config(directory).get("eos_token_id") is None
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert spec_from_config(read_config(directory)).eos == (3, 5)
    (directory / "generation_config.json").write_text("{}")
    assert spec_from_config(read_config(directory) | {"eos_token_id": 7}).eos == (7,)


END = {"eos_token": "</s>"}
DECODER = {"added_tokens_decoder": {"2": {"content": "<s>"}, "4": {"content": "</s>", "special": True}}}
ADDED = {"added_tokens": [{"id": 9, "content": "</s>"}], "model": {"vocab": {"</s>": 8, "a": 1}}}


@pytest.mark.parametrize(
    "stated, tokenizer_config, tokenizer, wanted",
    [
        ({"eos_token_id": 1}, END | DECODER, {}, (1, 4)),  # Qwen2.5's base models, tuned for chats
        ({"eos_token_id": [4, 5]}, END | DECODER, {}, (4, 5)),
        ({"eos_token_id": 1}, {"eos_token": {"content": "</s>"}}, ADDED, (1, 9)),
        ({}, END, {"model": {"vocab": {"</s>": 8}}}, (8,)),
        ({}, END, {"model": {"vocab": [["<unk>", 0.0], ["</s>", -1.5]]}}, (1,)),  # of Unigram
        ({"eos_token_id": 1}, {"eos_token": "<unknown>"}, ADDED, (1,)),
        ({"eos_token_id": 1}, {"eos_token": None}, ADDED, (1,)),
        ({"eos_token_id": 1}, END, {"model": {"vocab": [5, []]}}, (1,)),
    ],
)
def test_the_tokenizers_end_token_is_an_end(
    stated: dict[str, Any], tokenizer_config: dict[str, Any], tokenizer: dict[str, Any], wanted: Any, directory: Path
) -> None:
    (directory / "generation_config.json").write_text(json.dumps(stated))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert spec_from_config(read_config(directory) | {"eos_token_id": 7}).eos == (7,), "it has no tokenizer"
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert spec_from_config(read_config(directory)).eos == wanted


def test_random_weights_are_the_same_where_a_checkpoint_would_be() -> None:
    layout = HelixLayout.create("helix", 2, 2)

    def built(rank: int, seed: int) -> Weights:
        weights = decoder(layout, rank).weights
        for parameter in weights.parameters:
            parameter.fill_(torch.nan)
        randomize(weights, seed)
        assert not any(p.isnan().any() for p in weights.parameters)
        return weights

    def qkv(weights: Weights) -> torch.Tensor:
        return next(s.target for s in weights.slices if s.name.endswith("q_proj.weight"))

    ranks = [built(rank, 0) for rank in range(4)]
    assert torch.equal(qkv(ranks[0]), qkv(ranks[1])) and not torch.equal(qkv(ranks[0]), qkv(ranks[2]))
    assert not torch.equal(qkv(ranks[0]), qkv(built(0, 1)))
    assert abs(qkv(ranks[0]).std().item() - 0.02) < 0.005
    norms = [s.target for s in ranks[0].slices if s.name.endswith("norm.weight")]
    assert norms and all((n == 1).all() for n in norms)
