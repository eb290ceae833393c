"""Times steps and prompts of the gated delta rule against fla-core's kernels: `helix bench delta`.

Each row is checked against the reference, then timed as CUDA-graph replays over states that exceed the L2.
fla-core's step copies states out, and does not convolve, norm outputs or keep rows for drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.runner import BenchContext, Row
from benchmarks.timer import ROTATED, seconds
from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.recurrent import reference
from kernels.recurrent.gated_delta_prefill import gated_delta_prefill
from kernels.recurrent.gated_delta_step import gated_delta_step

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
except ImportError:
    chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = None

DIM, WIDTH = 128, 4
STATE_RATE = 4.4e12  # bytes/s; reading and writing states on an H200


def rule(values: int, group: int, device: torch.device) -> GatedDelta:
    """Returns random parameters."""
    keys = values // group
    conv = torch.randn(WIDTH, (2 * keys + values) * DIM, device=device).bfloat16()
    a_log, dt_bias = torch.rand(2, values, device=device).unbind()
    return GatedDelta(conv, a_log, dt_bias, torch.randn(DIM, device=device).bfloat16(), 1e-6, keys, group, 0)


def inputs(p: GatedDelta, rows: int) -> DeltaInput:
    """Returns random rows of one fused projection."""
    values = len(p.a_log)
    widths = p.conv.shape[1], values * DIM, 2 * values
    qkv, z, gates = torch.randn(rows, sum(widths), device=p.conv.device).bfloat16().split(widths, 1)
    return DeltaInput(qkv, gates, z)


def states(p: GatedDelta, slots: int, rows: int, accepted: int) -> DeltaState:
    """Returns random states, and the rows before them."""
    values, ring = len(p.a_log), rows + WIDTH - 1
    device = p.conv.device
    return DeltaState(
        torch.randn(slots, values, DIM, DIM, device=device),
        torch.randn(slots, ring, p.conv.shape[1], device=device).bfloat16(),
        torch.randn(slots, rows, values, 2 * DIM, device=device) * DIM**-0.5,
        -torch.rand(slots, rows, values, device=device).cumsum(1),
        torch.full((slots,), accepted, device=device),
    )


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the relative error in the 2-norm."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def checked(name: str, error: float, row: Row) -> None:
    """Asserts an error within the roundings of a few products to bf16, 2^-9 each."""
    assert error < 2e-2, f"{name} is off by {error:.1e} of its norm at {row}"


def measure(ctx: BenchContext, values: int, group: int, batch: int, rows: int) -> list[Row]:
    """Measures one row: a step of several rows after one in which all were accepted, in microseconds."""
    device = ctx.device
    p, each = rule(values, group, device), batch * values * DIM * DIM * 4
    copies = max(2, -(-ROTATED // each)) if ctx.gpu else 1
    delta_states = [states(p, batch, rows, rows) for _ in range(copies)]
    x, slots = inputs(p, batch * rows), torch.arange(batch, device=device)
    positions = (100 + torch.arange(rows, device=device)).repeat(batch)
    live = torch.ones_like(positions, dtype=torch.bool)
    row: dict[str, Any] = {"kind": "delta-step", "heads": values, "batch": batch, "queries": rows}
    copy = DeltaState(*(t.clone() for t in vars(delta_states[0]).values()))
    wanted = reference.gated_delta_step(x, p, copy, slots, positions, live)
    checked("gated_delta_step", off(gated_delta_step(x, p, delta_states[0], slots, positions, live), wanted), row)
    row["us"] = seconds(lambda i: gated_delta_step(x, p, delta_states[i], slots, positions, live), copies, device) * 1e6
    row["bytes"] = 2 * each
    row["tb_per_s"] = 2 * each / row["us"] / 1e6
    row["bar_us"] = 1.25 * (2 * each / STATE_RATE * 1e6 + 4)
    peer = _peer_step(p, delta_states, batch, rows) if ctx.gpu else None
    row["fla_us"] = None if peer is None else seconds(peer, copies, device) * 1e6
    return [row]


def measure_prompt(ctx: BenchContext, values: int, group: int, length: int) -> list[Row]:
    """Measures one row: a chunk of a prompt, in microseconds."""
    device = ctx.device
    p, slots = rule(values, group, device), torch.zeros(1, dtype=torch.int64, device=device)
    delta_states, x = states(p, 1, 1, 0), inputs(p, length)
    positions, cu_q = torch.arange(length, device=device) + 100, torch.tensor([0, length], device=device).int()
    row: dict[str, Any] = {"kind": "delta-prompt", "heads": values, "length": length}
    copy = DeltaState(*(t.clone() for t in vars(delta_states).values()))
    wanted = reference.gated_delta_prefill(x, p, copy, slots, positions, cu_q)
    checked("gated_delta_prefill", off(gated_delta_prefill(x, p, delta_states, slots, positions, cu_q), wanted), row)
    row["us"] = seconds(lambda i: gated_delta_prefill(x, p, delta_states, slots, positions, cu_q), 1, device) * 1e6
    peer = _peer_prompt(p, length) if ctx.gpu else None
    row["fla_us"] = None if peer is None else seconds(peer, 1, device) * 1e6
    return [row]


def _rows(p: GatedDelta, batch: int, length: int) -> dict[str, torch.Tensor]:
    values, device = len(p.a_log), p.conv.device

    def heads(count: int) -> torch.Tensor:
        return torch.randn(batch, length, count, DIM, device=device).bfloat16()

    g, beta = torch.rand(2, batch, length, values, device=device).unbind()
    return {"q": heads(values), "k": heads(values), "v": heads(values), "g": -g, "beta": beta.bfloat16()}


def _peer_step(p: GatedDelta, delta_states: list[DeltaState], batch: int, rows: int) -> Callable[[int], Any] | None:
    if fused_recurrent_gated_delta_rule is None:
        return None
    args = _rows(p, batch, rows) | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return lambda i: fused_recurrent_gated_delta_rule(**args, initial_state=delta_states[i].state)


def _peer_prompt(p: GatedDelta, length: int) -> Callable[[int], Any] | None:
    if chunk_gated_delta_rule is None:
        return None
    args = _rows(p, 1, length) | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    state = torch.randn(1, len(p.a_log), DIM, DIM, device=p.conv.device)
    return lambda i: chunk_gated_delta_rule(**args, initial_state=state)
