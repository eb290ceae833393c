"""Planner: finds the best layout of a model on a number of GPUs, and explains why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from helix.config import MAX_QUERIES, MOST_SEQUENCES
from helix.layers.specs import MoESpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.planner.hardware import QUANTIZED, QUANTIZED_KV, Hardware
from helix.planner.points import DP, Grid, LayerDrafts, Options, Points, Speculation, layouts
from helix.planner.step import StepCost, memory_of, predict
from helix.setup.buffers import max_chunk, piece_bytes, prompt_bytes, sampling_bytes, token_buffers

MODES = ("tp", "medha", "helix")  # compared by default
CHUNKS = (1, 2, 4, 8)  # numbers of HOP-B chunks that the runtime uses
GAMMAS = (1, 2, 4, 8, 16)
SELF_GAMMAS = tuple(range(1, 17))  # the same if drafts have a cost
MAX_APPEND_BLOCK = 16  # the runtime's append block
MAX_DRAFT_APPEND_BLOCK = 64  # the same for self-speculation (conf/speculation/sparse.yaml)
MAX_IMBALANCE = 1.01  # tokens of the fullest rank over the mean; above, use a smaller append block
BATCHES = np.unique(np.round(2 ** np.arange(0, 12.01, 0.25))).astype(np.int64)  # tried if the query has no batch
DTYPE = "bfloat16"  # of activations
MIN_KV_FRACTION = 0.01  # of the memory, if prompt chunks need all of it
MEDIAN_ERROR = 0.02  # of predicted steps on an H200 (docs/simulator.md)
MIN_MENTIONED_SHARE = 0.02  # of the step: reasons name phases that differ by more, and the largest difference


@dataclass(frozen=True)
class PlanQuery:
    """Query to the planner.

    Attributes:
        context: tokens of each sequence in the cache.
        batch: number of sequences; None: the best throughput within `ttl_s`.
        ttl_s: maximum seconds per token; None: no limit.
        acceptance: probability that a draft is accepted; None: no speculation.
        gamma: drafts per step; None: the best of GAMMAS, or of SELF_GAMMAS.
        sparsity: share of keys that drafts of self-speculation read; None: another drafter.
        layer: the draft layer; None, and no sparsity: drafts cost nothing.
        modes: modes to compare; as in the runtime, dp only for dense steps without drafts.
        widths: names and values of widths that layouts must have.
        chunks: numbers of HOP-B chunks to try, 1 (off) first.
        options: dtypes, page size, share of the memory; the planner sets the rest.
    """

    spec: DecoderSpec
    hardware: Hardware
    gpus: int
    context: int
    batch: int | None = 1
    ttl_s: float | None = None
    acceptance: float | None = None
    gamma: int | None = None
    sparsity: float | None = None
    layer: LayerDrafts | None = None
    modes: tuple[str, ...] = MODES
    widths: tuple[tuple[str, int], ...] = ()
    chunks: tuple[int, ...] = CHUNKS
    options: Options = Options(weights="bf16", kv="bf16", messages="bf16")  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("gpus", "context", "batch", "gamma"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.batch is not None and self.batch > MOST_SEQUENCES:
            raise ValueError(f"batch={self.batch} must be at most {MOST_SEQUENCES}")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ValueError(f"ttl_ms={1e3 * self.ttl_s:g} must be positive")
        if self.gpus > self.hardware.gpus:
            known = f"{self.hardware.name} has {self.hardware.gpus} GPUs in an NVLink domain"
            raise ValueError(
                f"gpus={self.gpus}, but {known}, and the planner does not predict several domains: set at most "
                f"{self.hardware.gpus}"
            )
        if self.batch is None and self.ttl_s is None:
            raise ValueError("set batch, or set ttl_ms to plan the largest batch within it")
        if self.gamma is not None and self.acceptance is None:
            raise ValueError(f"gamma={self.gamma} needs acceptance: set it to the probability that a draft is accepted")
        if self.gamma is not None and self.gamma >= MAX_QUERIES:
            raise ValueError(f"gamma={self.gamma} must be at most {MAX_QUERIES - 1}, the runtime's limit")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance={self.acceptance:g} must be a probability, from 0 to 1")
        if self.draft_has_cost and self.acceptance is None:
            drafter = "speculation=sparse" if self.layer is None else "a draft layer"
            raise ValueError(f"{drafter} needs acceptance: set it to the probability that a draft is accepted")

    @property
    def draft_has_cost(self) -> bool:
        return self.sparsity is not None or self.layer is not None

    @property
    def gammas(self) -> tuple[int, ...]:
        if self.acceptance is None:
            return (0,)
        return (0, self.gamma) if self.gamma is not None else (0, *(SELF_GAMMAS if self.draft_has_cost else GAMMAS))

    def settings(self, options: Options, chunks: int, gamma: int, append_block: int) -> Options:
        drafts = None
        if gamma and self.acceptance is not None:
            drafts = Speculation(gamma, self.acceptance, self.sparsity, self.layer)
        return replace(options, speculation=drafts, hopb=chunks > 1, chunks=chunks, append_block=append_block)


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its best settings, and its prediction.

    Attributes:
        chunks: number of HOP-B chunks; 1: off.
        gamma: drafts per step; 0: no speculation.
        ttl_s: token-to-token latency of a sequence.
        weight_bytes, kv_bytes: on the fullest rank's GPU.
        host_bytes: keys and values in the fullest rank's host memory.
        prefix_bytes: a sequence's pages on the fullest rank, which `kv.prefix_host_bytes` holds of a prefix.
        free_bytes: rest of the GPU's memory, for activations, graphs and buffers.
        largest_batch: most sequences of this length that fit.
        longest_context: longest sequences that fit at this batch, in tokens.
        phases: seconds per token, by phase.
        provenance: of the worst input, one of hardware.PROVENANCE.
    """

    layout: HelixLayout
    batch: int
    chunks: int
    append_block: int
    gamma: int
    ttl_s: float
    tokens_per_s_user: float
    tokens_per_s_gpu: float
    weight_bytes: float
    kv_bytes: float
    host_bytes: float
    prefix_bytes: float
    free_bytes: float
    largest_batch: int
    longest_context: int
    phases: dict[str, float]
    provenance: str

    @property
    def points(self) -> Points:
        return Points.of(**vars(self.layout), batch=self.batch)

    @property
    def name(self) -> str:
        return self.points.describe(0)


