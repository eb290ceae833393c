"""What the ranks of a job have once they met: every kind of work starts from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comm.torch_dist import TorchDistCommunicator
from helix.models import Decoder
from helix.speculation import DraftModel
from launch.inputs.preflight import CheckedRun
from launch.inputs.prompts import ResultFile
from launch.job.report import Console, Phases

# What the record says of the work, and how many requests were refused.
Done = tuple[dict[str, Any], int]


@dataclass(frozen=True)
class Task:
    """A rank's part of a job.

    Attributes:
        backend: the one that `comm.backend` came to.
        load: loads the model, and the draft model where the plan has one; called on all ranks, or on none.
        tokenizer: rank 0's; None where the model has none.
        results: rank 0's, of a job that decodes; None elsewhere.
        phases: of the job so far.
    """

    plan: CheckedRun
    comm: TorchDistCommunicator
    backend: str
    load: Callable[[], tuple[Decoder, DraftModel | None]]
    tokenizer: Any | None
    results: ResultFile | None
    console: Console
    phases: Phases
