"""The Helix paper's figures and tables as rows of numbers, each with its provenance.

Operating point: throughput and batch are compared among points that are as fast for a user as the baseline's fastest,
or as a stated fraction of it. GPU counts are 1 to 64, batches `BATCHES`, unless a row says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from benchmarks.models.search import best_at, frontier, ordered, search, select_points
from helix.models import DecoderSpec
from helix.planner.hardware import DTYPE_BYTES, PROVENANCE, Constant, Hardware
from helix.planner.points import DP, MEDHA, TP, Options
from helix.planner.step import StepCost

Row = dict[str, Any]
PAPER = Options(queries="all", shared="dense")  # section 2.1.1: every rank projects the queries of all its heads
BATCHES = np.unique(np.concatenate([np.arange(1, 129), 2 ** np.arange(7, 13), 3 * 2 ** np.arange(6, 11)]))
POWERS = tuple(2**i for i in range(13))
WIDTHS = POWERS[:7]  # 1 to 64
FRACTIONS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LENGTH = 10**6
LOOSE = 1 - 1e-9


@dataclass(frozen=True)
class Claim:
    """The paper's claims about a model (sections 3.2 and 3.3).

    Attributes:
        user: maximum interactivity, Helix over baseline.
        batch, gpu: sequences and tokens/s/GPU, Helix over baseline.
        hopb_off: maximum loss of tokens/s/user without HOP-B.
    """

    user: float
    batch: float
    gpu: float
    hopb_off: float


CLAIMS = {"deepseek-r1": Claim(1.5, 32, 32, 0.01), "llama-3.1-405b": Claim(1.13, 4, 4, 0.12)}


@dataclass(frozen=True)
class Setting:
    """The setting of a comparison."""

    hardware: Hardware
    options: Options = PAPER
    length: int = LENGTH
    gpus: tuple[int, ...] = tuple(range(1, 65))
    batches: tuple[int, ...] = tuple(map(int, BATCHES))

    def in_powers(self) -> Setting:
        """Returns the setting with the GPU counts and batches that are powers of two."""
        return replace(self, gpus=WIDTHS, batches=POWERS)

    def run(self, spec: DecoderSpec, modes: tuple[str, ...]) -> StepCost:
        return search(
            spec, self.hardware, self.length, self.options, gpus=self.gpus, batches=np.array(self.batches), modes=modes
        )


def baseline_modes(spec: DecoderSpec) -> tuple[str, ...]:
    """Returns the paper's baseline: TP, PP, EP with data-parallel attention, and Medha's KVP, except with MLA."""
    return ("tp", "dp") if spec.attention.latent is not None else ("tp", "dp", "medha")


def components(base: StepCost) -> dict[str, StepCost]:
    """Splits the baseline's points by strategy."""
    p = base.points
    selected = {
        "TP": (p.mode == TP) & (p.pp == 1),
        "TP with PP": (p.mode == TP) & (p.pp > 1),
        "DP attention, EP or TP in the FFN": p.mode == DP,
        "Medha (KVP, FFN on TP)": p.mode == MEDHA,
    }
    return {name: select_points(base, mask) for name, mask in selected.items() if mask.any()}


def compare(base: StepCost, helix: StepCost, fraction: float = 1.0) -> Row:
    """Returns Helix over baseline at `fraction` of the baseline's maximum interactivity."""
    top = float(base.tokens_per_s_user.max())
    user = fraction * top * LOOSE
    base_gpu, base_batch = best_at(base, user)
    helix_gpu, helix_batch = best_at(helix, user)
    assert base_gpu is not None and base_batch is not None
    row: Row = {"fraction": fraction, "tokens_per_s_user": fraction * top}
    row |= {"baseline": _words(base, base_gpu), "baseline_gpu": base.tokens_per_s_gpu[base_gpu]}
    row |= {"baseline_users": int(base.points.users[base_batch]), "provenance": base.provenance(base_gpu)}
    if helix_gpu is None or helix_batch is None:  # Helix is slower than the baseline
        return row | {"helix": "-", "helix_gpu": 0.0, "helix_users": 0, "gpu_gain": 0.0, "batch_gain": 0.0}
    row |= {"helix": _words(helix, helix_gpu), "helix_gpu": helix.tokens_per_s_gpu[helix_gpu]}
    row |= {"helix_users": int(helix.points.users[helix_batch])}
    row["gpu_gain"] = row["helix_gpu"] / row["baseline_gpu"]
    row["batch_gain"] = row["helix_users"] / row["baseline_users"]
    row["provenance"] = PROVENANCE[max(base.level[base_gpu], helix.level[helix_gpu])]
    return row


