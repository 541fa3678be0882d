"""The structures that hold the objects of a training, and its settings once they are resolved."""
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configurator import Config


@dataclass(frozen=True)
class Training:
    """
    The objects of a training, passed to functions as one argument.

    config: the settings; record: the settings and the values derived from them, for checkpoints and
    trackers; state: what a resumed run needs besides weights and optimizer; dataset: a Dataset of
    data.py; args: ModelArgs; model: the Transformer; network: the model as a training step calls
    it, wrapped for several processes or compiled; opt: an optim.CombinedOptimizer; amp: the
    autocast context; changes: [[setting, before, now]] of the settings that the user changed when
    resuming; exports: whether model files are written besides checkpoints; teachers: a
    distill.Teachers, whose predictions the model learns, None without --teacher.
    """
    config: Config
    record: dict
    state: dict
    dataset: Any
    args: Any
    model: torch.nn.Module
    network: torch.nn.Module
    opt: Any
    device: torch.device
    amp: Any
    changes: list
    exports: bool
    teachers: Any = None


@dataclass(frozen=True)
class Resolved:
    """
    The settings and data of a training, before its model is made.

    config: every setting as the training will use it; start: the step folder or model that the
    weights are loaded from, None for new weights; resuming: whether start is this run's own
    checkpoint; changes: see Training; clock: the time limits of the run, see
    progress.session_clock; setup: a costs.TrialSetup; prepared: the prepared tokens; args:
    ModelArgs.
    """
    config: Config
    start: Path | None
    resuming: bool
    changes: list
    clock: dict
    setup: Any
    prepared: Any
    args: Any
