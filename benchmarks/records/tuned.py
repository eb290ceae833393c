"""Writes the result of tuning: a table, a map of gamma against sparsity, and a config in `conf/speculation/`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.ranks.tuning_steps import Measurement, TuningResult
from benchmarks.records.style import panels
from helix.config import Config

HEADER = "# @package _global_"  # Hydra reads it only on the first lines
WRITTEN = f"{HEADER}\n# Written by benchmarks.tune"  # a config that starts like this may be overwritten
WORDS = ("on", "off", "yes", "no", "true", "false", "null")  # YAML would not read these as strings
OPTIONS = {
    "none": (),
    "suffix": ("gamma", "adaptive", "prompt_lookup_max", "suffix_pool_tokens"),
    "sparse": ("policy", "sparsity", "gamma", "adaptive", "noise"),
}


def table(measured: Sequence[Measurement], plain: Measurement) -> list[Sequence[str]]:
    """Returns the cells of a table, headings first."""
    rows: list[Sequence[str]] = [("drafts", "tokens an iteration", "iteration", "tok/s/user", "over plain")]
    for m in measured:
        tokens = f"{m.mean:.2f}" + (f" +- {m.interval:.2f}" if m.interval else "")
        rows.append((str(m.source), tokens, f"{1e3 * m.seconds:.2f} ms", f"{m.rate:.1f}", f"{m.rate / plain.rate:.2f}"))
    return rows


def summary_lines(tuned: TuningResult) -> list[str]:
    """Returns the result, one sentence per line."""
    lines = []
    if tuned.plateau is not None:
        ends = "" if tuned.reached_plateau else ", the largest share tried: with more keys, more drafts may be accepted"
        lines.append(f"Accepted tokens level off at {100 * tuned.plateau:.3g}% of the keys{ends}.")
    rates = [f"{m.source} {m.rate:.1f}" for m in (tuned.plain, tuned.sparse, tuned.ngram) if m is not None]
    lines.append(f"Tokens/s of a user: {'; '.join(rates)}.")
    fastest = tuned.fastest
    gain = fastest.rate / tuned.plain.rate
    if fastest is tuned.plain:
        lines.append("Plain decoding is the fastest here: drafts do not pay off.")
    elif fastest is tuned.ngram:
        lines.append(
            f"Drafts by prompt lookup are the fastest here: {fastest.source}, {gain:.2f} times plain decoding."
        )
    else:
        lines.append(f"The model drafts for itself: {fastest.source}, {gain:.2f} times plain decoding.")
    return lines


def as_yaml(config: Config, tuned: TuningResult, where: str) -> str:
    """Returns the config of `conf/speculation/` for the fastest source, with the other settings of its drafter."""
    fastest = tuned.fastest
    speculation = replace(fastest.source.over(config.speculation), gamma=fastest.source.gamma)
    values = {key: getattr(speculation, key) for key in ("drafter", *OPTIONS[speculation.drafter])}
    gain = (
        f"{fastest.rate / tuned.plain.rate:.2f} times plain decoding"
        if fastest is not tuned.plain
        else "plain decoding"
    )
    lines = [f"{WRITTEN} for {where}: {gain}.", "speculation:"]
    lines += [f"  {key}: {_scalar(value)}" for key, value in values.items()]
    if fastest.source.sparsity is not None:
        lines += [f"# Measured with kv.append_block={config.blocks.append}."]
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_name(name: str, directory: Path) -> Path:
    """Returns the config file of a name.

    Raises:
        ValueError: the name is invalid, or the file was written by something else.
    """
    path = directory / f"{name}.yaml"
    if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) or name.lower() in WORDS:
        raise ValueError(
            f"name={name} must be letters, digits, - and _, a letter first, and none of {', '.join(WORDS)}"
        )
    if path.exists() and not path.read_text(encoding="utf-8").startswith(WRITTEN):
        raise ValueError(f"name={name}: {path} was not written by helix tune: choose another name")
    return path


def heat_map(measured: Sequence[Measurement], tuned: TuningResult) -> Figure:
    """Maps tokens/s per user over plain decoding, for each measured pair of gamma and sparsity."""
    drafted = {(m.source.sparsity, m.source.gamma): m for m in measured if m.source.sparsity is not None}
    sparsities, gammas = (sorted({key[i] for key in drafted if key[i] is not None}) for i in (0, 1))
    gains = np.full((len(sparsities), len(gammas)), np.nan)
    for (sparsity, gamma), m in drafted.items():
        gains[sparsities.index(sparsity), gammas.index(gamma)] = m.rate / tuned.plain.rate
    figure, ((axes,),) = panels(1, height=0.4 * len(sparsities) + 1.4)
    image = axes.imshow(gains, origin="lower", aspect="auto", cmap="viridis")
    middle = (np.nanmin(gains) + np.nanmax(gains)) / 2
    for (row, column), gain in np.ndenumerate(gains):
        if not np.isnan(gain):
            best = (sparsities[row], gammas[column]) == (tuned.sparse.source.sparsity, tuned.sparse.source.gamma)
            color, weight = "white" if gain < middle else "black", "bold" if best else "normal"
            axes.text(column, row, f"{gain:.2f}", ha="center", va="center", color=color, weight=weight)
    axes.set_xticks(range(len(gammas)), [str(gamma) for gamma in gammas])
    axes.set_yticks(range(len(sparsities)), [f"{100 * sparsity:.3g}%" for sparsity in sparsities])
    axes.grid(visible=False)
    axes.set(
        xlabel="drafts of a step (more in a cell is better)",
        ylabel="keys that drafts read",
        title="tokens/s/user over plain decoding",
    )
    figure.colorbar(image, ax=axes)
    return figure
