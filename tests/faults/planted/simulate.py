"""Mistakes in what steps are predicted to take."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

COST = ("tests/unit/test_simulate_cost.py",)
BILL = ("tests/unit/test_sparse_bill.py",)

FAULTS = [
    Fault(
        "an all-reduce goes once round", "helix/planner/hardware.py",
        '(2 if op == "all_reduce" else 1)', "1", COST,
    ),
    Fault(
        "experts of one token less", "helix/planner/layer.py",
        "(1 - top_k / experts) ** tokens)", "(1 - top_k / experts) ** (tokens - 1))", COST,
    ),
    Fault(
        "a pipeline without its ends", "helix/planner/layer.py",
        "np.maximum(chunks * compute + exchange, compute + chunks * exchange)",
        "np.maximum(chunks * compute, chunks * exchange)", COST,
    ),
    Fault(
        "a part of a KV head", "benchmarks/papers/rows.py",
        "batch * 2 * np.ceil(self.kv_heads / tpa)", "batch * 2 * (self.kv_heads / tpa)", COST,
    ),
    Fault(
        "KV is not divided", "helix/planner/layer.py",
        "min(window or self.length, self.length) / self.points.kvp", "min(window or self.length, self.length)", COST,
    ),
    Fault(
        "a rank's share of chosen blocks, not rounded up", "helix/planner/points.py",
        "-(-self.topk // (kvp * self.parts)) -", "self.topk // (kvp * self.parts) -", COST,
    ),
    Fault(
        "drafts read one choice of blocks", "helix/planner/layer.py",
        "if self._chooses(window) is None else self.rows", "if self._chooses(window) is None else self.sequences", COST,
    ),
    Fault(
        "what attention takes anyway counts as finding", "benchmarks/constants.py",
        "row[\"bytes\"] / rate - fixed for row", "row[\"bytes\"] / rate for row",
        ("tests/unit/test_calibrate.py::test_constants_of_planted_rows",),
    ),
    Fault(
        "bounds are gone through at the whole bandwidth", "helix/planner/layer.py",
        "0.0, 0, hw.bounds_share)", "0.0, 0)", COST,
    ),
    Fault(
        "what is held out is fitted on", "benchmarks/records/sparse_bill.py",
        "bill = fit(*kept)", "bill = fit(dense, chosen)", BILL,
    ),
    Fault(
        "a block-sparse row may read everything", "benchmarks/records/recorded_steps.py",
        "if read > held - 1 and", "if read > held + 1 and", BILL,
    ),
    Fault(
        "the token behind the drafts", "helix/planner/points.py",
        "for i in range(self.gamma + 1))", "for i in range(self.gamma))", COST,
    ),
]  # fmt: skip
