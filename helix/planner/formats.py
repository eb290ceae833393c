"""How a model's matrices are stored, by the planner's kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from helix.layers.specs import Formats, GatedDeltaSpec, MLASpec, MoESpec
from helix.models import DecoderSpec
from helix.models.spec import LayerSpec
from helix.planner.hardware import Stored


def stored_matrices(spec: DecoderSpec, formats: Formats) -> dict[str, Stored]:
    """Returns how matrices of each kind are stored on a GPU, averaged over layers; see `helix.planner.points.Options`.

    A matrix speaks for its kind: queries' for all inputs of attention, gate's for an FFN.
    """
    found: dict[str, list[str]] = {"head": ["lm_head.weight"]}
    for index, layer in enumerate(spec.layers):
        for kind, name in _names(layer, f"model.layers.{index}").items():
            found.setdefault(kind, []).append(name)
    return {kind: Stored.mean([formats(name) for name in names]) for kind, names in found.items()}


def draft_matrices(spec: DecoderSpec, formats: Formats) -> dict[str, Stored]:
    """Returns the same of the layer that speculation.drafter=mtp runs."""
    assert spec.nextn is not None
    name = spec.nextn_names.layer.format(len(spec.layers))
    return {kind: Stored.mean([formats(matrix)]) for kind, matrix in _names(spec.nextn, name).items()}


def _names(layer: LayerSpec, name: str) -> Mapping[str, str]:
    return {kind: f"{name}.{matrix}" for kind, matrix in _matrices(layer)}


def _matrices(layer: LayerSpec) -> Iterator[tuple[str, str]]:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, GatedDeltaSpec):
        yield "weights", "linear_attn.in_proj_qkv.weight"
        yield "output", "linear_attn.out_proj.weight"
    else:
        first = "q_a_proj" if isinstance(mixer, MLASpec) and mixer.q_rank else "q_proj"
        yield "weights", f"self_attn.{first}.weight"
        yield "output", "self_attn.o_proj.weight"
    if not isinstance(ffn, MoESpec):
        yield "dense", "mlp.gate_proj.weight"
        return
    gate = ffn.matrices[0]
    stored = {"apart": f"experts.0.{gate}.weight", "by_matrix": f"{gate}.weight"}
    yield "experts", f"{ffn.block}.{stored.get(ffn.storage, 'experts.gate_up_proj')}"
    if ffn.shared_width:
        yield "shared_experts", f"{ffn.shared}.{gate}.weight"