def headline(spec: DecoderSpec, setting: Setting) -> tuple[Row, StepCost, StepCost]:
    """Returns maximum interactivity, throughput and batch of Helix over the baseline, with both sets of points."""
    base, helix = setting.run(spec, baseline_modes(spec)), setting.run(spec, ("helix",))
    fastest = int(ordered(helix, helix.tokens_per_s_user)[0])
    row = compare(base, helix)
    row["user_gain"] = float(helix.tokens_per_s_user.max() / base.tokens_per_s_user.max())
    row["fastest_helix"] = _words(helix, fastest)
    row["gpu_gain_95"] = compare(base, helix, 0.95)["gpu_gain"]
    row["provenance"] = helix.provenance(fastest)
    return row, base, helix


def curve(base: StepCost, helix: StepCost) -> list[Row]:
    """Returns the gain over interactivity, since the headline is at the baseline's fastest point."""
    return [compare(base, helix, fraction) for fraction in FRACTIONS]


def front(name: str, step: StepCost) -> Row:
    """Returns a frontier by columns: a value for each of its points."""
    p, best = step.points, frontier(step)
    columns = {"gpus": p.gpus, "batch": p.batch, "tokens_per_s_user": step.tokens_per_s_user,
               "tokens_per_s_gpu": step.tokens_per_s_gpu}  # fmt: skip
    return {"series": name, "layout": [p.describe(i) for i in best]} | {
        key: values[best].tolist() for key, values in columns.items()
    }


@dataclass(frozen=True)
class DenseLayer:
    """A layer that only takes reading time (appendix A): shape, bytes per element, and bytes/s."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    item: float = DTYPE_BYTES["fp4"]
    rate: float = 8e12

    def kv_s(self, batch: int, length: int, tpa: Any, kvp: Any) -> Any:
        """Returns the seconds to read K and V of `batch` sequences (first formula); widths are numbers or arrays."""
        return batch * 2 * np.ceil(self.kv_heads / tpa) * self.head_dim * (length / kvp) * self.item / self.rate

    def weights_s(self, tpa: Any, tpf: Any) -> Any:
        """Returns the seconds to read the weights (second formula); the output projection is split over `tpa` ranks."""
        query = self.hidden * (self.q_heads / tpa) * self.head_dim
        output = self.hidden * self.q_heads * self.head_dim / tpa
        kv = 2 * self.hidden * np.ceil(self.kv_heads / tpa) * self.head_dim
        return (query + output + kv + 3 * self.hidden * self.ffn / tpf) * self.item / self.rate


FIGURE_1 = DenseLayer(16384, 128, 8, 128, 65536)


def figure_1() -> list[Row]:
    """Returns the roofline of KV and weight reads over TP width, KV length and KVP width (appendix A; us per layer)."""

    def row(panel: str, x: int, tpa: int, kvp: int, tpf: int, length: int) -> Row:
        kv, weights = FIGURE_1.kv_s(8, length, tpa, kvp), FIGURE_1.weights_s(tpa, tpf)
        return {"panel": panel, "x": x, "tpa": tpa, "kvp": kvp, "tpf": tpf, "length": length,
                "kv_us": 1e6 * kv, "weights_us": 1e6 * weights, "provenance": "roofline"}  # fmt: skip

    rows = [row("TP width", n, n, 1, n, LENGTH) for n in WIDTHS]
    rows += [row("KV length", s, 8, 1, 8, s) for s in (2**i for i in range(15, 23))]
    return rows + [row("KVP width", kvp, 8, kvp, 8 * kvp, LENGTH) for kvp in (1, 2, 4, 8)]


def figure_3(compute: float = 2.0, exchange: float = 1.2, batch: int = 8) -> list[Row]:
    """Returns the paper's timeline: attention and exchange of each request, in its units, without and with HOP-B."""
    rows, free = [], 0.0
    for i in range(batch):
        done = (i + 1) * compute
        behind = batch * compute + i * exchange
        start = max(done, free)
        free = start + exchange
        for hopb, phase, begin, end in (
            ("off", "attention", done - compute, done), ("off", "exchange", behind, behind + exchange),
            ("on", "attention", done - compute, done), ("on", "exchange", start, free),
        ):  # fmt: skip
            rows.append({"hopb": hopb, "request": i, "phase": phase, "start": begin, "end": end})
    return rows


