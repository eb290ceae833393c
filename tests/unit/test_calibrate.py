"""Calibration: constants out of timed rows, parts that fail or hang, the file that it writes, the fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import calibrate, constants
from benchmarks.calibrate import ROWS, assemble, main, measure
from benchmarks.records.recorded_steps import FILES
from helix.planner.hardware import EXTRAPOLATED, MEASURED, sent_bytes
from helix.planner.points import Options, Points
from helix.planner.step import predict
from launch.inputs.hardware import load_hardware, read_hardware
from launch.inputs.shapes import load_spec
from tests.e2e.command_line import as_copies

H200 = load_hardware("h200")
CPU = torch.device("cpu")
# Widths, rates and times from which rows are made; `line` is exact on exact rows, but for float64 in a small lstsq.
EXACT = 1e-6


@given(st.floats(1e-6, 1e-4), st.floats(1e11, 1e13), st.lists(st.integers(1 << 20, 1 << 30), min_size=2, unique=True))
def test_a_line_through_exact_points_is_found(fixed: float, rate: float, sizes: list[int]) -> None:
    found = constants.line(sizes, [fixed + size / rate for size in sizes])
    spread = (max(sizes) - min(sizes)) / rate / (fixed + max(sizes) / rate)
    if spread > 1e-3:  # points that lie on top of each other say nothing of a slope
        assert found == pytest.approx((fixed, rate), rel=1e-4)


def test_constants_of_planted_rows() -> None:
    rows = [{"kv_heads": 1, "bytes": size, "seconds": 5e-6 + size / 4.4e12} for size in (1 << 26, 1 << 29, 1 << 31)]
    found = constants.attention(H200, rows)
    assert found.read_bytes_per_s.value == pytest.approx(4.4e12, rel=EXACT) and found.kernel_s.level == MEASURED
    assert found.kernel_s.value == pytest.approx(5e-6, rel=1e-4)

    rows = [
        {
            "topk": 32, "batch": batch, "bytes": 2 * bounds + 4e6 * batch, "bounds": bounds,
            "seconds": 5e-6 + 4e-6 + batch * 1e-6 + (2 * bounds + 4e6 * batch + bounds) / 4.4e12,
        }
        for batch, bounds in ((1, 1e6), (1, 2e7), (8, 8e6), (4, 1.6e8))
    ]  # fmt: skip
    priced = constants.finding(found, rows)
    for name, value in (("finding_s", 4e-6), ("finding_sequence_s", 1e-6), ("bounds_share", 0.5)):
        price = getattr(priced, name)
        assert price.value == pytest.approx(value, rel=1e-4) and price.level == MEASURED
        assert "32 blocks, fit of 4, 6e+06 to 3.36e+08 B" in price.source, price.source
    cheap = constants.finding(found, [row | {"seconds": 5e-6 + row["bytes"] / 4.4e12} for row in rows])
    assert cheap.finding_s is not None and cheap.bounds_share is not None
    assert (cheap.finding_s.value, cheap.bounds_share.value) == (constants.MIN_S, pytest.approx(1.0)), (
        "nothing costs less than nothing"
    )

    rows = [
        {"bytes": size, "seconds": 3e-6 + size / 5e10, "resolve_seconds": 4e-6, "gpus": 2} for size in (2e6, 8e6, 3e7)
    ]
    offloaded = constants.link(found, rows)
    assert offloaded.link_bytes_per_s is not None and offloaded.link_bytes_per_s.value == pytest.approx(5e10, rel=1e-4)
    assert offloaded.fetch_s is not None and offloaded.fetch_s.value == pytest.approx(7e-6, rel=1e-4)
    assert offloaded.fetch_s.level == MEASURED and "on 2 GPUs at once" in offloaded.fetch_s.source

    times = {1: 2e-6, 8: 7e-6}
    rows = [
        {"rows": n, "bytes": size, "seconds": fixed + size / 4.4e12}
        for n, fixed in times.items()
        for size in (1e7, 3e7)
    ]
    found = constants.products(found, rows)
    assert {n: fixed.value for n, fixed in found.product_s.items()} == pytest.approx(times, rel=1e-4)

    rows = [
        {"heads": 16, "bytes": 1e9, "flops": 1e10, "seconds": 5e-6 + 1e9 / (0.9 * 4.4e12)},
        {"heads": 16, "bytes": 1e8, "flops": 1e9, "seconds": 1e-3},  # fewer bytes: they do not count
        *({"heads": 64, "bytes": 1e8, "flops": 2e10, "seconds": 2e10 / rate} for rate in (1e14, 1.5e14, 2e14)),
    ]
    found = constants.latents(found, rows)
    assert found.latent_share is not None and found.latent_share.value == pytest.approx(0.9, rel=EXACT)
    assert found.latent_flops is not None and found.latent_flops.value == pytest.approx(1.5e14, rel=EXACT)


def comm_rows(rate: float = 2e11) -> list[dict[str, Any]]:
    """Makes the rows of `helix bench comm` for collectives with latencies of 2 and 3 us (NCCL: ten times) over 2, 4."""
    rows = []
    for width, latency in ((2, 2e-6), (4, 3e-6)):
        for name, sizes in (
            ("exchange", (2048, 1 << 18)),
            ("all_reduce_norm", (2048, 1 << 19)),
            ("all_gather", (16, 1024)),
        ):
            op = constants.OPS[name]
            for size in sizes:
                wire = float(sent_bytes(op, width, size * (width if op == "all_gather" else 1))) / rate
                times = {"symm_us": 1e6 * (latency + wire), "nccl_us": 1e6 * (10 * latency + wire)}
                rows.append({"op": name, "ranks": width, "message_bytes": size, **times})
    return rows


def test_collectives_of_planted_rows() -> None:
    for key, factor in (("symm_us", 1), ("nccl_us", 10)):
        found = constants.collectives(comm_rows(), key)
        assert set(found) == {"all_to_all", "all_reduce", "all_gather", "send"}
        for op in ("all_to_all", "all_reduce", "all_gather"):
            latency = {width: c.value for width, c in found[op].latency_s.items()}
            assert latency == pytest.approx({2: factor * 2e-6, 4: factor * 3e-6}, rel=1e-4)
            assert found[op].bytes_per_s.value == pytest.approx(2e11, rel=1e-3)
        assert found["all_gather"].bytes_per_s.level == EXTRAPOLATED  # a kilobyte says nothing of a rate
        assert found["all_to_all"].measured_bytes == 1 << 18


# ---- the command


def test_what_fails_is_left_out_and_the_rest_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part has its time, by a clock that goes on with each row alone."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(calibrate, "time", clock)
    row = {"kv_heads": 1, "rows": 1, "bytes": 1 << 20, "seconds": 1e-3}

    def fails(device: torch.device) -> Iterator[dict[str, Any]]:
        yield row
        raise RuntimeError("out of memory")

    def slow(device: torch.device) -> Iterator[dict[str, Any]]:
        while True:
            clock.now += calibrate.PART_S / 2.5
            yield row

    def broken(device: torch.device) -> Iterator[dict[str, Any]]:
        raise ValueError("no peers")
        yield

    monkeypatch.setattr(calibrate, "PARTS", {"attention": fails, "products": slow, "collectives": broken})
    kept: dict[str, int] = {}
    found = measure(CPU, lambda part, rows: kept.update({part: len(rows)}))
    assert set(found) == set(kept) == {"attention", "products"} and kept == {"attention": 1, "products": 3}
    told = capsys.readouterr()
    assert "out of memory" in told.err and "no peers" in told.err and "products: stopped after" in told.out


def test_a_part_that_hangs_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a timer that is up at once."""
    ended: list[int] = []

    class Timer:
        def __init__(self, seconds: float, end: Callable[[], None]) -> None:
            assert seconds == calibrate.HANGS_S
            self.start, self.cancel = end, lambda: None

    monkeypatch.setattr(calibrate.threading, "Timer", Timer)
    monkeypatch.setattr(calibrate, "PARTS", {"read": lambda device: iter(())})
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: 0.0, sleep=lambda seconds: None))
    monkeypatch.setattr("os._exit", ended.append)
    measure(CPU, lambda part, rows: None)
    assert ended == [1]


