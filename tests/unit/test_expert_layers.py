"""Routed experts on every TPF x EP grid: the ranks' parts, the paper's way to add them up, and ours."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from comm.loopback import LoopbackWorld
from helix.engine.request import Request
from helix.layers.ffn import MoE
from helix.layers.specs import MoESpec
from helix.layers.weights import ModelShard, Weights
from helix.layout import HelixLayout
from kernels.moe.router import route
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import build_engine
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.sequences import generated_ids

HIDDEN, TOKENS = 24, 13
# Counts and widths that few ranks divide; more ranks than experts; many experts without tokens.
SPECS = {
    "plain": MoESpec(experts=11, top_k=3, width=52, normalize=True),
    "few": MoESpec(experts=5, top_k=2, width=3, shared_width=5),  # the shared one also on ranks without experts
    "many": MoESpec(experts=64, top_k=1, width=10),
    "biased": MoESpec(
        experts=6, top_k=4, width=14, scoring="top_softmax", router_bias=True, expert_bias=True, clamp_at=0.5,
        router="router", storage="stacked",
    ),
    "shared": MoESpec(
        experts=12, top_k=3, width=10, shared_width=29, scoring="sigmoid", normalize=True, scale=2.5,
        groups=4, top_groups=2, group_score=2, score_correction_bias="gate.e_score_correction_bias",
    ),
    "shared-as-wide": MoESpec(experts=7, top_k=2, width=11, shared_width=22, scale=0.3),  # as two of the routed ones
    "by-matrix": MoESpec(
        experts=7, top_k=3, width=11, shared_width=22, scoring="sigmoid", normalize=True, clamp_at=0.5,
        activation="swiglustep", shared_clamp_at=0.7, storage="by_matrix",
    ),
}  # fmt: skip
GRIDS = [(8, 1), (2, 4), (1, 8), (1, 1), (3, 2)]


def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """A checkpoint tensor of its own for each name, float64."""
    seed = sum(i * byte for i, byte in enumerate(name.encode(), 1))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(spec: MoESpec, layout: HelixLayout, rank: int) -> tuple[MoE, Weights]:
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))
    weights = Weights(torch.float64, torch.device("cpu"))
    built = MoE(ModelShard(weights, comm, layout), HIDDEN, spec, "layer")
    for parameter in weights.parameters:
        parameter.fill_(torch.nan)
    for s in weights.slices:
        s.target.copy_(
            tensor(s.name.removeprefix("layer."), s.shape)[tuple(slice(r.start, r.stop, r.step) for r in s.ranges)]
        )
    assert not any(p.isnan().any() for p in weights.parameters), "a parameter was left unread"
    return built, weights


def tokens() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def expected(spec: MoESpec, x: Tensor, experts: range) -> Tensor:
    """What these experts add to each token [N, H], from the whole tensors of the checkpoint."""
    E, F = spec.experts, spec.width
    logits = x @ tensor(f"mlp.{spec.router}.weight", (E, HIDDEN)).T
    if spec.router_bias:
        logits += tensor(f"mlp.{spec.router}.bias", (E,))
    bias = tensor("mlp.gate.e_score_correction_bias", (E,)).float() if spec.score_correction_bias else None
    options: dict[str, Any] = dict(scoring=spec.scoring, bias=bias, normalize=spec.normalize, scale=spec.scale)
    ids, scores = route(
        logits, spec.top_k, groups=spec.groups, top_groups=spec.top_groups, group_score=spec.group_score, **options
    )
    y = torch.zeros_like(x)
    for e in experts:
        if spec.storage == "stacked":
            gate_up = x @ tensor("mlp.experts.gate_up_proj", (E, HIDDEN, 2 * F))[e]
            gate_up += tensor("mlp.experts.gate_up_proj_bias", (E, 2 * F))[e]
            gate, up = gate_up[:, ::2].clamp(max=spec.clamp_at), gate_up[:, 1::2].clamp(-spec.clamp_at, spec.clamp_at)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            out = h @ tensor("mlp.experts.down_proj", (E, F, HIDDEN))[e]
            out += tensor("mlp.experts.down_proj_bias", (E, HIDDEN))[e]
        elif spec.storage == "by_matrix":
            gate, up = (x @ tensor(f"mlp.{part}_proj.weight", (E, F, HIDDEN))[e].T for part in ("gate", "up"))
            out = clamped(gate, up, spec.clamp_at) @ tensor("mlp.down_proj.weight", (E, HIDDEN, F))[e].T
        else:
            out = dense(x, f"mlp.experts.{e}", F)
        y += out * torch.where(ids == e, scores, 0.0).sum(1, keepdim=True)
    return y


def clamped(gate: Tensor, up: Tensor, clamp_at: float | None) -> Tensor:
    """SwiGLU whose gate is clamped after silu, from above, and up on both sides."""
    limit = math.inf if clamp_at is None else clamp_at
    return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def dense(x: Tensor, name: str, width: int, clamp_at: float | None = None) -> Tensor:
    gate = x @ tensor(f"{name}.gate_proj.weight", (width, HIDDEN)).T
    up = x @ tensor(f"{name}.up_proj.weight", (width, HIDDEN)).T
    return clamped(gate, up, clamp_at) @ tensor(f"{name}.down_proj.weight", (HIDDEN, width)).T


def whole(spec: MoESpec, x: Tensor) -> Tensor:
    """What all experts add."""
    routed = expected(spec, x, range(spec.experts))
    if not spec.shared_width:
        return routed
    return routed + dense(x, "mlp.shared_experts", spec.shared_width, spec.shared_clamp_at)


def close(ours: Tensor, wanted: Tensor) -> bool:
    """Activations and scores are rounded to fp32, all else is float64: 2^-24 of each of some hundred terms, whose
    roundings add up to less than 2^-20 of the largest sum."""
    return bool((ours - wanted).abs().max() <= 2**-20 * wanted.abs().max())


@pytest.mark.parametrize("tpf, ep", GRIDS)
@pytest.mark.parametrize("name", SPECS)
def test_one_sum_is_what_the_paper_does_in_three_steps(name: str, tpf: int, ep: int) -> None:
    spec = SPECS[name]
    layout = HelixLayout("helix", tpf * ep, 1, tpf, ep)
    x = tokens()
    parts = torch.stack([layer(spec, layout, rank)[0](x).compute() for rank in range(tpf * ep)])  # [ranks, N, H]
    ours = parts.sum(0)
    assert close(ours, whole(spec, x))

    # The paper's: an all-reduce inside each expert group, whose result is what its experts alone add; an all-gather of
    # the groups' results; a local sum. The shared expert, dense, is a sum over all ranks of its own.
    routed = torch.stack([layer(replace(spec, shared_width=0), layout, r)[0](x).compute() for r in range(tpf * ep)])
    gathered = routed.unflatten(0, (ep, tpf)).sum(1)  # [EP, N, H]
    for group in range(ep):
        assert close(gathered[group], expected(spec, x, layout.experts(group * tpf, spec.experts)))
    assert close(gathered.sum(0) + whole(spec, x) - expected(spec, x, range(spec.experts)), ours)


@pytest.mark.parametrize("tpf, ep", GRIDS)
def test_shared_experts_are_among_the_routed_where_all_ranks_hold_these(tpf: int, ep: int) -> None:
    layout = HelixLayout("helix", tpf * ep, 1, tpf, ep)
    for name, shared_count in (("shared-as-wide", 2), ("shared", 0)):
        built = layer(SPECS[name], layout, 0)[0]
        assert built.shared_count == (shared_count if ep == 1 else 0)
        assert (built.shared is None) == (built.shared_count > 0)


@pytest.mark.parametrize("name, tpf, ep", [("biased", 1, 2), ("shared-as-wide", 2, 1)])
def test_idle_ranks_of_medha_add_nothing(name: str, tpf: int, ep: int) -> None:
    spec, x = SPECS[name], tokens()
    parts = [layer(spec, HelixLayout("medha", 3, 2, tpf, ep), rank)[0](x).compute() for rank in range(6)]
    assert [bool(part.any()) for part in parts] == [True, False, False, True, False, False]
    assert close(torch.stack(parts).sum(0), whole(spec, x))


@pytest.mark.parametrize("planted", ["a bias on two ranks", "gate and up swapped", "an expert on two ranks"])
def test_planted_errors_are_caught(planted: str) -> None:
    spec, x = SPECS["biased"], tokens()
    layers = [layer(spec, HelixLayout("helix", 4, 1, 2, 2), rank)[0] for rank in range(4)]
    if planted == "a bias on two ranks":
        layers[1].down_bias = layers[0].down_bias
    if planted == "gate and up swapped":
        layers[2].gate_up.copy_(layers[2].gate_up.roll(len(layers[2].columns), 1))
    if planted == "an expert on two ranks":
        layers[2].experts = layers[0].experts
    assert not close(torch.stack([built(x).compute() for built in layers]).sum(0), whole(spec, x))


@pytest.mark.parametrize("tpf, ep", GRIDS)
@pytest.mark.parametrize("name", SPECS)
def test_the_ranks_hold_every_expert_once_and_know_of_all(name: str, tpf: int, ep: int) -> None:
    spec = SPECS[name]
    layout = HelixLayout("helix", tpf * ep, 1, tpf, ep)
    ranks = [layer(spec, layout, rank)[1] for rank in range(tpf * ep)]
    assert len({frozenset((s.name, s.shape) for s in weights.slices) for weights in ranks}) == 1
    copies = {s.name: torch.zeros(s.shape) for s in ranks[0].slices}
    for weights in ranks:
        for s in weights.slices:
            copies[s.name][tuple(slice(r.start, r.stop, r.step) for r in s.ranges)] += 1
    for tensor_name, count in copies.items():
        replicated = f"mlp.{spec.router}." in tensor_name
        assert (count == (tpf * ep if replicated else 1)).all(), tensor_name


@pytest.mark.parametrize("exact", [True, False])
def test_a_router_that_is_not_rounded_chooses_as_transformers_does_in_bf16(exact: bool) -> None:
    """DeepSeek's logits are fp32 products of bf16 numbers; rounded to bf16 (planted), some tokens go elsewhere."""
    spec = MoESpec(
        experts=64, top_k=6, width=2, scoring="sigmoid", normalize=True, scale=2.5, groups=8, top_groups=4,
        group_score=2, score_correction_bias="gate.e_score_correction_bias", exact_router=exact,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    config = DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=64, num_experts_per_tok=6, n_group=8, topk_group=4)
    router = DeepseekV3TopkRouter(config).bfloat16()
    router.weight.data = torch.randn(64, HIDDEN, generator=generator).bfloat16()
    router.e_score_correction_bias = torch.randn(64, generator=generator) * 0.1
    comm = LoopbackWorld(1).communicator(0, (0,))
    weights = Weights(torch.bfloat16, torch.device("cpu"))
    built = MoE(ModelShard(weights, comm, HelixLayout.create()), HIDDEN, spec, "layer")
    for parameter in weights.parameters:
        parameter.zero_()
    built.router.weight.copy_(router.weight.data)
    assert built.score_correction_bias is not None
    built.score_correction_bias.copy_(router.e_score_correction_bias)
    x = torch.randn(2000, HIDDEN, generator=generator).bfloat16()
    with torch.no_grad():
        _, _, wanted = router(x)
    same = (built(x).ids.sort(1).values == wanted.sort(1).values).all(1)
    assert same.all() if exact else not same.all()


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_idle_rows_and_padding_use_no_expert(family: str, pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in steps of four rows; prompts in chunks of fixed sizes."""
    found: list[tuple[int, int]] = []  # number of rows, and how many use experts

    def routed(logits: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, scores = route(logits, *given, **options)
        assert ((ids < 0).all(1) == (ids < 0).any(1)).all()
        found.append((len(ids), int((ids >= 0).all(1).sum())))
        return ids, scores

    monkeypatch.setattr("helix.layers.ffn.route", routed)
    alone = LoopbackWorld(1).communicator(0, [0])
    engine = build_engine(checkpoint(family), HelixLayout.create(), alone, 16, max_batch=4, max_length=192)
    engine.runner.pads_chunks = pads
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)[:3]
    tokens = generated_ids(engine, [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)])
    engine.close()
    assert [tokens[i] for i in range(3)] == [c.tokens for c in wanted]
    assert (4, 3) in found and (4, 4) not in found, "decode steps"
    prompts = [rows for rows in found if rows[0] > 4]
    assert prompts and any(rows > real for rows, real in prompts) == pads
