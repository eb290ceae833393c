"""route: kernel and reference against transformers' own routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kernels.moe.reference import route as reference
from kernels.moe.router import route

DEEPSEEK = dict(topk_method="group_limited_greedy", routed_scaling_factor=2.5)
# Router, config and what `route` has to be told.
ROUTERS = {
    "qwen3": (Qwen3MoeTopKRouter, Qwen3MoeConfig(norm_topk_prob=True), dict(normalize=True)),
    "qwen3-plain": (Qwen3MoeTopKRouter, Qwen3MoeConfig(norm_topk_prob=False), {}),
    "mixtral": (MixtralTopKRouter, MixtralConfig(), dict(normalize=True)),
    "gpt-oss": (GptOssTopKRouter, GptOssConfig(), dict(scoring="top_softmax")),
    "deepseek-v2": (DeepseekV2TopkRouter, DeepseekV2Config(**DEEPSEEK), dict(scale=2.5)),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(routed_scaling_factor=2.5, norm_topk_prob=True),
        dict(scoring="sigmoid", group_score=2, normalize=True, scale=2.5),
    ),
}
# Experts, groups and the groups and experts of a token.
SIZES = [(8, 4, 2, 3), (60, 6, 3, 5), (256, 8, 4, 8), (5, 1, 1, 5)]


def theirs(name: str, experts: int, groups: int, top_groups: int, top_k: int, x: Tensor) -> tuple[Any, dict[str, Any]]:
    """Logits, ids and weights of transformers' router for x [N, H] fp32, and our arguments for the same choice."""
    cls, config, arguments = ROUTERS[name]
    config.hidden_size, config.num_experts_per_tok = x.shape[1], top_k
    for names in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, names):
            setattr(config, names, experts)
    arguments = dict(arguments)
    if name.startswith("deepseek"):
        config.n_group, config.topk_group = groups, top_groups
        arguments |= dict(groups=groups, top_groups=top_groups)
        if experts // groups < arguments.get("group_score", 1):
            pytest.skip("a group of one has no best two")
    router = cls(config).to(x.device)
    generator = torch.Generator().manual_seed(experts)
    for parameter in router.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(x.device)
    if name == "deepseek-v3":
        router.e_score_correction_bias = torch.randn(experts, generator=generator).to(x.device)
        arguments["bias"] = router.e_score_correction_bias
    with torch.no_grad():
        logits, weights, ids = router(x)
    return (logits, ids, weights), arguments


@pytest.mark.parametrize("where", ["kernel", "reference"])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("experts, groups, top_groups, top_k", SIZES)
def test_route_is_transformers(
    name: str, experts: int, groups: int, top_groups: int, top_k: int, where: str, request: pytest.FixtureRequest
) -> None:
    device = request.getfixturevalue("device") if where == "kernel" else torch.device("cpu")
    x = torch.randn(33, 24, generator=torch.Generator().manual_seed(7)).to(device)
    (logits, wanted_ids, wanted), arguments = theirs(name, experts, groups, top_groups, top_k, x)
    wide = torch.full((33, experts + 3), torch.nan, device=device)
    wide[:, :experts] = logits
    ids, weights = route(wide[:, :experts], top_k, **arguments)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    # Theirs are in no order: by id.
    order, wanted_order = ids.argsort(1), wanted_ids.argsort(1)
    assert torch.equal(ids.gather(1, order).long(), wanted_ids.gather(1, wanted_order))
    # Values up to the scale 2.5, whose exponentials and sums differ by a few units of 2^-24.
    torch.testing.assert_close(
        weights.gather(1, order), wanted.float().gather(1, wanted_order), atol=2e-6, rtol=0, check_device=False
    )


def test_best_first_and_ties_by_the_lowest_id(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 2.0, -torch.inf], [0.0] * 7], device=device)
    for scoring in ("softmax", "sigmoid", "top_softmax"):
        ids, _ = route(logits, 5, scoring=scoring)
        assert ids.tolist() == [[1, 2, 4, 5, 0], [0, 1, 2, 3, 4]]
    ids, weights = route(torch.zeros(1, 8, device=device), 2, groups=4, top_groups=2, group_score=2)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.125, 0.125]]
    bias = torch.tensor([0.0, -9.0, 5.0, 1.0], device=device)
    ids, weights = route(torch.zeros(1, 4, device=device), 2, scoring="sigmoid", bias=bias)
    assert ids.tolist() == [[2, 3]] and weights.tolist() == [[0.5, 0.5]], "the bias chooses and does not weigh"


