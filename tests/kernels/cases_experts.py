"""Cases of routed experts, with results in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kernels.dense.reference import rounded_rows
from kernels.moe.experts import RoutedExperts
from kernels.scaled import Kind, ScaledMatrix, groups, pack
from tests.kernels.suite import FEW_BITS, KERNEL, Mode, Op, shapes_of

F32_BF16 = torch.float32, torch.bfloat16


@dataclass
class Case:
    """Arguments of `RoutedExperts`; memory that must not be read is NaN."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Any  # Tensor or ScaledMatrix
    down: Any
    first: int = 0
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp_at: float | None = None
    addend: Tensor | None = None
    shared_count: int = 0
    activation: str = "swigluoai"

    @property
    def fp8_rows(self) -> bool:
        return isinstance(self.gate_up, ScaledMatrix) and self.gate_up.rounds(len(self.x))

    def run(self, function: Any) -> tuple[Tensor]:
        return (function(RoutedExperts(**{field.name: getattr(self, field.name) for field in fields(self)})),)

    @cached_property
    def wanted(self) -> Tensor:
        """Expected output [N, H] float64 on the CPU, computed pair by pair of tokens and experts."""
        rows = len(self.x)
        x, weights = rounded_rows(self.x, self.gate_up, rows).double(), self.weights.double()
        local = self.ids - self.first
        out = torch.zeros_like(x) if self.addend is None else self.addend.double()
        for e in range(len(self.gate_up)):
            pairs = (local == e).nonzero().tolist()
            if not pairs:
                continue
            both = self.gate_up[e], self.down[e]
            gate_up, down = ((w.dequantize() if isinstance(w, ScaledMatrix) else w).double() for w in both)
            for n, slot in pairs:
                gate, up = (gate_up @ x[n] + (0 if self.gate_up_bias is None else self.gate_up_bias[e])).chunk(2)
                if self.clamp_at is None:
                    h = gate / (1 + (-gate).exp()) * up
                elif self.activation == "swiglustep":
                    h = (gate / (1 + (-gate).exp())).clamp(max=self.clamp_at) * up.clamp(-self.clamp_at, self.clamp_at)
                else:
                    gate, up = gate.clamp(max=self.clamp_at), up.clamp(-self.clamp_at, self.clamp_at)
                    h = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
                if self.fp8_rows:  # with its weight, as kernels do
                    h = rounded_rows((h * weights[n, slot])[None], self.down, rows)[0] / weights[n, slot]
                out[n] += weights[n, slot] * (down @ h + (0 if self.down_bias is None else self.down_bias[e]))
        return out.cpu()

    def check(self, out: Tensor) -> None:
        """Compares with float64.

        Tolerances: fp32 sums of up to a few hundred terms of size 1/sqrt(terms), twice in a row, and over experts: a
        few ulps of 2^-24 of values up to 10. In bf16 the two halves, the activations and an expert's output may each
        be rounded, and the result is: five times half an ulp, 2^-9, of values up to 6. Two numbers in e4m3 for one in
        bf16 add less: 2^-18 of the largest of 128, and what tensor cores cut, 2^-13 of the largest of 32. With one, one
        activation in ten or so has another neighbor in e4m3, 2^-3 of it away, if weights or sums were rounded before:
        2^-5 of outputs of a standard deviation around 1, at seven deviations.
        """
        assert out.dtype == self.x.dtype and out.shape == self.wanted.shape
        tolerance = {torch.float32: 2e-5, torch.bfloat16: 30 * 2**-9, torch.float16: 30 * 2**-12}[out.dtype]
        if self.fp8_rows:
            tolerance = 4 * 30 * 2**-9
        torch.testing.assert_close(out.double().cpu(), self.wanted, atol=tolerance, rtol=0, equal_nan=True)


