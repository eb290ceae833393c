"""Cases of rotation, norms and appending of keys, values, latents and index keys.

Each token goes to its slot; caches are NaN before, and nothing else in their memory may be written.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helix.worker.blocks import BlockLayout
from helix.worker.kv_cache_spec import dtype_name, keys_and_values
from kernels.attention.head_squares import head_squares
from kernels.attention.kv_append import QKVTarget, kv_append
from kernels.dense import linear_fp8_sm90, linear_packed_sm90, linear_sm90
from kernels.dense.qkv_append import on_hopper, qkv_append
from kernels.indexer.append import index_append
from kernels.mla.append import mla_append
from kernels.mla.per_head_linear import MAX_ROWS
from kernels.scaled import Matrix, as_tensor
from kernels.scaled_keys import quantize_fp8, quantize_latents, scales_of
from tests.kernels.cases_dense import scaled
from tests.kernels.cases_experts import scaled as scaled_like
from tests.kernels.suite import FEW_BITS, FLOATS, KERNEL, Call, Mode, Op, copied, shapes_of

E4M3 = torch.float8_e4m3fn
F32_F16 = torch.float32, torch.float16
PAGES = 5
MANY = "kernels.attention.kv_append.MANY"


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [N, heads, D] in float64."""
    x, cos, sin = x.double().cpu(), cos.double().cpu()[:, None], sin.double().cpu()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def normed(x: Tensor, norm_weight: Tensor, eps: float, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """RMSNorm over `dims` in float64."""
    x = x.double().cpu()
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt() * norm_weight.double().cpu()


def angles(N: int, half: int, dtype: torch.dtype, gen: torch.Generator, exact: bool) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines; if exact, of multiples of 90 degrees, as the order of rounding changes bytes."""
    angle = torch.randn(N, half, generator=gen) * 100
    if exact:
        angle = (angle / 50).round() * (math.pi / 2)
        return angle.cos().round().to(dtype), angle.sin().round().to(dtype)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def slots_of(N: int, page_size: int, gen: torch.Generator, elsewhere: bool = False) -> Tensor:
    """Returns distinct slots as far as there are; the third, or all, belong to other ranks."""
    slots = torch.randperm(PAGES * page_size, generator=gen)[:N]
    slots = torch.cat([slots, torch.full((N - len(slots),), -1)])
    slots[slice(None) if elsewhere else slice(2, 3)] = -1
    return slots


def stored(cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """Returns a cache [pages, page_size, ...] with the values written to their slots."""
    found, mine = cache.double().cpu().clone(), slots >= 0
    found[slots[mine] // cache.shape[1], slots[mine] % cache.shape[1]] = values.double().cpu()[mine]
    return found


def moved(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies arguments to a device."""
    return copied(given, device)[0]


# ---- keys and values


def append_heads(function: Any, k_scales: Any = None, v_scales: Any = None, norms: Any = None, **given: Any) -> Any:
    """Calls `kv_append` with its norms and scales as pairs."""
    if norms is not None:
        norms = (*(given.pop(name) for name in ("q_gain", "k_gain")), norms)
    return function(**given, norms=norms, scales=(k_scales, v_scales))


def caches(kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, kv: str, blocks: bool) -> dict[str, Tensor]:
    """Returns layers of a cache with separate pages, or with a block of bytes per page and head."""
    names = {"keys": "k_cache", "values": "v_cache", "key_scales": "k_scales", "value_scales": "v_scales"}
    block = BlockLayout.of([keys_and_values(max(kv_heads, 1), dim, dtype_name(dtype), kv, None)], page_size)
    if blocks:
        memory = torch.full((PAGES * kv_heads, block.words), -1, dtype=torch.int32)
        return {names[name]: x for name, x in block.pages(memory).items()}
    found = {}
    wide = torch.full((2, PAGES, 2, page_size, kv_heads, dim), torch.nan)
    for name, layer, few in (("keys", 0, kv == "fp8"), ("values", 1, kv != "auto")):
        found[names[name]] = wide[layer].to(E4M3 if few else dtype)[:, layer]
        if few:
            found[names[name[:-1] + "_scales"]] = torch.full((PAGES, kv_heads, page_size), torch.nan)
    return found


def make_heads(
    *, q_heads: int, kv_heads: int, dim: int, page_size: int, N: int, device: torch.device, norms: str = "",
    dtype: torch.dtype = torch.float32, kv: str = "auto", blocks: bool = False, elsewhere: bool = False,
) -> Call:  # fmt: skip
    """Makes arguments of `kv_append`, with norms of each head, of all heads or none.

    In e4m3 values are from 1e-6 to 1e2, and zeros. Bytes are exact, except after norms, whose sums have
    another order: then each is at most a neighboring value or power of two.
    """
    gen, exact = torch.Generator().manual_seed(dim + N), kv != "auto"
    heads, written = q_heads + 2 * kv_heads, caches(kv_heads, dim, page_size, dtype, kv, blocks)
    wide = torch.randn(N, heads + 1, dim, generator=gen)  # rows of a wider tensor
    if exact:
        wide *= 10 ** (torch.rand(N, heads + 1, 1, generator=gen) * 8 - 6)
        wide[1] = 0
    qkv = wide.to(dtype)[:, 1:]
    cos, sin = angles(N, dim // 2, dtype, gen, exact)
    slots = slots_of(N, page_size, gen, elsewhere)
    q, k, v = qkv.split([q_heads, kv_heads, kv_heads], 1)
    given: dict[str, Any] = dict(qkv=qkv, cos=cos, sin=sin, slot_mapping=slots, **written)
    eps = 1e-2 if norms == "all" else 1e-5
    if norms:
        shapes = ((q_heads, dim), (kv_heads, dim)) if norms == "all" else ((dim,), (dim,))
        gains = [torch.ones(s) if exact else torch.randn(s, generator=gen) for s in shapes]
        given |= dict(norms=eps, q_gain=gains[0].to(dtype), k_gain=gains[1].to(dtype))
        dims = (1, 2) if norms == "all" else (-1,)
        q, k = normed(q, given["q_gain"], eps, dims), normed(k, given["k_gain"], eps, dims)
    if norms == "all":
        parts = qkv.split([q_heads, kv_heads, kv_heads], 1)[:2]
        given["means"] = torch.stack([part.float().square().mean((1, 2)) for part in parts], 1)
    new_q, new_k = rotated(q, cos, sin), rotated(k, cos, sin)
    # fp32: a few roundings of 2^-24 of values up to 30. fp16: three roundings of 2^-11 of values up to 16.
    max_error = 3e-5 if dtype == torch.float32 else 3 * 16 * 2**-11

    def near(x: Tensor, step: float) -> Tensor | float:
        return max_error if not exact else step * x.abs() + 1e-2 if norms else 0.0

    wanted: dict[str, Any] = {"0": (new_q, near(new_q, 0.14))}
    for name, scales, new, rotate in (("k_cache", "k_scales", new_k, True), ("v_cache", "v_scales", v, False)):
        if scales in written:
            few, factors = quantize_fp8(new.to(dtype))
            whole = stored(written[scales].transpose(1, 2), slots, factors).transpose(1, 2)
            numbers = stored(written[name].float(), slots, few.float())
            wanted[scales] = whole, near(whole, 2) if rotate else 0.0
            wanted[name] = numbers, near(numbers, 0.14) if rotate else 0.0
        else:
            numbers = stored(written[name], slots, new)
            wanted[name] = numbers, near(numbers, 0.14) if rotate else 0.0
    return Call(moved(given, device), wanted, dtype, append_heads)


HEADS = shapes_of(
    (4, 2, 64, 16), (3, 1, 80, 1), (5, 5, 8, 7), (7, 1, 256, 64), (4, 0, 64, 16), names="q_heads kv_heads dim page_size"
)
WITH_KEYS = {name: shape for name, shape in HEADS.items() if shape["kv_heads"]}
FEW = {"few": dict(q_heads=3, kv_heads=2, dim=80, page_size=7)}
# One token per program, or several.
TOKENS = {"": Mode(), "several": Mode(settings={MANY: 0})}


def interleaved(case: Call, name: str) -> None:
    """Plants the classic fault: rotating neighbors instead of halves."""
    x = case.given[name]
    case.given[name] = torch.cat((x[..., ::2], x[..., 1::2]), -1)


def norms_of_first_heads(case: Call) -> None:
    """Plants a fault: means of the first heads for the norms."""
    qkv = case.given["qkv"].float()
    case.given["means"] = torch.stack([qkv[:, head].square().mean(-1) for head in (0, 4)], 1)


FIRST = HEADS["4-2-64-16"] | dict(N=6)
KV_APPEND = Op(
    "kv_append", make_heads, kv_append,
    mistakes={
        "interleaved": (FIRST, partial(interleaved, name="qkv")),
        "norms-of-first-heads": (FIRST | dict(norms="all"), norms_of_first_heads),
    },
)  # fmt: skip

# ---- heads of a projection


def make_projected(
    *, N: int, q_heads: int, kv_heads: int, D: int, K: int, device: torch.device, biased: bool = False,
    dtype: torch.dtype = torch.float32, few: bool = False, begin: int | None = 0, norms: bool = False,
    form: tuple[str, int] | None = None,
) -> Call:  # fmt: skip
    """Makes arguments of `qkv_append`; e4m3 weights have scales over decades, and groups that begin at `begin`.

    Args:
        form: the type and columns per group of packed weights, as `tests.kernels.cases_experts.make_experts` has them.
    """
    gen, heads = torch.Generator().manual_seed(N + K), q_heads + 2 * kv_heads
    x = torch.randn(N, 2 * K, generator=gen).to(dtype)[:, :K]
    weight: Matrix = torch.randn(heads * D, K, generator=gen).div(K**0.5).to(dtype).to(device)
    if few:
        weight = scaled(heads * D, K, begin, device)
        weight.scales.clamp_(max=1e-2 / K**0.5)  # for values of about 100
    if form is not None:
        weight = scaled_like(torch.empty(1, heads * D, K, device=device), *form, 0)[0]
    bias = torch.randn(heads * D, generator=gen).to(dtype) if biased else None
    cos, sin = angles(N, D // 2, dtype, gen, False)
    written = caches(kv_heads, D, 16, dtype, "auto", False)
    slots = torch.randperm(PAGES * 16, generator=gen)[:N]
    if N > 2:
        slots[1] = -1
    y = (x.to(device).double() @ as_tensor(weight, torch.float64).double().T).cpu()
    # Rounded like a projection's output, which leaves only the order of summation and the rotation's rounding.
    y = (y if bias is None else y + bias.double()).to(dtype).view(N, heads, D)
    q, k, v = y.split([q_heads, kv_heads, kv_heads], 1)
    given: dict[str, Any] = dict(x=x, bias=bias, cos=cos, sin=sin, slot_mapping=slots, **written)
    # One ulp of each of two values up to 8 that are rotated (1.4 of it), and of the result. fp32: sums of up to 1,100
    # terms of size 1 / sqrt(K) in another order.
    max_error = 8 * 2.4 * (2**-21 if dtype == torch.float32 else torch.finfo(dtype).eps)
    if norms:
        given |= dict(norms=1e-6, q_gain=torch.full((D,), 2.0, dtype=dtype), k_gain=torch.full((D,), 3.0, dtype=dtype))
        q, k, max_error = normed(q, given["q_gain"], 1e-6), normed(k, given["k_gain"], 1e-6), 1e-4
    wanted = {
        "0": (rotated(q, cos, sin), max_error),
        "k_cache": (stored(written["k_cache"], slots, rotated(k, cos, sin)), max_error),
        "v_cache": (stored(written["v_cache"], slots, v), max_error),
    }
    return Call(moved(given, device) | {"weight": weight}, wanted, dtype, append_heads)


SIZES = "N q_heads kv_heads D K"
PROJECTED = shapes_of(
    (1, 4, 2, 64, 100), (3, 3, 1, 80, 511), (2, 1, 1, 2, 33), (4, 2, 1, 256, 64), (1, 7, 1, 6, 1100), (9, 3, 1, 8, 40),
    names=SIZES,
)  # fmt: skip
PROJECTED_ON_HOPPER = shapes_of(
    (2, 7, 1, 128, 3584), (8, 16, 2, 128, 8192), (5, 16, 2, 64, 2880), (17, 3, 1, 256, 1040), (32, 1, 1, 64, 64),
    (70, 7, 1, 128, 1040), names=SIZES,
)  # fmt: skip
PROJECTED_FEW = shapes_of(
    (1, 3, 2, 32, 300, 64), (3, 3, 2, 32, 200, 0), (4, 3, 2, 32, 256, None), (9, 3, 2, 32, 144, 16),
    names=SIZES + " begin",
)  # fmt: skip
PROJECTED_PACKED = shapes_of(
    (1, 7, 1, 128, 512, ("e2m1", 32)), (8, 16, 2, 128, 1056, ("e2m1", 16)), (17, 3, 1, 256, 2048, ("e2m1", 16)),
    (64, 2, 1, 128, 768, ("e2m1", 32)), (70, 7, 1, 128, 1056, ("e2m1", 16)), names=SIZES + " form",
)  # fmt: skip
QKV_APPEND = Op("qkv_append", make_projected, qkv_append)


def split_over_programs(
    x: Tensor, weight: Matrix, bias: Tensor | None, k_cache: Tensor, split: int, norms: None, scales: Any, **given: Any
) -> Tensor:
    """Runs `qkv_append` with programs that split the columns, and so little shared memory that stages are reused."""
    to = QKVTarget.create(x, len(weight) // k_cache.shape[3], k_cache=k_cache, **given)
    if isinstance(weight, Tensor):
        linear_sm90.launch(x, weight, bias, to, False, split, 60)
    elif weight.packed:
        linear_packed_sm90.launch(x, weight, bias, to, False, split, 60)
    else:
        linear_fp8_sm90.launch(x, weight, bias, to, False, split, 60)
    return to.q


def fits_hopper(case: Call) -> bool:
    """Whether the SM90 kernel supports a case."""
    return on_hopper(case.given["x"], case.given["weight"], case.given["k_cache"].shape[3])


def splits(few: bool, N: int, K: int, **sizes: int) -> dict[str, Mode]:
    """Returns the splits of a case."""
    steps = -(-K // (256 if few and N <= 16 else 128))
    return {f"split-{n}": Mode({"split": n}) for n in (1, 2, 3, 4, 8) if n <= steps and (few or N <= 32)}


QKV_ON_HOPPER = Op("qkv_append-on-hopper", make_projected, split_over_programs, needs_hopper=True)

# ---- latents


def append_latents(function: Any, **given: Any) -> Any:
    """Calls `mla_append` with its eps."""
    eps = 1e-20 if "scales" in given else 1e-5
    return function(**given, eps=eps)


def make_latents(
    *, heads: int, nope: int, latent: int, rope: int, page_size: int, N: int, device: torch.device,
    dtype: torch.dtype = torch.float32, kv: str = "auto", elsewhere: bool = False,
) -> Call:  # fmt: skip
    """Makes arguments of `mla_append`; in e4m3 values are from 1e-4 to 1e2 in each group, and zeros."""
    gen, few = torch.Generator().manual_seed(latent), kv == "fp8"
    # Strided: last parts of wider heads, columns of a wider projection. W_UK: a part of kv_b_proj.
    q = torch.randn(N, heads, 3 + nope + rope, generator=gen).to(dtype)[..., 3:]
    wide = torch.randn(N, 5 + latent + rope, generator=gen)
    norm_weight = torch.randn(latent, generator=gen)
    if few:  # all of size 1: the mean square is 1 in any order of summation, and the norm is the identity
        wide = wide.sign()
        wide[1, 5 : 5 + latent] = 0
        norm_weight = norm_weight * 10.0 ** (torch.arange(latent) // 128 * 2 - 4)
    kv_part, norm_weight = wide.to(dtype)[:, 5:], norm_weight.to(dtype)
    w_uk = torch.randn(heads, nope + 2, latent, generator=gen).to(dtype)[:, :nope]
    cos, sin = angles(N, rope // 2, dtype, gen, few)
    slots = slots_of(N, page_size, gen, elsewhere)
    # Layers of one cache: pages are not adjacent.
    width = latent if few else latent + rope
    cache = torch.full((PAGES, 2, page_size, width), torch.nan).to(E4M3 if few else dtype)[:, 1]
    given: dict[str, Any] = dict(
        q=q, kv=kv_part, cos=cos, sin=sin, norm_weight=norm_weight, w_uk=w_uk, cache=cache, slot_mapping=slots
    )
    absorbed = torch.einsum("nha,har->nhr", q[..., :nope].double(), w_uk.double())
    new_q = torch.cat((absorbed, rotated(q[..., nope:], cos, sin)), -1)
    # fp32: one rounding per product, of sums up to 64. Otherwise one of the sum.
    half = torch.finfo(dtype).eps / 2
    sum_error = nope * 64 * 2**-24 if dtype == torch.float32 else 64 * half
    # fp32: a few roundings of 2^-24 of values up to 30. Otherwise three roundings of values up to 16.
    max_error = 3e-5 if dtype == torch.float32 else 3 * 16 * half
    near = torch.tensor([sum_error, max_error], dtype=torch.float64).repeat_interleave(torch.tensor([latent, rope]))
    wanted: dict[str, Any] = {"0": (new_q, near.expand_as(new_q))}
    new_latent = normed(kv_part[:, :latent], norm_weight, 1e-5)
    key = rotated(kv_part[:, None, latent:], cos, sin)[:, 0]
    if few:
        numbers, factors = quantize_latents((kv_part[:, :latent].double() * norm_weight.double()).to(dtype))
        given["scales"] = torch.full((PAGES, -(-latent // 128), page_size), torch.nan)
        given["ropes"] = torch.full((PAGES, 2, page_size, rope), torch.nan, dtype=dtype)[:, 1]
        whole = stored(given["scales"].mT, slots, factors).mT
        latents = stored(cache.float(), slots, numbers.float())
        # On a GPU, division (except by powers of two) and roots have errors, which only show in fp32: at most a
        # neighboring e4m3 value, or power of two.
        exact = dtype != torch.float32 or latent & (latent - 1) == 0
        wanted["cache"] = latents, 0.0 if exact else 0.14 * latents.abs() + 1e-6
        wanted["scales"] = whole, 0.0 if exact else whole.abs() + 1e-6
        wanted["ropes"] = stored(given["ropes"], slots, key), 0.0
    else:
        wanted["cache"] = stored(cache, slots, torch.cat((new_latent, key), -1)), max_error
    return Call(moved(given, device), wanted, dtype, append_latents)


LATENT_ARGS = "heads nope latent rope page_size"
LATENTS = shapes_of(
    (4, 16, 32, 8, 16), (1, 24, 40, 24, 1), (20, 5, 136, 64, 64), (9, 128, 8, 8, 7), (0, 16, 32, 8, 16),
    names=LATENT_ARGS,
)  # fmt: skip
FEW_LATENTS = shapes_of(
    (3, 16, 32, 8, 7), (3, 16, 40, 24, 7), (3, 16, 136, 64, 7), (3, 16, 512, 64, 7), names=LATENT_ARGS
)
FIRST_LATENTS = LATENTS["4-16-32-8-16"]
MLA_APPEND = Op(
    "mla_append", make_latents, mla_append,
    mistakes={"interleaved": (FIRST_LATENTS | dict(N=6), partial(interleaved, name="q"))},
)  # fmt: skip

# ---- index keys


def make_index(
    *, heads: int, width: int, rope: int, page_size: int, device: torch.device, dtype: torch.dtype = torch.float32,
    few: bool = False,
) -> Call:  # fmt: skip
    """Makes arguments of `index_append`; in e4m3 with subnormal values next to large ones."""
    gen, N = torch.Generator().manual_seed(width), 6
    # Strided: parts of wider projections.
    q = torch.randn(N, 3 + heads * width, generator=gen).to(dtype)[:, 3:].unflatten(1, (heads, width))
    k = torch.randn(N, width + 5, generator=gen)[:, :width] * 3 + 1
    cos, sin = angles(N, rope // 2, dtype, gen, False)
    norm_weight, bias = (torch.randn(width, generator=gen) for _ in range(2))
    if few:
        norm_weight *= 100
        norm_weight[: width // 2] *= 1e-3
    norm_weight, bias = norm_weight.to(dtype), bias.to(dtype)
    cache = torch.full((PAGES, 2, page_size, width), torch.nan).to(E4M3 if few else dtype)[:, 1]
    slots, eps = slots_of(N, page_size, gen), 1e-6
    wide = k.double()
    wide = (wide - wide.mean(-1, keepdim=True)) * (wide.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
    wide = wide * norm_weight.double() + bias.double()
    new = torch.cat((rotated(wide[:, None, :rope], cos, sin)[:, 0], wide[:, rope:]), -1)
    new_q = torch.cat((rotated(q[..., :rope], cos, sin), q[..., rope:].double()), -1)
    numbers = torch.full((3, N, 256), 7, dtype=torch.int32)
    given: dict[str, Any] = dict(
        q=q,
        k=k,
        cos=cos,
        sin=sin,
        norm_weight=norm_weight,
        bias=bias,
        cache=cache,
        slot_mapping=slots,
        digit_counts=numbers,
    )
    # fp32: a few roundings of 2^-24 of values up to 30. fp16: one of 2^-11 of values up to 30, and of queries up to 8.
    max_error = 3e-5 if dtype == torch.float32 else 30 * 2**-11
    wanted: dict[str, Any] = {"q": (new_q, max_error), "digit_counts": (torch.zeros_like(numbers), 0.0)}
    if few:
        given["scales"] = torch.full((PAGES, page_size), torch.nan)
        factors = scales_of(new.float())
        scales = stored(given["scales"], slots, factors)
        keys = stored(cache.float(), slots, new / factors[:, None])
        # Three bits: half of 2^-3 of a value, or of the minimum's 2^-9; and fp32's 2^-22 at a boundary.
        wanted["cache"] = keys, (keys.abs() * 2**-4).clamp(min=2**-10) * (1 + 2**-6)
        wanted["scales"] = scales, 0.0
    else:
        wanted["cache"] = stored(cache, slots, new), max_error
    return Call(moved(given, device) | {"eps": eps}, wanted)


INDEX_KEYS = shapes_of(
    (4, 32, 8, 16), (5, 24, 24, 1), (33, 128, 64, 7), (0, 16, 8, 4), names="heads width rope page_size"
)


def rotated_last(case: Call) -> None:
    """Plants the classic fault: MLA rotates the last dims, an indexer the first."""
    case.given["q"] = case.given["q"].flip(-1)


INDEX_APPEND = Op(
    "index_append", make_index, index_append,
    mistakes={"rotated-last": (INDEX_KEYS["4-32-8-16"], rotated_last)},
)  # fmt: skip

# ---- squares of heads


def make_squares(
    *, q_heads: int, kv_heads: int, dim: int, N: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Call:
    """Makes arguments of the sums of squares."""
    wide = torch.randn(N, q_heads + 2 * kv_heads + 1, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    wide[:, 0] = torch.nan  # not part of these heads
    wide[:, q_heads + kv_heads + 1 :] = torch.nan  # values
    shares = 1 / (q_heads * dim), 0.25
    heads = wide[:, 1:].double().square()
    parts = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads]
    sums = torch.stack([p.sum((1, 2)) * s for p, s in zip(parts, shares, strict=True)], 1)
    # fp32 sums of up to 6144 positive terms: at most a few ulps of 2^-24 for each of the tree's 20 levels.
    given = {"qkv": wide.to(device)[:, 1:], "kv_heads": kv_heads, "shares": shares}
    return Call(given, {"0": (sums, 4e-6 * sums)}, torch.float32)


SQUARES = shapes_of((4, 2, 64), (3, 1, 80), (5, 5, 8), (48, 8, 128), (7, 0, 16), names="q_heads kv_heads dim")
HEAD_SQUARES = Op("head_squares", make_squares, head_squares)

OPS = [KV_APPEND, QKV_APPEND, MLA_APPEND, INDEX_APPEND, HEAD_SQUARES]
ROWS = [
    *KV_APPEND.rows(HEADS, modes=TOKENS, pairs=True, N=(6, 19), norms=("", "heads"), dtype=F32_F16),
    *KV_APPEND.rows(WITH_KEYS, modes=TOKENS, pairs=True, N=(6, 19), norms=("all",)),
    *KV_APPEND.rows(WITH_KEYS, pairs=True, N=(6,), blocks=(True,), dtype=F32_F16),
    *KV_APPEND.rows({"of-other-ranks": FIRST}, elsewhere=(True,)),
    *KV_APPEND.rows(
        FEW, modes=TOKENS, pairs=True, N=(6, 19), kv=("fp8", "k16v8"), norms=("", "heads"), dtype=FLOATS,
        blocks=(False, True),
    ),
    *QKV_APPEND.rows(PROJECTED, which=KERNEL, pairs=True, biased=(False, True), dtype=FLOATS),
    *QKV_APPEND.rows(
        shapes_of((1, 3, 1, 16, 32), (4, 3, 1, 16, 32), names=SIZES), which=KERNEL, norms=(True,)
    ),
    *QKV_APPEND.rows(PROJECTED_FEW, which=KERNEL, few=(True,), biased=(True,), dtype=(torch.float32, torch.bfloat16)),
    *QKV_APPEND.rows(
        PROJECTED_ON_HOPPER, which=KERNEL, gpu=True, few=(False, True), biased=(False, True), dtype=FEW_BITS,
    ),
    *(
        row
        for few in (False, True)
        for name, shape in PROJECTED_ON_HOPPER.items()
        if (modes := splits(few, **shape))
        for row in QKV_ON_HOPPER.rows(
            {name: shape}, which=KERNEL, gpu=True, hopper=fits_hopper, modes=modes, few=(few,), biased=(False, True),
            dtype=FEW_BITS,
        )
    ),
    *(
        row
        for op, how in (
            (QKV_APPEND, dict(hopper=fits_hopper)),
            (QKV_ON_HOPPER, dict(modes={f"programs-{n}": Mode({"split": n}) for n in (1, 3, 40)})),
        )
        for row in op.rows(
            PROJECTED_PACKED, which=KERNEL, gpu=True, biased=(False, True), dtype=(torch.bfloat16,), **how
        )
    ),
    *MLA_APPEND.rows(LATENTS, N=(6, MAX_ROWS + 1), dtype=F32_F16, pairs=True),
    *MLA_APPEND.rows({"of-other-ranks": FIRST_LATENTS | dict(N=3)}, elsewhere=(True,)),
    *MLA_APPEND.rows(FEW_LATENTS, pairs=True, kv=("fp8",), N=(6, 19), dtype=FLOATS),
    *INDEX_APPEND.rows(INDEX_KEYS, dtype=F32_F16),
    *INDEX_APPEND.rows({name: INDEX_KEYS[name] for name in [*INDEX_KEYS][:3]}, few=(True,)),
    *HEAD_SQUARES.rows(SQUARES, N=(0, 1, 5), dtype=F32_F16, pairs=True),
]  # fmt: skip