@dataclass(frozen=True)
class RejectedLayout:
    """A layout in which the batch does not fit.

    Attributes:
        weight_bytes, missing_bytes: on the fullest rank; of GPU and host memory, the one that lacks more.
        largest_batch: most sequences that would fit.
    """

    layout: HelixLayout
    weight_bytes: float
    missing_bytes: float
    largest_batch: int


class NoLayoutFits(ValueError):
    """No layout has enough memory; the message is `reason`, plus what would fit."""

    def __init__(self, reason: str, remedies: Sequence[str] = ()) -> None:
        super().__init__("; ".join([reason, *remedies]))
        self.reason = reason


@dataclass(frozen=True)
class Ranking:
    """All layouts of a query, best first, layouts within `ttl_s` before others.

    Attributes:
        reason: why the first layout is the best, and whether any layout is within `ttl_s`.
        verdict: whether splitting KV over GPUs (kvp of at least 2) helps, and why.
    """

    query: PlanQuery
    choices: list[PlannedLayout]
    rejected: list[RejectedLayout]
    reason: str
    verdict: str

    def meets_ttl(self, choice: PlannedLayout) -> bool:
        return self.query.ttl_s is None or choice.ttl_s <= self.query.ttl_s


def plan(query: PlanQuery) -> Ranking:
    """Compares all layouts of exactly `gpus` GPUs, each with its best HOP-B chunks, gamma and, if unset, batch.

    Raises:
        NoLayoutFits: no layout has enough memory.
        ValueError: the model or hardware is not modeled, or there is no such layout.
    """
    q = query
    choices, rejected = [], []
    for grid, options in _grids(q):
        best = _best(q, grid, options)
        if isinstance(best, RejectedLayout):
            rejected.append(best)
        else:
            choices.append(best)
    if not choices:
        raise _no_layout_fits(q, rejected)
    ranking = Ranking(q, choices, sorted(rejected, key=lambda r: r.missing_bytes), "", "")

    def key(choice: PlannedLayout) -> tuple[float, ...]:
        speed = choice.ttl_s if q.batch is not None else -choice.tokens_per_s_gpu
        row = choice.layout
        # Speeds equal to nine digits are ties: the layout with the smallest widths wins.
        return (not ranking.meets_ttl(choice), float(f"{speed:.9e}"), row.kvp, row.ep, row.mode != "tp", row.tpa)

    choices.sort(key=key)
    return replace(ranking, reason=_reason(ranking), verdict=_verdict(ranking))


