"""The ops of `kernels.recurrent` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta

CHUNK = 64
L2_EPS = 1e-6  # added to the squared length of queries and keys


def gated_delta_step(
    x: DeltaInput, p: GatedDelta, kept: DeltaState, slots: torch.Tensor, positions: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Runs a decode step; shapes as in `kernels.recurrent.gated_delta_step.gated_delta_step`."""
    rows, before = len(positions) // len(slots), p.conv.shape[0] - 1
    out = torch.zeros_like(x.z)
    for i, slot in enumerate(slots.tolist()):
        mine = slice(i * rows, (i + 1) * rows)
        if not live[mine.start]:
            continue
        begin, count = int(positions[mine.start]), int(kept.accepted[slot])
        if count:
            kept.state[slot] = with_rows(kept.state[slot], kept.rows[slot, :count], kept.decays[slot, :count])
        inputs = convolve(torch.cat((recent(kept, slot, begin - before, begin), x.qkv[mine])), p)
        q, k, v, g, beta = heads(inputs, x.gates[mine], p)
        seen, deltas, _ = recurrent(kept.state[slot], q, k, v, g, beta)
        out[mine] = gated_norm(seen, x.z[mine], p)
        remember(kept, slot, begin, x.qkv[mine])
        kept.rows[slot, :rows], kept.decays[slot, :rows] = torch.cat((k, deltas), -1), g.cumsum(0)
    return out


def with_rows(state: torch.Tensor, rows: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """Computes the state [V, dk, dv] after n kept rows [n, V, dk + dv], with their decays [n, V]."""
    k, deltas = rows.split(state.shape[-2:], -1)
    left = (decays[-1] - decays).exp()[..., None]
    return decays[-1].exp()[:, None, None] * state + torch.einsum("nhk,nhv->hkv", left * k, deltas)


def gated_delta_prefill(
    x: DeltaInput, p: GatedDelta, kept: DeltaState, slots: torch.Tensor, positions: torch.Tensor, cu_q: torch.Tensor
) -> torch.Tensor:
    """Runs a prefill step; shapes as in `kernels.recurrent.gated_delta_prefill.gated_delta_prefill`."""
    out, before, ends = torch.zeros_like(x.z), p.conv.shape[0] - 1, cu_q.tolist()
    for slot, begin, end in zip(slots.tolist(), ends, ends[1:], strict=False):
        if slot < 0:
            continue
        mine, position = slice(begin, end), int(positions[begin])
        inputs = convolve(torch.cat((recent(kept, slot, position - before, position), x.qkv[mine])), p)
        seen, kept.state[slot] = chunked(kept.state[slot], *heads(inputs, x.gates[mine], p))
        out[mine] = gated_norm(seen, x.z[mine], p)
        last = max(begin, end - before)
        remember(kept, slot, position + last - begin, x.qkv[last:end])
    return out


def recent(kept: DeltaState, slot: int, begin: int, end: int) -> torch.Tensor:
    """Returns a sequence's input rows at positions [begin, end); zeros before its first."""
    at = torch.arange(begin, end, device=kept.qkv.device)
    return torch.where((at >= 0)[:, None], kept.qkv[slot, at % kept.qkv.shape[1]], 0)


def remember(kept: DeltaState, slot: int, begin: int, qkv: torch.Tensor) -> None:
    """Keeps input rows from position `begin` on."""
    kept.qkv[slot, torch.arange(begin, begin + len(qkv), device=qkv.device) % kept.qkv.shape[1]] = qkv


def convolve(rows: torch.Tensor, p: GatedDelta) -> torch.Tensor:
    """Computes silu of the causal convolution of rows [W - 1 + n, C]: [n, C] fp32."""
    return F.silu((rows.float().unfold(0, p.conv.shape[0], 1) * p.conv.float().mT).sum(-1))


def heads(inputs: torch.Tensor, gates: torch.Tensor, p: GatedDelta) -> tuple[torch.Tensor, ...]:
    """Computes q, k [n, V, dk], v [n, V, dv], g and beta [n, V], fp32, of convolved rows [n, C] and gates [n, 2 V]."""
    values, width = len(p.a_log), len(p.norm)
    q, k = inputs[:, : inputs.shape[1] - values * width].unflatten(1, (2, p.key_heads, -1)).unbind(1)
    of_value = (p.first + torch.arange(values, device=inputs.device)) // p.group
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + L2_EPS) for t in (q, k))
    v = inputs[:, inputs.shape[1] - values * width :].unflatten(1, (values, width))
    b, a = gates.float().chunk(2, 1)
    g = -p.a_log.exp() * F.softplus(a + p.dt_bias)
    return q[:, of_value] * q.shape[-1] ** -0.5, k[:, of_value], v, g, b.sigmoid()


def recurrent(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes outputs and deltas [n, V, dv], and the state [V, dk, dv] after n rows, one after the other."""
    out, deltas = torch.empty_like(v), torch.empty_like(v)
    for i in range(len(v)):
        state = g[i].exp()[:, None, None] * state
        deltas[i] = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
        state = state + k[i][:, :, None] * deltas[i][:, None, :]
        out[i] = torch.einsum("hkv,hk->hv", state, q[i])
    return out, deltas, state


def chunked(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes outputs and state of `recurrent` by products over chunks; the state is handed from one to the next.

    With G the sum of g from the chunk's first row on, row i's delta is

        d_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i k_j) d_j),

    a triangular system for all d of a chunk. Then o_i = exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j) (q_i k_j)
    d_j, and S = exp(G_n) S + sum of exp(G_n - G_j) k_j d_j^T.
    """
    out, rows = [], (t.transpose(0, 1).split(CHUNK, 1) for t in (q, k, v, g, beta))
    for of_chunk in zip(*rows, strict=True):
        q, k, v, g, beta = of_chunk
        total = g.cumsum(1)  # [V, n]
        decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        system = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
        wanted = beta[..., None] * (v - total.exp()[..., None] * (k @ state))
        delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out.append(total.exp()[..., None] * (q @ state) + (q @ k.mT * decay) @ delta)
        left = (total[:, -1:] - total).exp()[..., None]
        state = total[:, -1].exp()[:, None, None] * state + (left * k).mT @ delta
    return torch.cat(out, 1).transpose(0, 1), state


def gated_norm(out: torch.Tensor, z: torch.Tensor, p: GatedDelta) -> torch.Tensor:
    """Computes norm * out / rms(out) * silu(z) of heads [n, V, dv], as [n, V dv] in z's dtype."""
    scaled = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + p.eps) * p.norm.float()
    return (scaled.flatten(1) * F.silu(z.float())).to(z.dtype)
