"""What the foundation shows on the GPUs of one host, in one go: correctness first, then recall, then memory.

    python benchmarks/foundation.py OUT     (all GPUs of this machine; seconds to minutes each)

Writes OUT/tests.txt (what pytest said) and OUT/foundation.jsonl, a line for each run: the run's record and its name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.needles import SOURCES, make, score  # noqa: E402

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
    with (out / "foundation.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    print(f"{gpus} GPUs, {torch.cuda.get_device_name()}", flush=True)
    for selection in (["tests/kernels", "-n", "8"], ["tests/dist", "tests/e2e", "-m", "gpu", "-s"]):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark", *selection]
        log = out / "tests.txt"
        with log.open("a") as file:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode
        print(f"{' '.join(selection)}: exit code {code}\n{log.read_text()[-2500:]}", flush=True)

    prompts = out / "needles.prompts"
    lines = make(ROOT / "assets/demo-model/tokenizer.json", SOURCES, NEEDLE_LENGTH, NEEDLES)
    prompts.write_text("".join(json.dumps(p) + "\n" for p in lines))
    common = [f"decode.prompts={prompts}", "decode.max_batch=4", "decode.prefill_chunk=8192"]
    for dtype in ("float32", "bfloat16"):
        answers = []
        for kvp in (gpus, 1):
            name = f"needles-32k-{dtype}-kvp{kvp}"
            overrides = [*common, f"model.dtype={dtype}", f"layout.kvp={kvp}", f"decode.output={ROOT / name}.jsonl"]
            run(out, name, overrides, length=NEEDLE_LENGTH)
            answers.append((out / f"{name}.jsonl").read_text().splitlines())
        same = sum(a == b for a, b in zip(*answers, strict=True))
        print(f"{dtype}: {same} of {NEEDLES} answers are equal over {gpus} ranks and over 1", flush=True)
    prompts.unlink()

    run(out, f"llama-8b-1m-kvp{gpus}", ["experiment=llama-1m", f"layout.kvp={gpus}"])
    print((out / "foundation.jsonl").read_text(), flush=True)


if __name__ == "__main__":
    main()
