"""Tiny random checkpoints of every family, written by transformers, and transformers' output for them."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from helix.models import FAMILIES as KNOWN
from tests.e2e.parity import Continuation
from tests.e2e.step3p5 import Step3p5ForCausalLM
from tests.exit_cleanup import folder

# Transformers would use these packages if installed, but they need a GPU.
sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment]

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "assets" / "demo-model"
FIRST_TOKENS = 6

TINY: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
FAMILIES = TINY["dense"]

ALL: dict[str, Any] = {
    "vocab_size": 257,
    "num_hidden_layers": 2,
    "intermediate_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.12,  # wide enough that logits are distinct
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}
# For models that have the key.
SIZES: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "sliding_window": 24,
    "num_nextn_predict_layers": 0,
    "moe_intermediate_size": 26,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "linear_key_head_dim": 8,
}
ROPE: dict[str, Any] = {"rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}


def scaled(name: str) -> dict[str, Any]:
    """Returns the config of a conf/model file scaled down: SIZES, ALL and a short RoPE."""
    published = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())["config"]
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    rope = {"rope_type": rope.get("rope_type", rope.get("type", "default")), "rope_theta": 0} | rope
    left = "quantization_config", "dtype", "layer_types", "rope_scaling", "rope_theta", "rotary_dim"
    config = {key: value for key, value in published.items() if key not in left}
    config |= {key: value for key, value in SIZES.items() if config.get(key) is not None} | ALL
    if "kv_lora_rank" in config:  # so that an error in the norms of latents shows
        config["rms_norm_eps"] = 1e-2
    return config | {"rope_parameters": {key: ROPE.get(key, value) for key, value in rope.items() if key != "type"}}


MXFP4 = "-mxfp4"  # suffix of a checkpoint with the same weights, packed


@functools.cache
def checkpoint(family: str) -> Path:
    """Returns the directory of a family's random checkpoint (or the demo model), shared by the test session."""
    if family == "demo":
        return DEMO
    directory = folder(f"helix-{family}-")
    if family.endswith(MXFP4):
        pack(checkpoint(family.removesuffix(MXFP4)), directory)
        return directory
    return write_random(config_of(family), directory, family.endswith("gpt-oss"))