Exchange = Literal["batched", "serial"]
EXCHANGES: tuple[Exchange, ...] = "batched", "serial"
# Speeds over which losses without HOP-B are reported, as fractions of the fastest; the paper gives no range.
SPEEDS = (0.9, 0.8, 0.7, 0.5, 0.0)


def hopb_steps(spec: DecoderSpec, setting: Setting, exchange: Exchange) -> tuple[StepCost, StepCost]:
    """Returns the paper's grids (KVP x TPA, no data parallelism) with HOP-B on and off, the same points in order."""
    steps = []
    for on in (True, False):
        selected = replace(setting.options, hopb=on, exchange=exchange)
        step = replace(setting, options=selected).run(spec, ("helix",))
        steps.append(select_points(step, step.points.dp == 1))
    return steps[0], steps[1]


def hopb_lost(on: StepCost, off: StepCost) -> list[Row]:
    """Returns the largest loss of tokens/s/user without HOP-B over each range of `SPEEDS`.

    Losses are `fixed` at the same tokens/s/GPU, as in the paper; `same` at the same layout and batch.
    """
    best, behind = frontier(on), frontier(off)[::-1]
    best = best[on.tokens_per_s_gpu[best] <= off.tokens_per_s_gpu.max()]
    # Frontiers are points, not lines: interpolate the speed between those of `off` (both logarithmic).
    reached = np.interp(
        np.log(on.tokens_per_s_gpu[best]),
        np.log(off.tokens_per_s_gpu[behind]),
        np.log(off.tokens_per_s_user[behind]),
    )
    user = on.tokens_per_s_user[best]
    fixed, same = 1 - np.exp(reached) / user, 1 - off.tokens_per_s_user[best] / user
    rows = []
    for speed in SPEEDS:
        among = np.flatnonzero(user >= speed * on.tokens_per_s_user.max())
        i = int(among[np.argmax(fixed[among])])
        rows.append(
            {"speed": speed, "fixed": float(fixed[i]), "median": float(np.median(fixed[among])),
             "same": float(same[among].max()), "at": _words(on, int(best[i])), "provenance": on.provenance(best[i])}
        )  # fmt: skip
    return rows


# Of the sweep: factors of kernel times, of collectives, and of latency and rate of the exchange alone. Of a batched
# exchange the latency is the same with HOP-B and without.
FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0)
EXCHANGE_FACTORS = ((0.01, 0.1, 0.25, 0.5, 1.0, 2.0), (1.0, 0.1, 0.01))


def hopb_sweep(specs: Mapping[str, DecoderSpec], setting: Setting) -> Iterator[Row]:
    """Yields the losses without HOP-B of each model and range of speeds, for each set of constants."""
    setting, latency_s = setting.in_powers(), setting.hardware.collectives["all_to_all"].latency_s
    for exchange, kernel, collective, latency, link in product(EXCHANGES, FACTORS, FACTORS, *EXCHANGE_FACTORS):
        if exchange == "batched" and latency != 1:
            continue
        hardware = scaled(setting.hardware, kernel=kernel, collective=collective)
        ops = dict(hardware.collectives)
        ops["all_to_all"] = replace(
            ops["all_to_all"],
            latency_s={width: constant.times(latency) for width, constant in latency_s.items()},
            bytes_per_s=ops["all_to_all"].bytes_per_s.times(link),
        )
        changed = replace(setting, hardware=replace(hardware, collectives=ops))
        row: Row = {
            "kind": "hopb-sweep",
            "exchange": exchange,
            "kernel": kernel,
            "collective": collective,
            "latency": latency,
            "link": link,
        }
        for model, spec in specs.items():
            row[model] = [lost["fixed"] for lost in hopb_lost(*hopb_steps(spec, changed, exchange))]
        yield row