@pytest.mark.parametrize("shared_count", [0, 2])
def test_padding_rows_use_no_expert(shared_count: int, device: torch.device) -> None:
    logits = torch.randn(9, 24, generator=torch.Generator().manual_seed(3)).to(device)
    live = torch.tensor([True, False, True, True, False, True, True, True, False], device=device)
    all_ids, weights = route(logits, 5, shared_count=shared_count)
    ids, same = route(logits, 5, shared_count=shared_count, live=live)
    assert torch.equal(ids[live], all_ids[live]) and torch.equal(same[live], weights[live])
    assert (ids[~live] == -1).all()
    cpu = reference(logits.cpu(), 5, "softmax", None, 1, 1, 1, False, 1.0, shared_count, live.cpu())
    assert torch.equal(cpu[0], ids.cpu())


@pytest.mark.parametrize("group_score", [1, 2])
@pytest.mark.parametrize("experts, groups, top_groups, top_k", [(60, 6, 3, 5), (20, 4, 1, 5), (21, 1, 1, 8)])
def test_ties_zeros_of_either_sign_and_infinities(
    experts: int, groups: int, top_groups: int, top_k: int, group_score: int, device: torch.device
) -> None:
    """Groups of a size that is no power of two, among them equal ones."""
    gen = torch.Generator().manual_seed(experts)
    logits = torch.randn(8, experts, generator=gen).round()
    logits[1], logits[2, 3], logits[3, ::2], logits[4, 1:] = 0.0, torch.inf, -torch.inf, -torch.inf
    logits[5] = torch.where(logits[5] < 0, 0.0, -0.0)
    bias = torch.randn(experts, generator=gen).round()
    options: dict[str, Any] = dict(scoring="sigmoid", groups=groups, top_groups=top_groups, group_score=group_score)
    for added in (None, bias):
        wanted, scores = reference(logits, top_k, "sigmoid", added, groups, top_groups, group_score, False, 1.0, 0)
        on_device = None if added is None else added.to(device)
        ids, weights = route(logits.to(device), top_k, bias=on_device, **options)
        assert torch.equal(ids.cpu(), wanted)
        # Sigmoids up to 1, of exponentials that differ by a few units of 2^-24.
        torch.testing.assert_close(weights.cpu(), scores, atol=5e-7, rtol=0)


@pytest.mark.parametrize(
    "shared_count, options",
    [
        (3, dict(normalize=True, scale=2.5)),
        (1, dict(scoring="top_softmax")),
        (1, dict(scoring="sigmoid", groups=4, top_groups=2, group_score=2, biased=True)),
    ],
    ids=["normalized", "top-softmax", "grouped"],
)
def test_experts_that_every_token_goes_to(shared_count: int, options: dict[str, Any], device: torch.device) -> None:
    """They take the lowest ids, and have a weight that neither scale nor sum touches."""
    logits = torch.randn(7, 24, generator=torch.Generator().manual_seed(9)).to(device)
    options = dict(options)
    if options.pop("biased", False):
        options["bias"] = torch.linspace(-1, 1, 24, device=device)
    selected, scores = route(logits, 5, **options)
    ids, weights = route(logits, 5, shared_count=shared_count, **options)
    shared = torch.arange(shared_count, device=device).expand(7, -1)
    assert torch.equal(ids, torch.cat([selected + shared_count, shared.int()], 1))
    assert torch.equal(weights, torch.cat([scores, torch.ones_like(shared, dtype=torch.float32)], 1))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter
def test_of_no_use_to_anyone(device: torch.device) -> None:
    """All sigmoids underflow: weights of zero, not NaN; and no tokens at all."""
    _, weights = route(torch.full((1, 4), -200.0, device=device), 2, scoring="sigmoid", normalize=True)
    assert weights.tolist() == [[0.0, 0.0]]
    ids, weights = route(torch.ones(0, 4, device=device), 2)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "top_softmax"])
def test_nan_surfaces(scoring: Any, device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, torch.nan, 0.5], [1.0, 2.0, 0.0, 0.5]], device=device)
    ids, weights = route(logits, 2, scoring=scoring)
    assert weights[0].isnan().any() and not weights[1].isnan().any()
    assert ids.min() >= 0 and ids.max() < 4
