"""The common start of every kind of work: the objects of a rank once all ranks have met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comm.torch_dist import TorchDistCommunicator
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.speculation import DraftModel
from launch.inputs.preflight import CheckedRun
from launch.job.report import Console, Phases

# The measured part of the record, and the number of refused requests.
JobResult = tuple[dict[str, Any], int]


@dataclass(frozen=True)
class Task:
    """A rank's share of a job.

    Attributes:
        backend: the backend that `comm.backend` resolved to.
        load: loads the model, and the draft model or layer if the config has one; called on all ranks, or on none.
        phases: timings of the job so far.
    """

    plan: CheckedRun
    comm: TorchDistCommunicator
    backend: str
    load: Callable[[], tuple[Decoder, DraftModel | DraftLayer | None]]
    console: Console
    phases: Phases