def write_random(config: Any, directory: Path, in_mxfp4: bool = False) -> Path:
    """Writes a random model and returns its directory; with `in_mxfp4` its experts have values that MXFP4 can hold."""
    torch.manual_seed(7)
    model = class_of(config)._from_config(config)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            # transformers initializes them to 0 and 1, which would hide errors
            if name.endswith(("bias", "norm.weight", "sinks", "conv1d.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if in_mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
                parameter.copy_(convert_moe_packed_tensors(*to_mxfp4(parameter.mT), dtype=torch.float32))
    model.save_pretrained(directory)
    return directory


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds [E, out, in] to MXFP4: blocks [E, out, in / 32, 16] and scales [E, out, in / 32], uint8."""
    groups = weight.unflatten(-1, (-1, 32))
    # Scale a block's largest value into [4, 8); the format's maximum is 6.
    exponents = groups.abs().amax(-1).clamp(min=2.0**-40).log2().floor() - 2
    scaled = torch.ldexp(groups, -exponents[..., None])
    nearest = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return nearest[..., ::2] | nearest[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def pack(plain: Path, directory: Path) -> None:
    """Writes the gpt-oss checkpoint in `plain`, whose experts have MXFP4 values, in packed form."""
    weights = load_file(plain / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = weights.pop(name)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = to_mxfp4(weight.mT)
        again = convert_moe_packed_tensors(weights[f"{name}_blocks"], weights[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(again, weight), "packing is exact"
    save_file(weights, directory / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Expands block scales to the shape of the values."""
    rows = scales.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


ScaleBlock = tuple[int | None, int | None]

# FP8 checkpoints leave routers and the gates of states unquantized.
IN_FULL = ("gate.weight", "weights_proj.weight", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")


def write_fp8(
    plain: Path,
    directory: Path,
    section: dict[str, Any],
    block: ScaleBlock | Callable[[str], ScaleBlock | None],
    *,
    scaled_in: torch.dtype = torch.float32,
    decades: bool = False,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint whose layer matrices, except IN_FULL, are e4m3; returns all tensors' values in fp32.

    Stacks of Step-3.5's experts have stacks of scales.

    Args:
        block: rows and columns per scale, or those of a tensor by its name; None: all, or of a tensor: unquantized.
        decades: use random scales from 1e-6 to 1e2 instead of fitting ones.
    """
    generator = torch.Generator().manual_seed(3)
    stored, whole = {}, load_file(plain / "model.safetensors")
    for name, weight in list(whole.items()):
        stored[name] = weight
        stacked = weight.dim() == 3 and ".moe." in name
        if not (weight.dim() == 2 or stacked) or "layers" not in name or name.endswith(IN_FULL):
            continue
        found = block(name) if callable(block) else block
        if found is None:
            continue
        size = found[0] or weight.shape[-2], found[1] or weight.shape[-1]
        parts = [
            [[p.abs().max() / 448 for p in rows.split(size[1], 1)] for rows in matrix.split(size[0])]
            for matrix in (weight if stacked else weight[None])
        ]
        scales = torch.tensor(parts).log2().ceil().exp2()  # powers of two: exact in every scale dtype
        scales = scales if stacked else scales[0]
        stored[name] = (weight / spread(scales, size, weight.shape)).to(torch.float8_e4m3fn)
        if decades:
            scales = 10 ** (torch.rand(scales.shape, generator=generator) * 8 - 6)
        scales = scales.to(scaled_in)
        whole[name] = stored[name].float() * spread(scales.float(), size, weight.shape)
        fine, algorithm = section.get("quant_method") == "fp8", section.get("quant_algo")
        scales = scales.reshape(()) if found == (None, None) else scales
        scales = scales[:, 0] if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else scales
        scales = scales[:, None, :, None] if algorithm == "FP8_PB_WO" else scales
        stored[f"{name}{'_scale_inv' if fine else '_scale'}"] = scales.contiguous()
        if not fine or section.get("activation_scheme") == "static":
            input_scale_name = "activation_scale" if fine else "input_scale"
            stored[f"{name.removesuffix('.weight')}.{input_scale_name}"] = torch.ones(())
    save_file(stored, directory / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return whole


@dataclass(frozen=True)
class Coded:
    """A matrix [N, K] in few bits: 4-bit codes or e4m3, scales [N, G], zero points [N, G] and a scale of all."""

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    second: torch.Tensor | None = None

    def values(self, kind: str) -> torch.Tensor:
        """The numbers, from each format's formula, in fp32."""
        columns = torch.arange(self.codes.shape[1]) // self.group
        if kind == "e4m3":
            values = self.codes.float()
        elif kind == "e2m1":
            values = torch.tensor(FP4_VALUES)[self.codes.int()]
        else:
            values = self.codes.float() - (8 if self.zeros is None else self.zeros[:, columns].float())
        scales = self.scales
        if scales.dtype == torch.uint8:
            scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        values = values * scales.float()[:, columns]
        return values if self.second is None else values * self.second


def words(values: torch.Tensor, dim: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Packs eight codes along a dimension into each int32; code order[i] of them is at bits 4 i."""
    padded = F.pad(values.movedim(dim, -1), (0, -values.shape[dim] % 8)).unflatten(-1, (-1, 8)).long()
    packed = sum(padded[..., place] << 4 * i for i, place in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def _of_compressed_tensors(m: Coded) -> dict[str, torch.Tensor]:
    zeros = {} if m.zeros is None else {"weight_zero_point": words(m.zeros, 0)}
    shape = torch.tensor(m.codes.shape)
    return {"weight_packed": words(m.codes, 1), "weight_scale": m.scales, "weight_shape": shape} | zeros


def _of_gptq(m: Coded, minus: int = 1) -> dict[str, torch.Tensor]:
    zeros = torch.full(m.scales.shape, 8, dtype=torch.uint8) if m.zeros is None else m.zeros
    return {
        "qweight": words(m.codes.T, 0),
        "scales": m.scales.T.contiguous(),
        "qzeros": words((zeros - minus & 15).T, 1),
        "g_idx": (torch.arange(m.codes.shape[1]) // m.group).int(),
    }


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _of_awq(m: Coded) -> dict[str, torch.Tensor]:
    assert m.zeros is not None
    scales = m.scales.T.contiguous()
    return {"qweight": words(m.codes.T, 1, AWQ_ORDER), "scales": scales, "qzeros": words(m.zeros.T, 1, AWQ_ORDER)}


def _of_nvfp4(m: Coded) -> dict[str, torch.Tensor]:
    assert m.second is not None
    numbers = {"weight": _bytes(m.codes), "weight_scale": m.scales, "weight_scale_2": m.second.reshape(())}
    return numbers | {"input_scale": torch.ones(())}


def _of_nvfp4_divided(m: Coded) -> dict[str, torch.Tensor]:
    assert m.second is not None
    inverse = (1 / m.second).reshape(1)
    assert torch.equal(1 / inverse, m.second.reshape(1)), "a power of two"
    numbers = {"weight_packed": _bytes(m.codes), "weight_scale": m.scales, "weight_global_scale": inverse}
    return numbers | {"input_global_scale": torch.ones(1)}


@dataclass(frozen=True)
class Packing:
    """A published format of matrices in few bits."""

    section: dict[str, Any]
    store: Callable[[Coded], dict[str, torch.Tensor]]
    kind: str = "int4"
    group: int | None = 32  # None: a scale for each row
    zeros: bool = False
    scales: torch.dtype = torch.bfloat16
    multiples: tuple[int, int] = (1, 1)  # of rows and columns

    def fits(self, weight: torch.Tensor) -> bool:
        return not any(n % m for n, m in zip(weight.shape, self.multiples, strict=True))


def _in_groups(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group"} | weights}
    ignore = ["lm_head", "re:.*gate$", "re:.*in_proj_[ab]$"]
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ignore, "config_groups": {"group_0": group}}


def _gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "desc_act": False, "lm_head": False} | more


PACKED = "pack-quantized"
PACKINGS = {
    "int4 of 32": Packing(_in_groups(PACKED, group_size=32, symmetric=True), _of_compressed_tensors),
    "int4 of 128": Packing(_in_groups(PACKED, group_size=128), _of_compressed_tensors, group=128),
    "int4 of rows": Packing(_in_groups(PACKED, strategy="channel"), _of_compressed_tensors, group=None),
    "int4 with zeros": Packing(
        _in_groups(PACKED, group_size=32, symmetric=False), _of_compressed_tensors, zeros=True, scales=torch.float16
    ),
    "gptq": Packing(_gptq(group_size=128, sym=True), _of_gptq, group=128, scales=torch.float16, multiples=(1, 8)),
    "gptq of rows": Packing(_gptq(group_size=-1, sym=True, desc_act=True), _of_gptq, group=None, multiples=(1, 8)),
    "gptq with zeros": Packing(
        _gptq(group_size=32, sym=False), _of_gptq, zeros=True, scales=torch.float16, multiples=(1, 8)
    ),
    "gptq v2": Packing(
        _gptq(group_size=64, sym=False, checkpoint_format="gptq_v2"),
        partial(_of_gptq, minus=0), group=64, zeros=True, multiples=(1, 8),
    ),
    "awq": Packing(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        _of_awq, group=64, zeros=True, scales=torch.float16, multiples=(8, 1),
    ),
    "nvfp4": Packing(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        _of_nvfp4, "e2m1", 16, scales=torch.float8_e4m3fn, multiples=(1, 2),
    ),
    "nvfp4 divided": Packing(
        _in_groups("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        _of_nvfp4_divided, "e2m1", 16, scales=torch.float8_e4m3fn, multiples=(1, 2),
    ),
    "mxfp4 packed": Packing(
        _in_groups("mxfp4-pack-quantized", type="float", group_size=32, scale_dtype="torch.uint8"),
        lambda m: {"weight_packed": _bytes(m.codes), "weight_scale": m.scales},
        "e2m1", scales=torch.uint8, multiples=(1, 2),
    ),
    "mxfp4 of quark": Packing(
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        lambda m: {"weight": _bytes(m.codes), "weight_scale": m.scales}, "e2m1", scales=torch.uint8, multiples=(1, 2),
    ),
    "mxfp8": Packing(
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        lambda m: {"weight": m.codes, "weight_scale": m.scales}, "e4m3", scales=torch.uint8,
    ),
}  # fmt: skip


def random_codes(shape: Sequence[int], packing: Packing, generator: torch.Generator) -> Coded:
    """All codes, with scales over decades: subnormal, negative and zero ones where they may be."""
    rows, columns = shape
    group = packing.group or columns
    grid = rows, -(-columns // group)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    if packing.kind == "e4m3":
        codes = (torch.randn(shape, generator=generator) * 64).to(torch.float8_e4m3fn)
    zeros = torch.randint(0, 16, grid, dtype=torch.uint8, generator=generator) if packing.zeros else None
    if packing.scales == torch.uint8:
        return Coded(codes, torch.randint(100, 140, grid, dtype=torch.uint8, generator=generator), group, zeros)
    if packing.scales == torch.float8_e4m3fn:
        bits = torch.randint(0, 256, grid, dtype=torch.uint8, generator=generator)
        bits[bits & 127 == 127] = 1  # not NaN, but the smallest subnormal
        exponent = torch.randint(-12, 3, (), generator=generator)
        return Coded(codes, bits.view(torch.float8_e4m3fn), group, None, torch.ldexp(torch.ones(()), exponent))
    scales = 10 ** (torch.rand(grid, generator=generator) * 5 - 4)
    return Coded(codes, scales.to(packing.scales), group, zeros)


def rounded_codes(weight: torch.Tensor, packing: Packing) -> Coded:
    """The nearest codes."""
    group = packing.group or weight.shape[1]
    groups = F.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    zeros, second, most = None, None, groups.abs().amax(-1).clamp(min=2.0**-40)
    if packing.kind == "int4":
        scales = most / 7
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if packing.zeros else None
        if zeros is not None:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scales = (high - low).clamp(min=2.0**-40) / 15
            zeros = (-low / scales).round().to(torch.uint8)
        scales = scales.to(packing.scales)
        base = 8 if zeros is None else zeros[..., None].float()
        codes = ((groups / scales.float()[..., None]).round() + base).clamp(0, 15).to(torch.uint8)
    elif packing.kind == "e4m3":
        exponents = (most / 448).log2().ceil()
        scales = (exponents + 127).to(torch.uint8)
        codes = torch.ldexp(groups, -exponents[..., None]).to(torch.float8_e4m3fn)
    else:
        if packing.scales == torch.uint8:
            exponents = most.log2().floor() - 2
            scales, factors = (exponents + 127).to(torch.uint8), exponents.exp2()
        else:
            second = (most.max() / (6 * 448)).log2().ceil().exp2()
            scales = (most / 6 / second).to(torch.float8_e4m3fn)
            factors = (scales.float() * second).clamp(min=2.0**-40)
        nearest = (groups / factors[..., None])[..., None] - torch.tensor(FP4_VALUES)
        codes = nearest.abs().argmin(-1).to(torch.uint8)
    return Coded(codes.flatten(1)[:, : weight.shape[1]].contiguous(), scales, group, zeros, second)


def write_packed(
    plain: Path,
    directory: Path,
    packing: str | Callable[[str], str | None],
    *,
    decades: bool = False,
    section: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint whose layer matrices, except IN_FULL, are in few bits; returns all tensors' values in fp32.

    Matrices whose sizes the packing does not have stay in full. Stacks of experts are stored apart, and are among the
    values in both forms.

    Args:
        packing: one of PACKINGS, or that of a tensor by its name; None: unquantized.
        decades: random numbers, with scales over decades, instead of fitting ones.
        section: of the config; None: the packing's.
    """
    generator = torch.Generator().manual_seed(3)
    stored, whole = {}, load_file(plain / "model.safetensors")

    def write(name: str, weight: torch.Tensor) -> torch.Tensor:
        chosen = packing(name) if callable(packing) else packing
        in_layer = "layers" in name and not name.endswith(IN_FULL)
        if chosen is None or weight.dim() != 2 or not (in_layer or callable(packing)):
            stored[name] = weight
            return weight
        how = PACKINGS[chosen]
        if not how.fits(weight):
            stored[name] = weight
            return weight
        made = random_codes(weight.shape, how, generator) if decades else rounded_codes(weight, how)
        module = name.removesuffix(".weight")
        stored.update({f"{module}.{suffix}": tensor for suffix, tensor in how.store(made).items()})
        return made.values(how.kind)

    for name, weight in list(whole.items()):
        if name.endswith("experts.gate_up_proj"):
            parts = {"gate_proj": weight.chunk(2, 1)[0], "up_proj": weight.chunk(2, 1)[1]}
        elif name.endswith("experts.down_proj"):
            parts = {"down_proj": weight}
        else:
            whole[name] = write(name, weight)
            continue
        block = name.rpartition(".")[0]
        for part, matrices in parts.items():
            for e, matrix in enumerate(matrices):
                whole[f"{block}.{e}.{part}.weight"] = write(f"{block}.{e}.{part}.weight", matrix.contiguous())
        each = [torch.stack([whole[f"{block}.{e}.{part}.weight"] for e in range(len(weight))]) for part in parts]
        whole[name] = torch.cat(each, 1)
    save_file(stored, directory / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    section = section or PACKINGS[packing if isinstance(packing, str) else "nvfp4"].section
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return whole


def config_of(family: str) -> Any:
    """Returns transformers' config of a tiny model, or of the demo model."""
    if family == "demo":
        return AutoConfig.from_pretrained(DEMO)
    own = dict(next(models[name] for models in TINY.values() if (name := family.removesuffix(MXFP4)) in models))
    content = (scaled(own.pop("of")) if "of" in own else ALL) | own
    (architecture,) = content.pop("architectures")
    return CONFIG_MAPPING[KNOWN[architecture][0]](**json.loads(json.dumps(content)))


def class_of(config: Any) -> Any:
    """Returns transformers' class of a text model; AutoModelForCausalLM does not know all of them."""
    return class_named(next(name for name, (kind, _) in KNOWN.items() if kind == config.model_type))


def class_named(name: str) -> Any:
    """Returns transformers' class of an architecture, or ours where it has none."""
    return Step3p5ForCausalLM if name == Step3p5ForCausalLM.__name__ else getattr(transformers, name)


@functools.cache
def oracle(family: str, lengths: tuple[int, ...], new_tokens: int) -> list[Continuation]:
    """Returns transformers' continuations of a family's unpacked checkpoint."""
    return continuations(checkpoint(family.removesuffix(MXFP4)), lengths, new_tokens)


def earliest_topk(x: torch.Tensor, k: int, dim: int) -> Any:
    """Replaces `Tensor.topk` in indexers, with ties to the earlier token: scores of tiny models are often 0."""
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :k], indices[..., :k]))  # type: ignore[call-arg]


def continuations(directory: Path, lengths: tuple[int, ...], new_tokens: int) -> list[Continuation]:
    """Returns greedy continuations of random prompts by transformers, fp32, eager attention, ignoring EOS.

    Args:
        lengths: of the prompts; the first one gets only FIRST_TOKENS new tokens.
    """
    model = (
        class_of(AutoConfig.from_pretrained(directory))
        .from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        .eval()
    )
    generator = torch.Generator().manual_seed(11)
    found = []
    for number, length in enumerate(lengths):
        prompt = torch.randint(1, model.config.vocab_size, (1, length), generator=generator)
        with patch.object(torch.Tensor, "topk", earliest_topk):
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