def scaled(
    hardware: Hardware, *, kernel: float = 1.0, collective: float = 1.0, read: float = 1.0, link: float = 1.0
) -> Hardware:
    """Scales kernel times, collective latencies, read and link rates; 0 removes times."""

    def times(constants: Mapping[int, Constant], factor: float) -> dict[int, Constant]:
        return {size: constant.times(factor) for size, constant in constants.items()}

    return replace(
        hardware,
        read_bytes_per_s=hardware.read_bytes_per_s.times(read),
        kernel_s=hardware.kernel_s.times(kernel),
        product_s=times(hardware.product_s, kernel),
        chunk_s=hardware.chunk_s.times(kernel),
        collectives={
            op: replace(c, latency_s=times(c.latency_s, collective), bytes_per_s=c.bytes_per_s.times(link))
            for op, c in hardware.collectives.items()
        },
    )


def sensitivity(spec: DecoderSpec, setting: Setting) -> Iterator[Row]:
    """Yields the headline with one setting changed at a time."""
    hw, options = setting.hardware, setting.options
    changes: dict[str, Setting] = {
        "as stated": setting,
        "bytes and FLOPs alone": replace(setting, hardware=scaled(hw, kernel=0, collective=0, link=1e30)),
        "kernels x 1/2": replace(setting, hardware=scaled(hw, kernel=0.5)),
        "kernels x 2": replace(setting, hardware=scaled(hw, kernel=2)),
        "collectives x 1/2": replace(setting, hardware=scaled(hw, collective=0.5)),
        "collectives x 2": replace(setting, hardware=scaled(hw, collective=2)),
        "90% of the read rate": replace(setting, hardware=scaled(hw, read=0.9)),
        "half the link rate": replace(setting, hardware=scaled(hw, link=0.5)),
        "2^20 tokens": replace(setting, length=1 << 20),
        "4M tokens": replace(setting, length=4 * LENGTH),
        "messages in bf16": replace(setting, options=replace(options, messages="bf16")),
        "an exchange for each request": replace(setting, options=replace(options, exchange="serial")),
        "HOP-B off": replace(setting, options=replace(options, hopb=False)),
        "queries gathered where faster": replace(setting, options=replace(options, queries="faster")),
        "shared experts among the routed": replace(setting, options=replace(options, shared="routed")),
        "TP hides its all-reduces": replace(setting, options=replace(options, overlap=("tp",))),
        "TP and Helix hide theirs": replace(setting, options=replace(options, overlap=("tp", "helix"))),
        "GPUs and batches in powers of two": setting.in_powers(),
    }
    for name, changed in changes.items():
        row, _, _ = headline(spec, changed)
        keys = ("user_gain", "batch_gain", "gpu_gain", "gpu_gain_95", "baseline", "helix", "provenance")
        yield {"change": name, **{key: row[key] for key in keys}}


def simulated(model: str, spec: DecoderSpec, setting: Setting) -> Iterator[Row]:
    """Yields what is simulated of a model: each row has a `kind`."""

    def of(kind: str, row: Row, **fields: Any) -> Row:
        return {"kind": kind, "model": model, **fields, **row}

    row, base, helix = headline(spec, setting)
    yield of("headline", row, points=len(base.points) + len(helix.points))
    for name, step in {**components(base), "Baseline": base, "Helix": helix}.items():
        yield of("front", front(name, step))
    yield from (of("gain", row) for row in curve(base, helix))
    for exchange in EXCHANGES:
        on, off = hopb_steps(spec, setting, exchange)
        for name, step in (("HOP-B on", on), ("HOP-B off", off)):
            yield of("hopb", front(name, step), exchange=exchange)
        for row in hopb_lost(on, off):
            yield of("hopb-lost", row, exchange=exchange, paper=CLAIMS[model].hopb_off)
    yield from (of("sensitivity", row) for row in sensitivity(spec, setting))


def rounded(value: Any) -> Any:
    """Rounds the floats of a row to six digits, so that the last bits of a sum do not change a record."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(float(f"{value:.6g}"), 12) + 0.0 if isinstance(value, float) else value  # no -0.0


def _words(step: StepCost, i: int) -> str:
    p = step.points
    return f"{p.describe(i)}, batch {p.batch[i]}, {p.gpus[i]} GPUs"
