"""Plain torch reference of `kernels.recurrent`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta

CHUNK = 64
L2_EPS = 1e-6  # added to the squared length of queries and keys


def gated_delta_step(
    x: DeltaInput,
    p: GatedDelta,
    cache: DeltaState,
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    live: torch.Tensor,
    drafted: int = 0,
) -> torch.Tensor:
    """Plain torch `kernels.recurrent.gated_delta_step.gated_delta_step`."""
    rows, before = len(positions) // len(req_indices), p.conv.shape[0] - 1
    out = torch.zeros_like(x.z)
    for i, req_idx in enumerate(req_indices.tolist()):
        mine = slice(i * rows, (i + 1) * rows)
        if not live[mine.start]:
            continue
        begin, count = int(positions[mine.start]), drafted or int(cache.accepted[req_idx])
        state, decay = cache.state[req_idx], torch.zeros_like(p.a_log)
        if count:
            state = with_rows(state, cache.rows[req_idx, :count], cache.decays[req_idx, :count])
        if drafted:
            decay = cache.decays[req_idx, drafted - 1]
        else:
            cache.state[req_idx] = state
        inputs = convolve(torch.cat((recent(cache, req_idx, begin - before, begin), x.qkv[mine])), p)
        q, k, v, g, beta = heads(inputs, x.gates[mine], p)
        seen, deltas, _ = recurrent(state, q, k, v, g, beta)
        out[mine] = gated_norm(seen, x.z[mine], p)
        remember(cache, req_idx, begin, x.qkv[mine])
        to = slice(drafted, drafted + rows)
        cache.rows[req_idx, to], cache.decays[req_idx, to] = torch.cat((k, deltas), -1), decay + g.cumsum(0)
    return out


def with_rows(state: torch.Tensor, rows: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """Returns the state [V, dk, dv] after n stored rows [n, V, dk + dv], with their decays [n, V]."""
    k, deltas = rows.split(state.shape[-2:], -1)
    left = (decays[-1] - decays).exp()[..., None]
    return decays[-1].exp()[:, None, None] * state + torch.einsum("nhk,nhv->hkv", left * k, deltas)


def gated_delta_prefill(
    x: DeltaInput,
    p: GatedDelta,
    cache: DeltaState,
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    cu_q: torch.Tensor,
) -> torch.Tensor:
    """Plain torch `kernels.recurrent.gated_delta_prefill.gated_delta_prefill`."""
    out, before, ends = torch.zeros_like(x.z), p.conv.shape[0] - 1, cu_q.tolist()
    for req_idx, begin, end in zip(req_indices.tolist(), ends, ends[1:], strict=False):
        if req_idx < 0:
            continue
        mine, position = slice(begin, end), int(positions[begin])
        inputs = convolve(torch.cat((recent(cache, req_idx, position - before, position), x.qkv[mine])), p)
        seen, cache.state[req_idx] = chunked(cache.state[req_idx], *heads(inputs, x.gates[mine], p))
        out[mine] = gated_norm(seen, x.z[mine], p)
        last = max(begin, end - before)
        remember(cache, req_idx, position + last - begin, x.qkv[last:end])
    return out


def recent(cache: DeltaState, req_idx: int, begin: int, end: int) -> torch.Tensor:
    """Returns a sequence's input rows at positions [begin, end); zeros before its first."""
    at = torch.arange(begin, end, device=cache.qkv.device)
    return torch.where((at >= 0)[:, None], cache.qkv[req_idx, at % cache.qkv.shape[1]], 0)


def remember(cache: DeltaState, req_idx: int, begin: int, qkv: torch.Tensor) -> None:
    """Stores input rows from position `begin` on."""
    cache.qkv[req_idx, torch.arange(begin, begin + len(qkv), device=qkv.device) % cache.qkv.shape[1]] = qkv


def convolve(rows: torch.Tensor, p: GatedDelta) -> torch.Tensor:
    """Computes silu of the causal convolution of rows [W - 1 + n, C]: [n, C] fp32."""
    return F.silu((rows.float().unfold(0, p.conv.shape[0], 1) * p.conv.float().mT).sum(-1))


def heads(inputs: torch.Tensor, gates: torch.Tensor, p: GatedDelta) -> tuple[torch.Tensor, ...]:
    """Returns q, k [n, V, dk], v [n, V, dv], g, beta [n, V], fp32, from convolved rows [n, C] and gates [n, 2 V]."""
    values, width = len(p.a_log), len(p.norm)
    q, k = inputs[:, : inputs.shape[1] - values * width].unflatten(1, (2, p.key_heads, -1)).unbind(1)
    key_head_of = (p.first + torch.arange(values, device=inputs.device)) // p.group
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + L2_EPS) for t in (q, k))
    v = inputs[:, inputs.shape[1] - values * width :].unflatten(1, (values, width))
    b, a = gates.float().chunk(2, 1)
    g = -p.a_log.exp() * F.softplus(a + p.dt_bias)
    return q[:, key_head_of] * q.shape[-1] ** -0.5, k[:, key_head_of], v, g, b.sigmoid()


def recurrent(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns outputs and deltas [n, V, dv], and the state [V, dk, dv] after n rows, one after the other."""
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
    """Computes outputs and state of `recurrent` chunk by chunk, by matmuls.

    With G the sum of g from the chunk's first row on, row i's delta is

        d_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i k_j) d_j),

    a triangular system for all d of a chunk. Then o_i = exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j) (q_i k_j)
    d_j, and S = exp(G_n) S + sum of exp(G_n - G_j) k_j d_j^T.
    """
    out, rows = [], (t.transpose(0, 1).split(CHUNK, 1) for t in (q, k, v, g, beta))
    for chunk in zip(*rows, strict=True):
        q, k, v, g, beta = chunk
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
