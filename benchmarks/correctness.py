"""What the foundation shows on the GPUs of one host: tests, recall, and memory.

  python -m benchmarks.correctness out=DIR     about ten minutes on four GPUs

  out    a folder for what comes out
  parts  some of memory, needles, tests (default: all)

Writes DIR/tests.txt (what pytest said) and DIR/correctness.jsonl, a line for each run: the run's record and its name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import torch

from benchmarks.quality.needles import SOURCES, make, score
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import Config, KVConfig, ModelConfig
from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint
from helix.schema import unknown
from helix.setup.engine import build_engine
from helix.setup.parts import make_spec
from helix.tokenizer import load_tokenizer
from launch.inputs.arguments import helped, parse
from launch.inputs.compose import ROOT

DEMO = ROOT / "assets" / "demo-model"
NEEDLE_LENGTH, NEEDLES = 32_768, 50


def run(out: Path, name: str, overrides: list[str], **more: object) -> None:
    """One job; its record, and the seconds it took, become a line."""
    record = out / "record.json"
    record.unlink(missing_ok=True)
    begin = time.perf_counter()
    command = [sys.executable, "torchrun_entry.py", *overrides, "decode.stream=false", f"record={record}"]
    code = subprocess.run(command, cwd=ROOT).returncode
    line = {"name": name, "exit_code": code, "seconds": round(time.perf_counter() - begin, 2), **more}
    if record.exists():
        line |= json.loads(record.read_text())
    results = ROOT / f"{name}.jsonl"
    if results.exists():
        line["needles_found"], line["needles"] = score(results.read_text().splitlines())
        results.replace(out / results.name)
    append(out, line)


def append(out: Path, line: dict[str, object]) -> None:
    with (out / "correctness.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def loopback_answers(kvp: int, dtype: torch.dtype, lines: list[dict[str, object]]) -> list[tuple[int, ...]]:
    """The same prompts over `kvp` ranks that are threads of this process and share one GPU."""
    layout = HelixLayout.create("helix", kvp)
    config = Config(model=ModelConfig(path=str(DEMO)), kv=KVConfig(memory_fraction=0.1))
    tokenizer = load_tokenizer(config.model.path)
    assert tokenizer is not None
    requests = [Request(i, tokenizer.encode(str(line["prompt"])), 8) for i, line in enumerate(lines)]

    def body(world: LoopbackWorld, rank: int) -> list[tuple[int, ...]]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        model = Decoder(make_spec(config), layout, comm, dtype, comm.device)
        Checkpoint(DEMO).load(model.weights)
        engine = build_engine(layout, model, config, 4, 4 * NEEDLE_LENGTH)
        answers: list[tuple[int, ...]] = [()] * len(requests)
        for update in chain.from_iterable(engine.serve(Inbox.of(requests))):
            answers[int(update.id)] += update.new_ids
        return answers

    return run_ranks(kvp, body, timeout_s=300.0, device="cuda")[0]


def tests(out: Path, gpus: int) -> None:
    for selection in (["tests/kernels", "-n", "8"], ["tests/dist", "tests/e2e", "-m", "gpu", "-s"]):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark", *selection]
        log = out / "tests.txt"
        with log.open("a") as file:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode
        print(f"{' '.join(selection)}: exit code {code}\n{log.read_text()[-2500:]}", flush=True)


def needles(out: Path, gpus: int) -> None:
    prompts = out / "needles.prompts"
    lines = make(DEMO / "tokenizer.json", SOURCES, NEEDLE_LENGTH, NEEDLES)
    prompts.write_text("".join(json.dumps(p) + "\n" for p in lines))
    common = [f"decode.prompts={prompts}", "decode.max_batch=4"]
    for dtype in ("float32", "bfloat16"):
        ids = []
        for kvp in (gpus, 1):
            name = f"needles-32k-{dtype}-kvp{kvp}"
            overrides = [*common, f"model.dtype={dtype}", f"layout.kvp={kvp}", f"decode.output={ROOT / name}.jsonl"]
            run(out, name, overrides, length=NEEDLE_LENGTH)
            answers = (out / f"{name}.jsonl").read_text().splitlines()
            ids.append([tuple(json.loads(answer)["output_ids"]) for answer in answers])
        ids.append(loopback_answers(8, getattr(torch, dtype), lines))
        for where, found in ((f"{gpus} GPUs", ids[0]), ("8 loopback ranks on one GPU", ids[2])):
            same = sum(a == b for a, b in zip(found, ids[1], strict=True))
            line = {"name": f"needles-32k-{dtype}-equal", "over": where, "as_one_rank": same, "needles": NEEDLES}
            append(out, line)
            print(line, flush=True)
    prompts.unlink()


def memory(out: Path, gpus: int) -> None:
    run(out, f"llama-8b-1m-kvp{gpus}", ["experiment=llama-1m", f"layout.kvp={gpus}"])


PARTS = {"memory": memory, "needles": needles, "tests": tests}  # the shortest first


def main() -> None:
    """Runs the parts on this host's GPUs."""
    if helped(sys.argv[1:], __doc__):
        return
    try:
        given = parse(sys.argv[1:], {"out": Path, "parts": list[str]}, needed=("out",))
        for part in (chosen := given.get("parts", PARTS)):
            if part not in PARTS:
                raise ValueError(f"parts: {unknown(part, PARTS)}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    gpus, out = torch.cuda.device_count(), given["out"]
    if not gpus:
        sys.exit("error: this needs a GPU, and there is none: `make test` shows the same on CPUs")
    out.mkdir(parents=True, exist_ok=True)
    print(f"{gpus} GPUs, {torch.cuda.get_device_name()}", flush=True)
    for part in chosen:
        PARTS[part](out, gpus)


if __name__ == "__main__":
    main()
