"""What every kind of job gets: the objects of a rank after all ranks have connected."""

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
    """A rank's part of a job.

    Attributes:
        backend: what `comm.backend` resolved to.
        load: loads the model, and the draft model or layer if the config has one; a collective call.
        phases: timings so far.
    """

    plan: CheckedRun
    comm: TorchDistCommunicator
    backend: str
    load: Callable[[], tuple[Decoder, DraftModel | DraftLayer | None]]
    console: Console
    phases: Phases