def test_what_was_not_measured_is_an_assumption_on_other_hardware() -> None:
    rows = [{"kv_heads": 1, "bytes": size, "seconds": size / 1e12 + 1e-6} for size in (1 << 24, 1 << 28)]
    new = assemble(H200, "NVIDIA X", 2, 5e10, {"attention": rows})
    assert new.name == "NVIDIA X" and new.gpus == 2 and new.memory_bytes.value == 5e10
    assert new.read_bytes_per_s.level == MEASURED
    assert new.collectives["all_to_all"].bytes_per_s.level == EXTRAPOLATED
    assert new.collectives["all_to_all"].bytes_per_s.source.startswith("NVIDIA H200: ")
    assert new.collectives["all_to_all"].measured_bytes == 0 and new.chunk_s.level == EXTRAPOLATED
    same = assemble(H200, H200.name, 4, 5e10, {"collectives": comm_rows()})
    assert same.gpus == 8 and same.kernel_s == H200.kernel_s
    assert same.collectives["all_to_all"].latency_s[4].value == pytest.approx(3e-6, rel=1e-3)
    assert same.over_nccl().collectives["all_to_all"].latency_s[4].value == pytest.approx(3e-5, rel=1e-3)


@pytest.mark.timeout(180)
def test_calibration_runs_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_copies(monkeypatch)
    path = tmp_path / "mine.yaml"
    main([f"output={path}"])
    output = capsys.readouterr()
    assert "mean nothing" in output.out and "failed" not in output.err, output.err
    hardware, data = load_hardware(str(path)), read_hardware(path)
    assert hardware.name == data["calibrated"]["device"] and hardware.gpus == 1
    assert set(hardware.product_s) == {1, 2} and set(hardware.product_s) <= set(ROWS)
    assert hardware.read_bytes_per_s.level == MEASURED and hardware.latent_flops is not None
    assert hardware.finding_s is not None and "select_blocks and flash_decode, 32 blocks" in hardware.finding_s.source
    assert hardware.link_bytes_per_s is not None and "copy_blocks from host memory" in hardware.link_bytes_per_s.source
    assert set(hardware.collectives["all_to_all"].latency_s) == {2} and hardware.nccl
    assert {"versions", "commit", "date", "measured", "launch_us"} <= set(data["calibrated"])
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"start", *calibrate.PARTS}
    assert all(row["seconds"] > 0 for row in rows if row["part"] not in ("start", "collectives"))
    options = Options(weights="bf16", kv="bf16", messages="bf16")
    assert predict(load_spec("qwen2.5-7b"), hardware, Points.of("tp"), 1000, options).ttl_s[0] > 0


def test_fit_on_recorded_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fit.yaml"
    main([f"fit={','.join(map(str, FILES))}", "hardware=h200", f"output={path}"])
    out = capsys.readouterr().out
    assert "held out: within the targets" in out
    found = load_hardware(str(path))
    held = read_hardware(path)["calibrated"]["fitted"]["held_out"]
    assert held["median_error"] <= 0.10 and held["p90_error"] <= 0.20 and held["cells"] >= 12
    assert found.collectives == H200.collectives  # what is not fitted stays


def test_what_calibration_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        return str(left.value.code)

    assert "must end in .yaml" in refused("output=mine.json")
    assert "did you mean output=VALUE?" in refused("--output", "mine.yaml")
    assert "hardware='a100' is unknown" in refused("hardware=a100")
    few = tmp_path / "few.jsonl"
    few.write_text(next(line for line in FILES[0].read_text().splitlines() if "superseded" not in line) + "\n")
    assert "1 recorded steps are too few" in refused(f"fit={few}")
    few.write_text('{"device": "x", "ttl_p50_us": 1}\n')
    assert "line 1: not a recorded step: 'model' is missing" in refused(f"fit={few}")
    monkeypatch.setenv("RANK", "0")
    assert "run it without torchrun" in refused()