def make_experts(
    *, N: int, k: int, E: int, H: int, F: int, device: torch.device, experts: int | None = None,
    first: int | None = None, clamped: bool | str = False, addend: bool = False, dtype: torch.dtype = torch.float32,
    seed: int = 0, choices: str = "any", shared: int = 0, hint: int | None = None, nan_token: int | None = None,
    form: tuple[str, int, tuple[int, int]] | None = None, apart: int = 3, poison: bool = True,
    fp8_rows: bool = False,
) -> Case:  # fmt: skip
    """Makes random tokens that select k different ones of `experts` (None: all are local), of which E are local.

    Args:
        first: the first local expert; None: the local ones are in the middle.
        clamped: whether experts have gpt-oss's biases and clamps; "step": Step-3.5's clamps.
        choices: any; "nobody" local; "crowded": all slots the last local one; "one": all tokens select the first local
            one and no other; "same": all as the first token; "first-nobody": the same, without the first token; "lone":
            one token selects one local expert; "third": so does every third token; "four": all select the same four.
        shared: number of first experts that are the last selections of all tokens, as from `route`.
        hint: number of selected experts that the op is given; None: the true one.
        form: of quantized weights: e4m3, e2m1, int4 or int4-zeros; columns per group; columns of the first groups on
            earlier ranks.
        apart: NaN values between rows of x.
        poison: whether unselected experts' weights are NaN.
    """
    gen = torch.Generator(device).manual_seed(seed)
    first = (((experts or E) - E) // 2) if first is None else first

    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        wide = torch.full((shape[0] + 1, *shape[1:]), torch.nan, dtype=dtype, device=device)
        wide[: shape[0]] = torch.randn(shape, generator=gen, dtype=dtype, device=device) * max(fan_in, 1) ** -0.5
        return wide[: shape[0]]

    x = torch.full((N, H + apart), torch.nan, dtype=dtype, device=device)[:, :H]
    x.copy_(normal(N, H))
    if nan_token is not None:
        x[nan_token] = torch.nan
    others = torch.rand(N, (experts or E) - shared, generator=gen, device=device).argsort(1)[:, : k - shared]
    ids = torch.cat([others + shared, torch.arange(shared, device=device).expand(N, -1)], 1).int()
    weights = torch.rand(N, k, generator=gen, device=device)
    if choices in ("same", "first-nobody"):
        ids[:] = ids[:1].clone()
        ids[: choices == "first-nobody"] = -1
    elif choices == "crowded":
        ids[:] = first + E - 1
        weights /= k  # keeps values within the tolerance's assumptions
    elif choices != "any":
        ids[:] = -1
        if choices == "one":
            ids[:, 0] = first + E // 2
        elif choices == "lone":
            ids[-1, 2] = first + 1
        elif choices == "third":
            ids[:, 2] = first + 3
        elif choices == "four":
            ids[:] = torch.arange(first, first + 4, device=device)
    biases = (normal(E, 2 * F), normal(E, H), 1.5) if clamped is True else (None, None, 0.5 if clamped else None)
    case = Case(
        x, ids, weights, normal(E, 2 * F, H, fan_in=H), normal(E, H, F, fan_in=F), first, *biases,
        normal(N, H) if addend else None, shared if hint is None else hint,
        "swiglustep" if clamped == "step" else "swigluoai",
    )  # fmt: skip
    if form is not None:
        case = make_quantized(case, form)
        case.gate_up, case.down = (replace(matrix, fp8_rows=fp8_rows) for matrix in (case.gate_up, case.down))
    if poison and hint is None:
        unused = ~torch.isin(torch.arange(first, first + E, device=device), ids)
        for w in (case.gate_up, case.down, case.gate_up_bias, case.down_bias):
            if isinstance(w, ScaledMatrix):
                w.data.view(torch.uint8)[unused] = 0x7F
                w.scales[unused] = torch.nan if w.scales.is_floating_point() else 255
            elif w is not None:
                w[unused] = torch.nan
    return case


def make_quantized(case: Case, form: tuple[str, int, tuple[int, int]]) -> Case:
    """Quantizes a case's weights."""
    kind, group, (gate_begin, down_begin) = form
    gate_up = scaled(case.gate_up, kind, group, gate_begin)
    return replace(case, gate_up=gate_up, down=scaled(case.down, kind, group, down_begin, seed=1))


def scaled(like: Tensor, form: str, group: int, begin: int, seed: int = 0) -> ScaledMatrix:
    """Makes quantized weights like `like` [E, R, K], with scales over eight decades, or powers of two.

    After the last expert, values and scales are NaN.
    """
    device = like.device
    gen = torch.Generator(device).manual_seed(seed)
    (E, R, K), size = like.shape, like.shape[2] ** -0.5
    shape = E + 1, groups(begin, K, group), R
    if form == "e4m3":
        scales = 10 ** (torch.rand(shape, generator=gen, device=device) * 8 - 6)
        each = scales.mT[..., (begin + torch.arange(K, device=device)) // group]
        weights = torch.randn(E + 1, R, K, generator=gen, device=device) * size
        data = (weights / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        data.view(torch.uint8)[E], scales[E] = 0x7F, torch.nan
        return ScaledMatrix(data[:E], scales[:E], group, begin)
    kind: Kind = "e2m1" if form == "e2m1" else "int4"
    data = pack(torch.randint(16, (E + 1, R, K), generator=gen, dtype=torch.uint8, device=device), kind)
    zeros = row_scales = None
    if kind == "e2m1" and group == 32:
        top = round(math.log2(size)) - 1
        scales = (torch.randint(-20, top + 1, shape, generator=gen, device=device) + 127).to(torch.uint8)
        scales[:, ::2] = top + 127  # so that most weights contribute
        scales[E] = 255
    elif kind == "e2m1":
        scales = torch.randint(143, shape, generator=gen, device=device).to(torch.uint8)  # 2^-9 to 448
        scales[:, ::2] = 120 + 7  # 120, and a row's second scale that makes it a half
        row_scales = (torch.rand(E + 1, R, generator=gen, device=device) + 1) * (size / 960)
        row_scales[E] = torch.nan
    else:
        scales = (10 ** (torch.rand(shape, generator=gen, device=device) * 3 - 3) * (size / 8)).bfloat16()
        # So that most weights contribute, by standard deviations of 0.4 to 1.6.
        scales[:, ::2] = ((0.5 + torch.rand(shape, generator=gen, device=device)) * (size / 6))[:, ::2].bfloat16()
        scales[E] = torch.nan
        if form == "int4-zeros":
            zeros = torch.randint(16, shape, generator=gen, dtype=torch.uint8, device=device)[:E]
    second = None if row_scales is None else row_scales[:E]
    return ScaledMatrix(data[:E], scales[:E], group, begin, kind, zeros, second)


_empty = torch.empty


def poisoned(*shape: int, **options: Any) -> Tensor:
    """Makes NaN memory."""
    made = _empty(*shape, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


def never(*tensors: Any) -> bool:
    """Supports no case."""
    return False


def way(name: str) -> Mode:
    """Returns a mode with one algorithm for all sizes, and NaN memory."""
    module = "kernels.moe."
    others = "experts_sm90", "experts_scaled_sm90", "experts_packed_sm90"
    fits = {f"{module}{hopper}.fits": never for hopper in others}
    return Mode(
        settings={
            f"{module}experts.choose_strategy": lambda N, top_k, E, is_packed: name,
            "torch.empty": poisoned,
            **fits,
        }
    )


FEW = {"few": way("few")}  # a program per pair and tile is slow in the interpreter: few tokens only
OTHERS = {"some": way("some"), "many": way("many")}  # the fourth is the SM90 kernel
WAYS = FEW | OTHERS


def slot_left_out(case: Case) -> None:
    """Drops each token's first expert."""
    case.ids[:, 0] = -1


def summand_left_out(case: Case) -> None:
    """Drops the addend."""
    case.addend = None


def clamp_left_out(case: Case) -> None:
    """Drops the clamps."""
    case.clamp_at = None


def scales_rolled(case: Case, name: str, dim: int) -> None:
    """Takes the scales of a neighboring group, or row."""
    right = getattr(case, name)
    setattr(case, name, replace(right, scales=right.scales.roll(1, dim).contiguous()))


def other_choices(case: Case) -> Iterator[None]:
    """Yields with any selection, then all tokens on the same four, one of them remote, then any."""
    N, k = case.ids.shape
    any_ids = [torch.rand(N, 16, generator=torch.Generator().manual_seed(n)).argsort(1)[:, :k] for n in range(2)]
    for ids in (any_ids[0], torch.arange(3, 3 + k).expand(N, -1), any_ids[1]):
        case.ids.copy_(ids)
        case.__dict__.pop("wanted", None)
        yield


SIZES = "N k E H F"
SMALL = dict(N=5, k=3, E=4, H=32, F=16, addend=True)
EXPERTS = Op(
    "experts", make_experts, RoutedExperts.compute,
    mistakes={
        "slot-left-out": (SMALL, slot_left_out),
        "summand-left-out": (SMALL, summand_left_out),
        "clamp-left-out": (SMALL | dict(clamped="step"), clamp_left_out),
        **{
            f"scale-of-another-{of}-{name}-{kind}": (
                dict(N=1, k=1, E=1, H=160, F=160, form=form), partial(scales_rolled, name=name, dim=dim)
            )
            for kind, form in (
                ("e4m3", ("e4m3", 128, (64, 0))), ("e2m1", ("e2m1", 32, (64, 0))),
                ("nvfp4", ("e2m1", 16, (0, 0))), ("int4", ("int4-zeros", 32, (0, 0))),
            )
            for name in ("gate_up", "down")
            for dim, of in ((1, "group"), (2, "row"))
        },
    },
    replays=other_choices,
)  # fmt: skip
SHAPES = shapes_of((7, 3, 5, 100, 33), (18, 2, 3, 33, 24), (3, 1, 1, 17, 1), names=SIZES)
FEW_TOKENS = shapes_of((1, 4, 8, 64, 48), (4, 2, 3, 33, 24), (3, 1, 1, 17, 1), names=SIZES)
SHARED = {
    f"{N}-{k}-{E}-shared-{shared}": dict(N=N, k=k, E=E, H=48, F=24, shared=shared, clamped=True, addend=True)
    for N, k, E, shared in ((5, 3, 5, 2), (16, 2, 4, 1), (17, 3, 4, 2), (40, 4, 9, 1), (35, 2, 2, 2))
}
# Experts without tokens, tokens without local experts, all tokens on one expert, right and wrong hints.
ANY = {
    "elsewhere": dict(N=33, k=2, E=3, H=29, F=19, experts=9, first=4),
    "one-here": dict(N=17, k=4, E=1, H=16, F=7, experts=7, first=6),
    "all-here": dict(N=5, k=4, E=7, H=41, F=50),
}
NOTHING = {
    "no-expert": dict(N=3, k=2, E=0, H=16, F=8, experts=4),
    "no-column": dict(N=3, k=2, E=4, H=16, F=0),
    "no-token": dict(N=0, k=2, E=4, H=16, F=8),
    "no-pair": dict(N=3, k=2, E=4, H=33, F=24, first=9, clamped=True),
    "no-column-but-a-bias": dict(N=5, k=2, E=4, H=16, F=0, clamped=True),
    "nan-of-a-token": dict(N=8, k=2, E=4, H=32, F=16, nan_token=3),
    "nan-of-a-clamped-token": dict(N=8, k=2, E=4, H=32, F=16, nan_token=3, clamped=True),
}
# Type, columns per group, columns of the first groups on other ranks.
FORMATS = (
    ("e4m3", 128, (0, 0)), ("e4m3", 128, (64, 96)), ("e4m3", 128, (8, 120)), ("e4m3", 256, (128, 208)),
    ("e4m3", 4096, (0, 64)), ("e4m3", 32, (0, 8)),
)  # fmt: skip
PACKED_FORMATS = (
    ("e2m1", 32, (0, 0)), ("e2m1", 16, (0, 0)), ("int4", 32, (0, 0)), ("int4-zeros", 64, (32, 0)),
    ("int4", 128, (96, 32)), ("int4-zeros", 128, (0, 64)), ("int4-zeros", 4096, (0, 0)),
)  # fmt: skip
# Ragged groups, cuts inside one, one over all columns; remote and shared experts, biases and clamps.
SCALED = {
    "7-3-5": dict(N=7, k=3, E=5, H=100, F=162, experts=8, clamped=True, addend=True, seed=7, hint=1),
    "18-2-3": dict(N=18, k=2, E=3, H=34, F=24, experts=6, addend=True, seed=18),
}
PACKED = {name: shape | dict(H=160, F=96) for name, shape in SCALED.items()}
SCALED_FEW = {
    "1-4-8": dict(N=1, k=4, E=8, H=288, F=48, experts=11, seed=1, hint=1),
    "2-2-5": dict(N=2, k=2, E=5, H=100, F=162, experts=8, clamped=True, addend=True, seed=7),
}
LONG = shapes_of(
    (1, 8, 128, 2048, 96), (4, 4, 4, 720, 360), (5, 8, 128, 512, 96), (64, 4, 8, 360, 200), (900, 2, 4, 256, 104),
    (64, 8, 128, 2048, 96), (16, 4, 32, 2880, 360),  # enough tokens that down starts early, by many rows
    names=SIZES,
)  # fmt: skip
LONG_PACKED = shapes_of(
    (1, 8, 128, 2048, 96), (5, 8, 128, 512, 192), (64, 4, 8, 352, 224), (900, 2, 4, 256, 96), names=SIZES
)
LONG_SCALED = shapes_of(
    (1, 8, 128, 2048, 96), (5, 8, 128, 512, 192), (64, 4, 8, 352, 208), (900, 2, 4, 256, 104), names=SIZES
)


def half_here(shapes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Halves the local experts to the middle ones."""
    return {name: s | dict(experts=2 * s["E"], addend=True) for name, s in shapes.items()}


OPS = [EXPERTS]
ROWS = [
    *EXPERTS.rows(FEW_TOKENS, modes=FEW, clamped=(False, True, "step"), addend=(True,)),
    *EXPERTS.rows(SHAPES, which=KERNEL, modes=OTHERS, clamped=(False, True, "step"), addend=(True,), pairs=True),
    *EXPERTS.rows({name: SHARED[name] for name in [*SHARED][:1]}, which=KERNEL, modes=FEW),
    *EXPERTS.rows(SHARED, modes=OTHERS, pairs=True),
    *EXPERTS.rows(ANY, modes=OTHERS, pairs=True, choices=("any", "crowded"), hint=(0, 1), clamped=(False, True)),
    *EXPERTS.rows(
        {name: shape | dict(N=3) for name, shape in ANY.items()}, which=KERNEL, modes=FEW, pairs=True,
        choices=("any", "crowded"), hint=(0, 1), clamped=(False, True),
    ),
    *EXPERTS.rows(NOTHING, modes=WAYS, pairs=True, addend=(False, True)),
    *EXPERTS.rows(SCALED, modes=OTHERS, pairs=True, form=FORMATS),
    *EXPERTS.rows(PACKED, modes=OTHERS, pairs=True, form=PACKED_FORMATS),
    *EXPERTS.rows(SCALED_FEW, which=KERNEL, modes=FEW, pairs=True, form=FORMATS),
    *EXPERTS.rows(
        half_here(LONG), which=KERNEL, gpu=True, clamped=(False, True, "step"), dtype=(*FEW_BITS, torch.float32)
    ),
    *EXPERTS.rows(half_here(LONG_SCALED), which=KERNEL, gpu=True, form=FORMATS, dtype=F32_BF16),
    *EXPERTS.rows(half_here(LONG_PACKED), which=KERNEL, gpu=True, form=PACKED_FORMATS, dtype=F32_BF16),
    *EXPERTS.rows(
        {"64-4-8-clamped": half_here(LONG_SCALED)["64-4-8-352-208"]}, which=KERNEL, gpu=True, form=FORMATS,
        dtype=F32_BF16, clamped=(True, "step"),
    ),
]  # fmt: skip
IN_A_GRAPH = dict(k=4, E=8, H=256, experts=16, first=4, dtype=torch.bfloat16, apart=8, poison=False)
GRAPHS = EXPERTS.rows({f"{N}-96": IN_A_GRAPH | dict(N=N, F=96) for N in (2, 32)}, which=KERNEL)
