"""Matrices in few bits: every format's codes, cuts and scales, and the mistakes that other readers have made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helix.layers.specs import MXFP4, NVFP4, MatrixFormat, unquantized
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.models import loading, spec_from_config
from helix.models.checkpoint import WeightFormat, read_config
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint, randomize, weights_of
from helix.models.quantized_tensors import MXFP8
from kernels.scaled import ScaledMatrix, matrix_rows
from launch.job.report import describe_weights
from tests.e2e.checkpoints import PACKINGS, Coded, checkpoint, random_codes, words, write_packed
from tests.e2e.fuzz_checks import layer_ahead
from tests.unit.test_loading import load, part, problem

N, K = 24, 192


def write(directory: Path, packing: str, coded: Coded, section: dict[str, Any] | None = None, **more: Any) -> None:
    """Writes a checkpoint of one matrix, x.weight; `more` replaces its tensors, None leaves one out."""
    directory.mkdir(exist_ok=True)
    how = PACKINGS[packing]
    tensors = {f"x.{suffix}": tensor for suffix, tensor in (how.store(coded) | more).items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors")
    section = how.section if section is None else section
    (directory / "config.json").write_text(json.dumps({"quantization_config": section} if section else {}))


def read(
    directory: Path,
    shape: tuple[int, int],
    rows: range | None = None,
    columns: range | None = None,
    *,
    keep: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Returns a part of x.weight, as it is held."""
    opened, (rows, columns) = Checkpoint(directory), (rows or range(shape[0]), columns or range(shape[1]))
    weights = Weights(dtype, torch.device("cpu"), opened.matrix_format if keep else unquantized)
    target = weights.matrix(len(rows), len(columns), names=["x.weight"], columns=columns, total=shape[1])
    weights.bind(target, "x.weight", shape, rows, columns)
    opened.check(weights.slices)
    opened.load(weights)
    return target


def random(packing: str, shape: tuple[int, int] = (N, K), seed: int = 0) -> Coded:
    return random_codes(shape, PACKINGS[packing], torch.Generator().manual_seed(seed))


FOUR_BITS = [name for name, packing in PACKINGS.items() if packing.kind != "e4m3"]