def _grids(q: PlanQuery) -> list[tuple[Grid, Options]]:
    # All layouts of the runtime on the query's GPUs, with options.
    sparse, offload = q.options.sparse, q.options.offload
    plain = q.acceptance is None and sparse is None and offload is None and (q.batch is None or q.gpus <= q.batch)
    # All query heads of a KV head take part in a global selection.
    max_tpa = q.gpus if sparse is None or sparse.choice == "local" else q.spec.attention.kv_heads
    grids = [
        grid
        for grid in sorted(layouts(q.spec, [q.gpus], q.modes, pp=False), key=lambda grid: grid.kvp)
        if grid.dp == 1 or (grid.mode == DP and grid.dp == q.gpus and plain)
        if grid.tpa <= max_tpa and all(getattr(grid, name) == width for name, width in q.widths)
    ]
    # Blocks of sparse attention are pages and append blocks.
    blocks = {kvp: sparse.block if sparse else _append_block(q.context, kvp) for kvp in {grid.kvp for grid in grids}}
    return [(grid, replace(q.options, dispatch="all", append_block=blocks[grid.kvp])) for grid in grids]


def _append_block(length: int, kvp: int, largest: int = MAX_APPEND_BLOCK) -> int:
    # Halve the runtime's append block until tokens are balanced.
    block = largest
    while block > 1 and -(-length // (block * kvp)) * block > MAX_IMBALANCE * length / kvp:
        block //= 2
    return block


def _fitting_batches(q: PlanQuery, grid: Grid, options: Options) -> tuple[Points, Options] | RejectedLayout:
    # Batches for which a layout has memory, with the share for KV; or the memory that it lacks.
    batches = np.array([q.batch]) if q.batch is not None else BATCHES[grid.dp <= BATCHES]  # or groups would idle
    points = Points.crossed([grid], batches)
    memory = memory_of(q.spec, q.hardware, points, q.context, options)
    weights = float(memory.weight_bytes[0])
    options = _reserve_prompt_memory(q, points.layout(0), weights, options)
    memory = memory_of(q.spec, q.hardware, points, q.context, options)
    fits = points.batch <= memory.largest_batch
    if not fits.any():
        room = (q.hardware.memory_bytes.value - weights) * options.memory_fraction
        missing = float(memory.kv_bytes[0] - room)
        if (offload := options.offload) is not None:
            room = room if offload.gpu_bytes is None else min(room, offload.gpu_bytes)
            missing = max(float(memory.kv_bytes[0] - room), float(memory.host_bytes[0] - offload.host_bytes))
        return RejectedLayout(points.layout(0), weights, missing, int(memory.largest_batch[0]))
    return points[fits], options


def _best(q: PlanQuery, grid: Grid, options: Options) -> PlannedLayout | RejectedLayout:
    room = _fitting_batches(q, grid, options)
    if isinstance(room, RejectedLayout):
        return room
    points, options = room
    # A global selection communicates inside attention, which chunks would split.
    one_choice = options.sparse is not None and options.sparse.choice == "global"
    found: list[tuple[float, PlannedLayout]] = []
    for gamma in q.gammas:
        block = options.append_block
        if gamma and q.sparsity is not None:
            block = _append_block(q.context, grid.kvp, MAX_DRAFT_APPEND_BLOCK)
        for chunks in q.chunks if grid.kvp > 1 and not one_choice else CHUNKS[:1]:
            tried = q.settings(options, chunks, gamma, block)
            step = predict(q.spec, q.hardware, points, q.context, tried)
            i = _fastest(q, step)
            if i is None or (chunks > step.points.batch[i]):
                continue
            value = float(step.ttl_s[i]) if q.batch is not None else -float(step.tokens_per_s_gpu[i])
            late = q.ttl_s is not None and step.ttl_s[i] > q.ttl_s
            value = value + 1e9 * late  # layouts beyond the limit come last
            if not found or value < found[-1][0]:
                found.append((value, _planned_layout(q, step, i, tried)))
    return found[-1][1]  # not empty: plain steps were tried at all batches that fit


def _reserve_prompt_memory(q: PlanQuery, layout: HelixLayout, weight_bytes: float, options: Options) -> Options:
    # Limit KV to what the engine leaves besides prompt chunks, as `build_engine` does.
    whole = int(q.hardware.memory_bytes.value - weight_bytes)
    if whole <= 0:
        return options
    matrix, quantized_kv = largest_matrix(q.spec, layout, options), options.kv in QUANTIZED_KV
    free = max(whole - piece_bytes(q.spec, matrix, quantized_kv, DTYPE, captured=True), 0)
    chunk = options.prompt_chunk or max_chunk(token_buffers(q.spec, layout, 0, DTYPE), free, q.spec.experts is not None)
    left = free - prompt_bytes(q.spec, layout, 0, chunk, q.context, DTYPE, captured=True)
    left -= sampling_bytes(q.batch or 1, 1, len(layout.vocab_rows(0, q.spec.vocab)), captured=True)
    fraction = max(min(free * options.memory_fraction, left) / whole, MIN_KV_FRACTION)
    return replace(options, memory_fraction=fraction, prompt_chunk=chunk)


def largest_matrix(spec: DecoderSpec, layout: HelixLayout, options: Options) -> int:
    """Returns the elements of the first rank's largest quantized matrix that prompts dequantize; 0: there is none."""
    quantized = {kind for kind in QUANTIZED if options.stored(kind).kind != "bf16"}
    mixers = {layer.mixer for layer in spec.layers if quantized & {"weights", "output"}}
    ffns = {of.ffn for of in spec.layers if ("shared_experts" if isinstance(of.ffn, MoESpec) else "dense") in quantized}
    sizes = [mixer.largest_matrix(layout, 0) for mixer in mixers]
    return max([0, *sizes, *(ffn.largest_matrix(layout, 0, spec.hidden) for ffn in ffns)])


def _fastest(q: PlanQuery, step: StepCost) -> int | None:
    # Index of the best batch: the query's, or the fastest within the limit, else the smallest.
    fits = np.flatnonzero(step.fits)  # drafts need memory for a few more tokens
    if not len(fits):
        return None
    if q.batch is not None:
        return int(fits[0])
    assert q.ttl_s is not None
    meeting = fits[step.ttl_s[fits] <= q.ttl_s]
    return int(meeting[np.argmax(step.tokens_per_s_gpu[meeting])]) if len(meeting) else int(fits[0])


def _planned_layout(q: PlanQuery, step: StepCost, i: int, options: Options) -> PlannedLayout:
    weights, kv = float(step.memory.weight_bytes[i]), float(step.memory.kv_bytes[i])
    free, drafts = q.hardware.memory_bytes.value - weights, options.speculation
    tokens = drafts.tokens if drafts is not None else 1.0
    return PlannedLayout(
        layout=step.points.layout(i),
        batch=int(step.points.batch[i]),
        chunks=options.chunks or 1,
        append_block=options.append_block,
        gamma=drafts.gamma if drafts is not None else 0,
        ttl_s=float(step.ttl_s[i]),
        tokens_per_s_user=float(step.tokens_per_s_user[i]),
        tokens_per_s_gpu=float(step.tokens_per_s_gpu[i]),
        weight_bytes=weights,
        kv_bytes=kv,
        host_bytes=float(step.memory.host_bytes[i]),
        prefix_bytes=float(step.memory.prefix_bytes[i]),
        free_bytes=free - kv,
        largest_batch=int(step.memory.largest_batch[i]),
        longest_context=min(
            _longest_context(q, step, i, free * options.memory_fraction, options), q.spec.max_positions
        ),
        phases={phase.name: float(phase.seconds[i]) / tokens for phase in step.phases if phase.launches[i]},
        provenance=step.provenance(i),
    )


def _longest_context(q: PlanQuery, step: StepCost, i: int, room_bytes: float, options: Options) -> int:
    # On the fullest rank: the inverse of `memory_of`.
    point = step.points[np.array([i])]
    if options.offload is not None:  # of two memories

        def lacks(length: int) -> bool:
            memory = memory_of(q.spec, q.hardware, point, length, options)
            return bool(memory.largest_batch[0] < point.batch[0])

        return bisect_left(range(1, q.spec.max_positions + 1), True, key=lacks)
    block, page = options.append_block, options.page_size
    cycle = block * int(step.points.kvp[i])

    def pages(length: int) -> int:
        return -(-(-(-(length + options.step_tokens) // cycle) * block) // page)

    longer = q.context + max(cycle, page * cycle // block)
    kv_bytes = float(step.memory.kv_bytes[i])  # with windows, states and others that do not grow with the length
    more_bytes = float(memory_of(q.spec, q.hardware, point, longer, options).kv_bytes[0]) - kv_bytes
    if not more_bytes:
        return q.spec.max_positions
    more_pages = int((room_bytes - kv_bytes) / more_bytes * (pages(longer) - pages(q.context)))
    return (pages(q.context) + more_pages) * page // block * cycle - options.step_tokens


def curve(q: PlanQuery, choice: PlannedLayout) -> StepCost:
    """Predicts a planned layout at every batch that fits."""
    batches = BATCHES[(choice.layout.dp <= BATCHES) & (choice.largest_batch >= BATCHES)]
    point = choice.points
    points = Points(*(np.repeat(getattr(point, field.name), len(batches)) for field in fields(point)))
    options = q.settings(replace(q.options, dispatch="all"), choice.chunks, choice.gamma, choice.append_block)
    return predict(q.spec, q.hardware, replace(points, batch=batches), q.context, options)


# ---- in words


def _reason(ranking: Ranking) -> str:
    first, limit = ranking.choices[0], ranking.query.ttl_s
    late = ""
    if limit is not None and not ranking.meets_ttl(first):
        late = f"No layout meets ttl_ms={1e3 * limit:g}: the closest, {first.name}, takes {_ms(first.ttl_s)}. "
    return late + _why_first(ranking)


def _why_first(ranking: Ranking) -> str:
    first, *others = ranking.choices
    if not others:
        return f"{first.name} is the only layout with enough memory."
    ties = [c for c in others if abs(c.ttl_s / first.ttl_s - 1) < 1e-6 and c.batch == first.batch]
    runner_up = next((c for c in others if c not in ties), None)
    same = f"{first.name} is level with {', '.join(c.name for c in ties)}"
    if runner_up is None:
        return f"{same}."
    comparison = f"{_compare(ranking, first, runner_up)}."
    close = [
        c.name for c in others if c not in ties and _speed(ranking, first) < (1 + MEDIAN_ERROR) * _speed(ranking, c)
    ]
    closer = f" Within the prediction error of {MEDIAN_ERROR:.0%}: {', '.join(close)}; measure them." if close else ""
    return comparison + (f" {same}." if ties else "") + closer


def _speed(ranking: Ranking, choice: PlannedLayout) -> float:
    # Ranks layouts; 0 beyond the limit.
    if not ranking.meets_ttl(choice):
        return 0.0
    return choice.tokens_per_s_user if ranking.query.batch is not None else choice.tokens_per_s_gpu


def _verdict(ranking: Ranking) -> str:
    split = next((c for c in ranking.choices if c.layout.mode == "helix" and c.layout.kvp > 1), None)
    whole = next((c for c in ranking.choices if c.layout.kvp == 1), None)
    q = ranking.query
    if q.widths:
        return f"Helix is not compared here: {' '.join(f'layout.{n}={w}' for n, w in q.widths)} is given."
    left_out = f"Helix is not compared here: modes={','.join(q.modes)} leave out"
    if split is None:
        if q.gpus > 1 and "helix" not in q.modes:
            return f"{left_out} helix."
        why = "a single GPU cannot split KV" if q.gpus == 1 else "none of its layouts has enough memory"
        return f"Helix does not help here: {why}."
    if whole is None and not any(r.layout.kvp == 1 for r in ranking.rejected):
        if "tp" not in q.modes:
            return f"{left_out} tp."
        heads = ", ".join(f"{kv} KV heads and {query} query heads" for query, kv in q.spec.heads)
        why = f"there is no plain TP over {q.gpus} GPUs, {heads} cannot be split into {q.gpus}"
        return f"Helix is not compared here: {why}."
    if whole is None:
        return f"Helix helps here: without splitting KV (kvp=1) nothing fits; {split.name} does."
    if ranking.choices.index(split) < ranking.choices.index(whole):
        return f"Helix helps here: {_compare(ranking, split, whole)}."
    return f"Helix does not help here: {_compare(ranking, whole, split)}."


def _compare(ranking: Ranking, a: PlannedLayout, b: PlannedLayout) -> str:
    # How much faster `a` is than `b`, and in which phases; times are per token.
    speedup = b.ttl_s / a.ttl_s - 1
    times = f"{_ms(a.ttl_s)} a token instead of {_ms(b.ttl_s)}"
    if a.batch != b.batch:
        more = (
            f"{a.tokens_per_s_gpu:.1f} tokens/s/GPU at batch {a.batch} instead of "
            f"{b.tokens_per_s_gpu:.1f} at batch {b.batch}"
        )
        return f"{a.name} gives more than {b.name}: {more} ({times})"
    if (limit := ranking.query.ttl_s) is not None and b.ttl_s > limit >= a.ttl_s:
        times += f", where {_ms(limit)} are allowed"
    names = dict.fromkeys([*a.phases, *b.phases])
    gains = {name: b.phases.get(name, 0.0) - a.phases.get(name, 0.0) for name in names}
    named = [n for n in sorted(gains, key=lambda n: -abs(gains[n])) if abs(gains[n]) >= MIN_MENTIONED_SHARE * a.ttl_s]
    largest = max(gains, key=lambda n: abs(gains[n]))
    shorter, longer = _phases(gains, named or [largest])
    why = ", but ".join(part for part in (shorter, longer) if part)
    than = f"{speedup:.1%} faster than" if speedup >= 0 else f"{-speedup:.1%} slower than"
    return f"{a.name} is {than} {b.name}: {times}; {why}"


def _phases(gains: dict[str, float], names: Sequence[str]) -> tuple[str, str]:
    shorter = ", ".join(f"{n} {_ms(gains[n])} shorter" for n in names if gains[n] > 0)
    longer = ", ".join(f"{n} {_ms(-gains[n])} longer" for n in names if gains[n] < 0)
    return shorter, longer


def _no_layout_fits(q: PlanQuery, rejected: list[RejectedLayout]) -> ValueError:
    if not rejected:
        fixed = "".join(f" layout.{name}={width}" for name, width in q.widths)
        dp = (
            ": dp needs at least as many sequences as GPUs, attention=dense, kv.offload=none and speculation=none"
            if "dp" in q.modes
            else ""
        )
        return ValueError(f"modes={','.join(q.modes)}{fixed} have no layout of {q.gpus} GPUs for this workload{dp}")
    closest = min(rejected, key=lambda r: r.missing_bytes)
    batch, memory = q.batch or 1, q.hardware.memory_bytes.value
    wanted = f"{batch} sequence{'s' if batch > 1 else ''} of {q.context} tokens"
    gpus = f"{q.gpus} x {q.hardware.name} ({memory / 1e9:.0f} GB each)"
    remedies = []
    if (weights := min(r.weight_bytes for r in rejected)) > memory:
        why = f"the weights alone take {weights / 1e9:.1f} GB per GPU"
    else:
        why = f"the closest, {closest.layout}, lacks {closest.missing_bytes / 1e9:.1f} GB per GPU"
        fewer = largest_batch(q)
        remedies.append(f"batch={fewer} would fit" if fewer else "not one sequence fits")
    if q.gpus < q.hardware.gpus:
        enough = min_gpus(q)
        none = f"gpus={q.hardware.gpus} (a whole NVLink domain) would not do either"
        remedies.append(none if enough is None else f"gpus={enough} would do")
    return NoLayoutFits(f"no layout of {gpus} has memory for {wanted}: {why}", remedies)


# ---- what would fit


def min_gpus(q: PlanQuery) -> int | None:
    """Returns the smallest larger number of GPUs of one NVLink domain with enough memory, or None."""
    return next((n for n in range(q.gpus + 1, q.hardware.gpus + 1) if _fits(replace(q, gpus=n))), None)


def largest_batch(q: PlanQuery) -> int:
    """Returns the most sequences of this length that fit, up to the query's batch."""
    return bisect_left(range(1, (q.batch or 1) + 1), True, key=lambda n: not _fits(replace(q, batch=n)))


def longest_context(q: PlanQuery) -> int:
    """Returns the longest sequences that fit at this batch, in tokens, a multiple of 1024; 0: none."""
    lengths = range(1024, q.context, 1024)
    return 1024 * bisect_left(lengths, True, key=lambda n: not _fits(replace(q, context=n)))


def _fits(q: PlanQuery) -> bool:
    return any(not isinstance(_fitting_batches(q, grid, options), RejectedLayout) for grid, options in _grids(q))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
