"""Tunes self-speculation on your prompts and layout: the share of keys over which the model drafts, and gamma.

  helix tune DIR sample.jsonl name=mine layout.kvp=2 layout.tpa=4
  torchrun --nproc-per-node=8 -m benchmarks.tune name=mine ...           on existing ranks, for example on several hosts
  helix tune qwen2.5-7b name=shape model.load=random bench.acceptance=0.9 bench.points=[1x1M]
                                                                     timing only, at a fixed acceptance rate

Then `speculation=mine` decodes with the result. The three steps follow Vegas, section 3.4:

  1. With speculation.gamma drafts (default 11), increase the share of keys until accepted tokens level off: take the
     smallest share that no larger one beats by 2% and by more than the paired 95% interval over the prompts.
  2. With this share, increase gamma until two values in a row are slower than the fastest.
  3. With this gamma, try smaller shares, or else larger ones, as long as that is faster.

Plain decoding and ngram (with each gamma) are measured for comparison. The fastest is written, including ngram or plain
decoding; plain decoding wins unless another is 2% faster.

  name             writes conf/speculation/NAME.yaml, unless another tool wrote it; tuned/NAME.jsonl keeps what was
                   measured, and a restart resumes from it; tuned/NAME.png maps gamma against sparsity
  bench.gammas     values of gamma to try, ascending (default 1,2,3,4,6,8,11)
  bench.sparsities shares of the keys to try, ascending (default from 0.01 to 0.2)
  bench.grid       true: measure every pair, for the map
  decode.*         prompts, max_batch sequences at a time, max_tokens of each
  KEY=VALUE        all other keys of a run: python -m benchmarks.entry --help

With more prompts than decode.max_batch, every measurement prefills them again, batch by batch. Exit code 1: it failed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.program import PROGRAM
from benchmarks.ranks.tuning import candidates
from benchmarks.ranks.tuning_file import read_measured
from benchmarks.ranks.tuning_steps import Measurement
from benchmarks.ranks.tuning_steps import run as search
from benchmarks.records import tuned
from benchmarks.records.columns import terminal
from benchmarks.records.style import save
from benchmarks.schema import LabConfig, compose_config
from launch import run
from launch.inputs import command_parser
from launch.inputs.arguments import handle_help
from launch.inputs.command_parser import CONF
from launch.inputs.files import check_writable, write_atomically
from launch.inputs.prompt_files import PromptFile

DEFAULTS = {"bench": "tune", "speculation": "sparse", "speculation.gamma": "11"}
TYPED = replace(PROGRAM.cli_command, name="helix tune", words=("model", "decode.prompts"))
DIRECTORY = Path("tuned")  # of measurements


def overrides(arguments: Sequence[str], leads: bool = True) -> tuple[str, list[str]]:
    """Parses the command line into the name and a run's overrides.

    Args:
        leads: whether this process writes the files.

    Raises:
        ValueError: there is no name, or it is taken or invalid.
    """
    arguments = command_parser.read(arguments, TYPED).overrides
    options = dict(text.partition("=")[::2] for text in arguments)
    if not (name := options.get("name", "")):
        raise ValueError("name missing: add name=NAME, and the result is conf/speculation/NAME.yaml")
    for path in (tuned.check_name(name, CONF / "speculation"), DIRECTORY / f"{name}.png") if leads else ():
        path.parent.mkdir(exist_ok=True)
        check_writable("name", path)
    rest = [text for text in arguments if not text.startswith("name=")]
    return name, [
        *(f"{key}={value}" for key, value in DEFAULTS.items() if key not in options),
        *rest,
        f"bench.output={DIRECTORY / f'{name}.jsonl'}",
    ]


def conclude(name: str, config: LabConfig) -> bool:
    """Prints the table and writes the map and the config from what was measured; False if measurements are missing.

    Raises:
        ValueError: it was measured with other settings.
        OSError: a file cannot be written.
    """
    prompts = PromptFile(Path(config.decode.prompts)) if config.decode.prompts is not None else []
    head, rows = read_measured(config, prompts)
    measured = [Measurement.of(row) for row in rows]
    try:
        found = search(candidates(config), {m.source: m for m in measured}.__getitem__)
    except KeyError:
        return False
    table = terminal(tuned.table(measured, found.plain))
    Console(width=max(100, Console().width), highlight=False).print(table)
    for sentence in tuned.summary_lines(found):
        print(sentence)
    layout, bench = config.layout, config.bench
    work = f"{len(prompts)} prompts" if prompts else f"{bench.points[0]} at an acceptance rate of {bench.acceptance}"
    where = f"{config.model.path or 'a shape'}, {layout.mode} kvp={layout.kvp} tpa={layout.tpa}, {work}"
    picture, file = DIRECTORY / f"{name}.png", CONF / "speculation" / f"{name}.yaml"
    save(tuned.heat_map(measured, found), picture, f"measured on {head['device']}, commit {head['commit']}")
    write_atomically(file, tuned.as_yaml(config, found, where))
    print(f"wrote {file} (speculation={name}), {picture} and {config.bench.output}")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures on the existing ranks or on new ones; the first rank concludes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return 0
    rank = int(os.environ.get("RANK", "0"))
    try:
        name, settings = overrides(arguments, rank == 0)
        config = compose_config(settings)
        if "RANK" not in os.environ and conclude(name, config):
            return 0
        code = run.main(settings, PROGRAM)
        if code == 0 and rank == 0:
            conclude(name, config)
        return code
    except (ValueError, OSError) as error:
        if rank:  # all ranks fail alike: only the first prints why
            time.sleep(2.0)  # let the first print before this exit takes it down
        else:
            print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