@pytest.mark.parametrize("packing", FOUR_BITS)
def test_all_codes_in_all_places(packing: str, tmp_path: Path) -> None:
    """Also 15 in the last place, which sets a word's sign."""
    coded = random(packing, (16, 256))
    coded = replace(coded, codes=(torch.arange(16)[:, None] + torch.arange(256) // 8).to(torch.uint8) % 16)
    assert len({(int(code), place) for r in coded.codes for place, code in enumerate(r[:128])}) > 16 * 8
    write(tmp_path, packing, coded)
    wanted = coded.values(PACKINGS[packing].kind)
    assert torch.equal(read(tmp_path, (16, 256)), wanted)
    kept = read(tmp_path, (16, 256), keep=True)
    assert isinstance(kept, ScaledMatrix) and torch.equal(kept.dequantize(), wanted)


@pytest.mark.parametrize("packing", PACKINGS)
def test_any_cut(packing: str, tmp_path: Path) -> None:
    """Inside bytes, words and groups, of rows (words of zero points have eight) and of columns."""
    coded = random(packing)
    write(tmp_path, packing, coded)
    wanted = coded.values(PACKINGS[packing].kind)
    for begin in (0, 1, 2, 8, 15, 24, 31, 33, 130):
        for rows in (range(N), range(3, 21), range(9, 10), range(1, N, 2)):
            for columns in (range(begin, K), range(begin, begin + 7)):
                found = read(tmp_path, (N, K), rows, columns)
                assert torch.equal(found, wanted[rows.start : rows.stop : rows.step, columns.start : columns.stop])


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_are_decoded_in_parts(packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory is bounded; the parts begin inside words of zero points."""
    coded, sizes, decode = random(packing), set(), loading.decode
    write(tmp_path, packing, coded)
    monkeypatch.setattr(loading, "CHUNK", 5 * K)
    monkeypatch.setattr(loading, "decode", lambda x, *more: sizes.add(len(x)) or decode(x, *more))
    wanted = coded.values(PACKINGS[packing].kind)[1:]
    assert torch.equal(read(tmp_path, (N, K), range(1, N)), wanted) and sizes == {5, 3}
    assert torch.equal(read(tmp_path, (N, K), range(1, N), keep=True).dequantize(), wanted)


def test_zeros_of_rows_that_do_not_fill_words(tmp_path: Path) -> None:
    for n in (1, 7, 9, 20):
        coded = random("int4 with zeros", (n, 57))  # nor do columns
        write(tmp_path, "int4 with zeros", coded)
        assert torch.equal(read(tmp_path, (n, 57), range(n // 2, n), range(5, 57)), coded.values("int4")[n // 2 :, 5:])


def test_tensors_decide_groups_whatever_the_config_says(tmp_path: Path) -> None:
    coded = random("int4 of 32")
    write(tmp_path, "int4 of 32", coded, PACKINGS["int4 of 128"].section)
    assert torch.equal(read(tmp_path, (N, K)), coded.values("int4"))
    assert read(tmp_path, (N, K), keep=True).group == 32


def test_a_group_that_does_not_divide_the_shard(tmp_path: Path) -> None:
    coded = random("int4 of 128", (N, 384))
    write(tmp_path, "int4 of 128", coded)
    for begin, groups in ((0, 2), (96, 3), (192, 2), (160, 2)):  # 1.5 groups a rank, and begins inside one
        kept = read(tmp_path, (N, 384), None, range(begin, begin + 192), keep=True)
        assert (kept.begin, kept.group, kept.scales.shape[0]) == (begin % 128, 128, groups)
        assert torch.equal(kept.dequantize(), coded.values("int4")[:, begin : begin + 192])


def test_zero_points_of_gptq_v2_are_not_those_of_v1(tmp_path: Path) -> None:
    coded = random("gptq with zeros")
    write(tmp_path / "1", "gptq with zeros", coded)
    words_of = {v: PACKINGS[v].store(coded)["qzeros"] for v in ("gptq with zeros", "gptq v2")}
    section = PACKINGS["gptq with zeros"].section
    v2 = section | {"checkpoint_format": "gptq_v2"}
    write(tmp_path / "2", "gptq with zeros", coded, v2, qzeros=words_of["gptq v2"])
    wanted = coded.values("int4")
    assert all(torch.equal(read(tmp_path / v, (N, K)), wanted) for v in "12")
    write(tmp_path / "2", "gptq with zeros", coded, section, qzeros=words_of["gptq v2"])
    assert not torch.equal(read(tmp_path / "2", (N, K)), wanted)


def test_zero_points_of_gptq_v2_by_the_newer_name_of_its_key(tmp_path: Path) -> None:
    """`format`, as in GPTQConfig of transformers 5; the older name counts where both are there."""
    coded, section = random("gptq v2"), PACKINGS["gptq v2"].section
    left = {key: value for key, value in section.items() if key != "checkpoint_format"}
    for i, spelled in enumerate((left | {"format": "gptq_v2"}, section | {"format": "gptq"})):
        write(tmp_path / str(i), "gptq v2", coded, spelled)
        assert torch.equal(read(tmp_path / str(i), (N, K)), coded.values("int4"))
    for method, named in (("gptq", "marlin"), ("awq", "gemv")):
        with pytest.raises(ValueError, match=rf"{method} with format='{named}', in quantization_config"):
            WeightFormat.from_config({"quant_method": method, "bits": 4, "group_size": 64, "format": named})


@pytest.mark.parametrize("whole, some", [(True, False), (False, True)])
def test_modules_of_gptq_may_override_whether_there_are_zero_points(whole: bool, some: bool, tmp_path: Path) -> None:
    for packing in ("gptq", "gptq with zeros"):
        coded = random(packing)
        section = PACKINGS[packing].section | {"sym": whole, "dynamic": {"+:x": {"sym": some}, "-:y": {}}}
        write(tmp_path, packing, coded, section)
        assert torch.equal(read(tmp_path, (N, K)), coded.values("int4"))
        assert torch.equal(read(tmp_path, (N, K), keep=True).dequantize(), coded.values("int4"))


def test_a_zero_point_that_wraps(tmp_path: Path) -> None:
    """0 is stored as 15, and one more would carry into the next place of a word."""
    coded = replace(random("gptq with zeros"), zeros=torch.zeros(N, K // 32, dtype=torch.uint8))
    assert (PACKINGS["gptq with zeros"].store(coded)["qzeros"] == -1).all()
    write(tmp_path, "gptq with zeros", coded)
    assert torch.equal(read(tmp_path, (N, K)), coded.values("int4"))


def test_symmetric_gptq_ignores_zero_points(tmp_path: Path) -> None:
    coded = random("gptq")
    for qzeros in (torch.zeros(2, 3, dtype=torch.int32), None):
        write(tmp_path, "gptq", coded, qzeros=qzeros)
        assert torch.equal(read(tmp_path, (N, K)), coded.values("int4"))
        assert read(tmp_path, (N, K), keep=True).zeros is None


@pytest.mark.parametrize("packing, name", [("gptq", "g_idx"), ("int4 of 32", "weight_g_idx")])
def test_columns_in_another_order_are_refused(packing: str, name: str, tmp_path: Path) -> None:
    coded = random(packing)
    order = (torch.arange(K) // coded.group).int()
    section = PACKINGS[packing].section | ({"desc_act": True} if packing == "gptq" else {})
    write(tmp_path, packing, coded, section, **{name: order})  # it may be declared, and be in order
    assert torch.equal(read(tmp_path, (N, K)), coded.values("int4"))
    write(tmp_path, packing, coded, **{name: order.flip(0).contiguous()})
    with pytest.raises(ValueError, match=rf"x\.{name} assigns columns to groups out of order \(desc_act"):
        read(tmp_path, (N, K), None, range(8))
    if packing == "gptq":
        write(tmp_path, packing, coded, section, g_idx=None)
        with pytest.raises(ValueError, match=r"1 missing: x\.g_idx"):
            read(tmp_path, (N, K))


def test_parts_of_a_stack_may_have_other_second_scales(tmp_path: Path) -> None:
    """gate and up."""
    parts = {name: random("nvfp4", seed=seed) for seed, name in enumerate(("gate", "up"))}
    assert parts["gate"].second != parts["up"].second
    stored = {f"{n}.{s}": t for n, m in parts.items() for s, t in PACKINGS["nvfp4"].store(m).items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": PACKINGS["nvfp4"].section}))
    opened = Checkpoint(tmp_path)
    weights = Weights(torch.bfloat16, torch.device("cpu"), opened.matrix_format)
    both = weights.matrix(2 * N, K, names=["gate.weight", "up.weight"])
    assert isinstance(both, ScaledMatrix)
    for i, name in enumerate(parts):
        weights.bind(matrix_rows(both, i * N, (i + 1) * N), f"{name}.weight", (N, K))
    opened.load(weights)
    assert torch.equal(both.dequantize(), torch.cat([m.values("e2m1") for m in parts.values()]))


@pytest.mark.parametrize("packing", ["nvfp4", "nvfp4 divided"])
def test_every_scale_of_nvfp4(packing: str, tmp_path: Path) -> None:
    """Subnormal, negative and zero ones, with every code."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = scales[scales.float().isfinite()][:, None].expand(-1, 2).contiguous()
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 2)
    coded = Coded(codes, scales, 16, None, torch.tensor(2.0**-9))
    write(tmp_path, packing, coded)
    for keep in (False, True):
        found = read(tmp_path, (len(scales), 32), keep=keep)
        assert torch.equal(found.dequantize() if keep else found, coded.values("e2m1"))


def test_a_second_scale_of_any_size_divides_once(tmp_path: Path) -> None:
    coded, scale = random("nvfp4"), torch.tensor([2688 / 0.37])
    write(tmp_path, "nvfp4 divided", replace(coded, second=torch.tensor(1.0)), weight_global_scale=scale)
    write(tmp_path / "multiplied", "nvfp4", coded, weight_scale_2=(1 / scale).reshape(()))
    one, two = (read(path, (N, K)) for path in (tmp_path, tmp_path / "multiplied"))
    assert torch.equal(one, two) and torch.equal(read(tmp_path, (N, K), keep=True).dequantize(), one)


def test_weights_that_alone_are_rotated_are_read(tmp_path: Path) -> None:
    """Quark's R1 and R2, whose rotations cancel between matrices."""
    coded, rotation = random("mxfp4 of quark"), {"name": "rotation", "r1": True, "r2": True, "r4": False}
    write(tmp_path, "mxfp4 of quark", coded, PACKINGS["mxfp4 of quark"].section | {"algo_config": [rotation]})
    assert torch.equal(read(tmp_path, (N, K)), coded.values("e2m1"))


DAMAGED: list[Any] = [
    ("nvfp4", "weight_scale", lambda t: t.view(torch.uint8).fill_(127).view(t.dtype)),
    ("nvfp4", "weight_scale_2", lambda t: t * torch.nan),
    ("nvfp4 divided", "weight_global_scale", torch.zeros_like),
    ("mxfp4 packed", "weight_scale", lambda t: t.fill_(255)),
    ("mxfp8", "weight_scale", lambda t: t.fill_(255)),
    ("awq", "scales", lambda t: t * torch.inf),
]


@pytest.mark.parametrize("packing, name, damage", DAMAGED)
def test_scales_that_are_no_numbers_are_refused(packing: str, name: str, damage: Any, tmp_path: Path) -> None:
    coded = random(packing)
    write(tmp_path, packing, coded, **{name: damage(PACKINGS[packing].store(coded)[name])})
    with pytest.raises(ValueError, match=r"x\.weight has scales that are NaN or infinite"):
        read(tmp_path, (N, K))


def test_a_scale_that_packed_weights_cannot_hold_is_refused(tmp_path: Path) -> None:
    coded = random("mxfp4 packed")
    for exponent in (192, 193):
        scales = PACKINGS["mxfp4 packed"].store(coded)["weight_scale"].fill_(exponent)
        write(tmp_path, "mxfp4 packed", coded, weight_scale=scales)
        assert read(tmp_path, (N, K)).abs().max() > 2.0 ** (exponent - 127), "unpacked"
        if exponent == 192:
            read(tmp_path, (N, K), keep=True)
        else:
            with pytest.raises(ValueError, match=r"x\.weight has a scale above 2\^65"):
                read(tmp_path, (N, K), keep=True)


CODED = random("int4 of 32")
STORED = PACKINGS["int4 of 32"].store(CODED)
SOME_ZEROS: dict[str, Any] = {  # of x and not of others
    **PACKINGS["int4 of 32"].section,
    "config_groups": {
        name: {**PACKINGS[packing].section["config_groups"]["group_0"], "targets": [f"re:{name}.*"]}
        for name, packing in (("x", "int4 with zeros"), ("y", "int4 of 32"))
    },
}
MISFITS: list[Any] = [
    ("int4 of 32", {"weight_packed": words(CODED.codes, 1).repeat(1, 2)}, r"x.weight_packed \[24, 48\] has 8 bits"),
    ("int4 of 32", {"weight_packed": words(CODED.codes, 1)[:, :18].contiguous()}, "has 3 bits for each of"),
    ("gptq", {"qweight": words(CODED.codes.T, 0).repeat(2, 1)}, r"x.qweight \[48, 24\] has 8 bits"),
    ("int4 of 32", {"weight_shape": torch.tensor([K, N])}, r"x.weight_shape is \[192, 24\], but .* \[24, 192\]"),
    ("int4 of 32", {"weight_scale": None}, "1 missing: x.weight_scale"),
    ("int4 of 32", {"weight_scale": STORED["weight_scale"][:, :5].contiguous()}, r"x.weight_scale \[24, 5\] for \[24"),
    (
        "int4 of 32",
        {"weight_scale": STORED["weight_scale"][:8].contiguous()},
        r"x.weight_scale \[8, 6\], expected \[24",
    ),
    ("int4 with zeros", {"weight_zero_point": None}, "1 missing: x.weight_zero_point"),
    ("int4 with zeros", {"weight_zero_point": None, "section": SOME_ZEROS}, "1 missing: x.weight_zero_point"),
    (
        "int4 with zeros",
        {"weight_zero_point": torch.zeros(2, 6, dtype=torch.int32)},
        r"x.weight_zero_point \[2, 6\], exp",
    ),
    ("awq", {"qzeros": None}, "1 missing: x.qzeros"),
    ("gptq with zeros", {"qzeros": None}, "1 missing: x.qzeros"),
    ("nvfp4", {"weight_scale_2": None}, "1 missing: x.weight_scale_2"),
    ("nvfp4", {"weight_scale": None}, "1 missing: x.weight_scale"),
    ("nvfp4", {"weight_scale_2": torch.ones(N)}, r"x.weight_scale_2 \[24\], expected \[\]"),
    ("nvfp4", {"pre_quant_scale": torch.ones(K)}, "1 unexpected: x.pre_quant_scale"),
    ("nvfp4 divided", {"weight_global_scale": None}, "1 missing: x.weight_global_scale"),
    ("mxfp4 packed", {"weight_scale": None}, "1 missing: x.weight_scale"),
    ("mxfp4 of quark", {"weight_scale": None}, "1 missing: x.weight_scale"),
    ("mxfp4 of quark", {"weight": torch.zeros(N, K // 32 * 17, dtype=torch.uint8)}, r"x.weight \[24, 102\], expected"),
]


@pytest.mark.parametrize("packing, more, message", MISFITS)
def test_what_does_not_fit_is_refused_by_name(packing: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, packing, random(packing), **more)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, (N, K))


def test_symmetric_groups_need_no_zero_points_next_to_asymmetric_ones(tmp_path: Path) -> None:
    section = json.loads(json.dumps(SOME_ZEROS).replace("re:y", "re:z").replace("re:x", "re:y").replace("re:z", "re:x"))
    write(tmp_path, "int4 of 32", CODED, section)
    assert torch.equal(read(tmp_path, (N, K)), CODED.values("int4"))


@pytest.mark.parametrize("packing, declared", [("gptq", "awq"), ("gptq with zeros", "int4 of 32"), ("awq", "gptq")])
def test_tensors_of_another_method_are_refused(packing: str, declared: str, tmp_path: Path) -> None:
    """GPTQ and AWQ store zero points differently: decoding one as the other gives wrong weights."""
    write(tmp_path, packing, random(packing), section := PACKINGS[declared].section)
    stored, said = packing.split()[0], section["quant_method"]
    with pytest.raises(
        ValueError, match=rf"x.qweight is stored as {stored.upper()}, .* quant_method={said}: set quant_method={stored}"
    ):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("packing", FOUR_BITS)
def test_a_file_without_a_config_of_its_format_is_refused(packing: str, tmp_path: Path) -> None:
    write(tmp_path, packing, random(packing), {})
    with pytest.raises(ValueError, match=r"1 quantized matrices \(.*, first x\..*config.json has no quantization_conf"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("packing", FOUR_BITS)
def test_e2m1_is_unpacked_to_float16(packing: str, tmp_path: Path) -> None:
    coded = random(packing)
    if PACKINGS[packing].scales == torch.uint8:
        coded = replace(coded, scales=torch.full_like(coded.scales, 120))
    write(tmp_path, packing, coded)
    found = read(tmp_path, (N, K), keep=True, dtype=torch.float16)
    assert isinstance(found, ScaledMatrix) == (PACKINGS[packing].kind == "int4")
    assert isinstance(found, ScaledMatrix) or torch.equal(found, coded.values("e2m1").half())


def test_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4", random("nvfp4"), weight_scale_2=torch.tensor(2.0**12))
    with pytest.raises(ValueError, match=r"x.weight has values beyond float16: set model.dtype=bfloat16"):
        read(tmp_path, (N, K), dtype=torch.float16)


# ---- models


def whole_model(path: Path, ep: int = 1, ranks: int = 2, keep: bool = True) -> list[Decoder]:
    layout = HelixLayout.create("helix", ranks, ep=ep)
    formats = Checkpoint(path).matrix_format if keep else unquantized
    return [load(path, layout, rank, read_config(path), torch.float32, formats) for rank in range(ranks)]


def check_slices(weights: Weights, whole: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Compares bit for bit; returns which tensors stay in few bits."""
    kept = {}
    for s in weights.slices:
        target = s.target.dequantize() if isinstance(s.target, ScaledMatrix) else s.target
        assert torch.equal(target, part(whole[s.name], s) + s.offset), s.name
        kept[s.name] = isinstance(s.target, ScaledMatrix)
    return kept


def test_part_of_a_stack_in_full_unpacks_it_and_says_so(tmp_path: Path) -> None:
    """Nothing is dropped."""

    def packing(name: str) -> str | None:
        return None if "k_proj" in name or "norm" in name or "layers" not in name else "nvfp4"

    whole = write_packed(checkpoint("packed-llama"), tmp_path, packing, decades=True)
    for model in whole_model(tmp_path):
        kept = check_slices(model.weights, whole)
        assert kept["model.layers.0.self_attn.o_proj.weight"] and not kept["model.layers.0.self_attn.q_proj.weight"]
        names = ", ".join(f"model.layers.*.self_attn.{x}_proj" for x in "qkv")
        assert model.weights.unpacked == {names: "its parts are stored in several formats"}
        assert f"; {names} unpacked to float32: its parts" in describe_weights(model)


def test_groups_of_several_sizes_in_one_stack_unpack_it(tmp_path: Path) -> None:
    """Experts of 4 bits in two groups of the config, by layer and within one."""
    section = json.loads(json.dumps(PACKINGS["int4 of 32"].section))
    section["config_groups"]["group_1"] = PACKINGS["int4 of 128"].section["config_groups"]["group_0"]

    def packing(name: str) -> str | None:
        if "proj" not in name:
            return None
        return "int4 of 128" if "layers.1" in name or "layers.0.mlp.up_proj" in name else "int4 of 32"

    whole = write_packed(checkpoint("packed-llama"), tmp_path, packing, decades=True, section=section)
    for model in whole_model(tmp_path):
        kept = check_slices(model.weights, whole)
        assert kept["model.layers.1.mlp.up_proj.weight"] and not kept["model.layers.0.mlp.gate_proj.weight"]


def test_a_shared_expert_in_full_leaves_routed_ones_packed(tmp_path: Path) -> None:
    """As in Kimi-K2.5."""

    def packing(name: str) -> str | None:
        return "int4 of 32" if ".experts." in name else None

    whole = write_packed(
        checkpoint("packed-deepseek-v3"), tmp_path, packing, decades=True, section=PACKINGS["int4 of 32"].section
    )
    for model in whole_model(tmp_path):
        kept = check_slices(model.weights, whole)
        assert all(stays == (".experts." in name) for name, stays in kept.items()) and not model.weights.unpacked


def test_a_head_in_four_bits(tmp_path: Path) -> None:
    def packing(name: str) -> str | None:
        return "nvfp4" if name.startswith(("lm_head", "model.embed")) else None

    whole = write_packed(checkpoint("packed-llama"), tmp_path, packing, decades=True)
    for model in whole_model(tmp_path):
        kept = check_slices(model.weights, whole)
        assert [name for name, stays in kept.items() if stays] == ["lm_head.weight"]  # an embedding is unpacked


def test_a_tied_head_is_that_of_the_file_if_it_has_one(tmp_path: Path) -> None:
    write_packed(checkpoint("packed-llama"), tmp_path, lambda name: "nvfp4" if name.startswith("lm_head") else None)
    tied = spec_from_config(read_config(tmp_path) | {"tie_word_embeddings": True})
    assert tied.tied and not Checkpoint(tmp_path).as_stored(tied).tied


@pytest.mark.parametrize("packed", [False, True])
def test_an_mtp_layer_may_be_in_full_whatever_lists_say(tmp_path: Path, packed: bool) -> None:
    plain, config = tmp_path / "plain", read_config(checkpoint("packed-deepseek-v3"))
    config |= {"num_nextn_predict_layers": 1}
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    tensors = load_file(checkpoint("packed-deepseek-v3") / "model.safetensors")
    save_file(tensors | layer_ahead(tensors, spec_from_config(config)), plain / "model.safetensors")
    mtp = f"model.layers.{config['num_hidden_layers']}."

    def packing(name: str) -> str | None:
        return "nvfp4" if "_proj" in name and (packed or not name.startswith(mtp)) else None

    whole = write_packed(plain, tmp_path, packing, decades=True)
    opened = Checkpoint(tmp_path)
    spec = opened.as_stored(spec_from_config(read_config(tmp_path)).with_mtp())
    weights = weights_of(spec, HelixLayout.create(), 0, torch.float32, opened.matrix_format)
    opened.check(weights.slices, spec.unused)
    kept = {s.name: isinstance(s.target, ScaledMatrix) for s in weights.slices}
    assert kept["model.layers.0.mlp.down_proj.weight"] and kept[f"{mtp}self_attn.o_proj.weight"] == packed
    assert whole[f"{mtp}self_attn.o_proj.weight"].shape


def test_an_expert_without_a_scale_fails_by_name(tmp_path: Path) -> None:
    write_packed(checkpoint("packed-qwen3-moe"), tmp_path, "nvfp4")
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.5.up_proj.weight_scale"
    save_file({n: t for n, t in stored.items() if n != name}, tmp_path / "model.safetensors")
    assert f"1 missing: {name}" in problem(tmp_path, read_config(tmp_path))


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        **{f"model.layers.{i}.mlp*": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for i in range(2)},
        **{f"model.layers.{i}.self_attn.{x}_proj": {"quant_algo": "MXFP8"} for i in range(2) for x in "qkvo"},
        "lm_head": {"quant_algo": "W4A16_NVFP4"},
    },
}


@pytest.mark.parametrize("section", [MIXED, MIXED | {"quant_method": None}, PACKINGS["nvfp4"].section])
def test_a_file_may_mix_formats_whatever_lists_say(section: dict[str, Any], tmp_path: Path) -> None:
    def packing(name: str) -> str | None:
        return "mxfp8" if "self_attn" in name else "nvfp4" if "mlp" in name or "lm_head" in name else None

    whole = write_packed(checkpoint("packed-llama"), tmp_path, packing, decades=True, section=section)
    for model in whole_model(tmp_path):
        kept = check_slices(model.weights, whole)
        assert sum(kept.values()) == 15 and not model.weights.unpacked
        formats = {s.target.kind for s in model.weights.slices if isinstance(s.target, ScaledMatrix)}
        assert formats == {"e4m3", "e2m1"}


def test_random_weights_keep_a_shapes_format() -> None:
    kimi: dict[str, Any] = PACKINGS["int4 of 32"].section | {
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    }
    config = read_config(checkpoint("packed-deepseek-v3")) | {"quantization_config": kimi}
    found = WeightFormat.from_config(kimi)
    assert found is not None
    weights = weights_of(spec_from_config(config), HelixLayout.create(), 0, torch.bfloat16, found.matrix_format)
    kept = {s.name for s in weights.slices if isinstance(s.target, ScaledMatrix)}
    assert kept and all(".experts." in name for name in kept)
    model = Weights(torch.bfloat16, torch.device("cpu"), found.matrix_format)
    target = model.matrix(64, 96, names=["model.layers.1.mlp.experts.0.down_proj.weight"])
    assert isinstance(target, ScaledMatrix) and target.kind == "int4"
    model.bind(target, "model.layers.1.mlp.experts.0.down_proj.weight", (64, 96))
    randomize(model, 0)
    assert 0.01 < target.dequantize().std() < 0.04


INT4 = MatrixFormat(32, "int4", "bfloat16")
# Of a section: formats of a down projection, an expert's, an attention's, the router's and the head's matrix.
RULES: list[Any] = [
    (PACKINGS["int4 of 32"].section, (INT4, INT4, INT4, None, None)),
    (PACKINGS["nvfp4"].section | {"ignore": ["model.layers.1.self_attn*"]}, (NVFP4, NVFP4, None, None, None)),
    (
        {"quant_algo": "NVFP4", "exclude_modules": ["model.language_model.layers.1.mlp"]},
        (None, None, NVFP4, None, None),
    ),
    (MIXED, (NVFP4, NVFP4, MXFP8, NVFP4, NVFP4)),
    (
        PACKINGS["gptq"].section | {"dynamic": {"-:.*attn.*": {}, "lm_head": {}}},
        (*[MatrixFormat(128, "int4", "float16")] * 2, None, None, None),
    ),
    (
        PACKINGS["awq"].section | {"modules_to_not_convert": ["down_proj"]},
        (None, None, MatrixFormat(64, "int4", "float16", zeros=True), None, None),
    ),
    (PACKINGS["mxfp4 of quark"].section | {"exclude": ["lm_head"]}, (MXFP4, MXFP4, MXFP4, None, None)),
]


@pytest.mark.parametrize("section, wanted", RULES)
def test_which_random_matrices_are_quantized(section: dict[str, Any], wanted: Any) -> None:
    found = WeightFormat.from_config(section)
    assert found is not None
    names = "mlp.down_proj", "mlp.experts.3.down_proj", "self_attn.o_proj", "mlp.gate"
    made = [found.matrix_format(f"model.layers.1.{name}.weight") for name in names]
    assert (*made, found.matrix_format("lm_head.weight")) == wanted


def in_group(**weights: Any) -> dict[str, Any]:
    section: dict[str, Any] = json.loads(json.dumps(PACKINGS["int4 of 32"].section))
    section["config_groups"]["group_0"]["weights"] |= weights
    return section


REFUSED: list[Any] = [
    (in_group(num_bits=8, group_size=32), "compressed-tensors group_0: num_bits=8, type='int', strategy='group'"),
    (in_group(num_bits=3, group_size=32), "num_bits=3"),
    (in_group(group_size=32, actorder="group"), "actorder='group'"),
    (in_group(strategy="tensor"), "strategy='tensor'"),
    (in_group(type="float", group_size=64), "type='float', strategy='group', group_size=64"),
    (PACKINGS["gptq"].section | {"bits": 8}, "gptq with bits=8, group_size=128"),
    (PACKINGS["gptq"].section | {"checkpoint_format": "marlin"}, "gptq with checkpoint_format='marlin'"),
    (PACKINGS["awq"].section | {"version": "gemv"}, "awq with version='gemv'"),
    (PACKINGS["awq"].section | {"zero_point": False}, "awq with zero_point=False"),
    ({"quant_method": "awq", "w_bit": 3, "q_group_size": 128}, "awq with bits=3"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt with quant_algo='W4A8_AWQ'"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "mx"}}}, "quark with weights of dtype='mx'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
]


@pytest.mark.parametrize("section, message", REFUSED)
def test_other_formats_are_refused_by_what_they_say(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        WeightFormat.from_config(section)
    assert message in str(refused.value) and "supported: 4-bit matrices" in str(refused.value)
