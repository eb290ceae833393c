"""A few cases of the differential fuzzer; `python -m tests.e2e.fuzz` runs as many as one likes."""

from __future__ import annotations

import pytest

from tests.e2e.fuzz import Tally, case_of, quiet, run_case
from tests.e2e.fuzz_configs import MAKERS


@pytest.mark.parametrize("seed", [0, 1])  # one written plainly, one not
@pytest.mark.parametrize("family", MAKERS)
def test_random_models_are_read_as_transformers_reads_them(family: str, seed: int) -> None:
    quiet()
    tally = Tally(family)
    run_case(case_of(family, seed), tally)
    assert tally.otherwise == [] and tally.cases == 1
