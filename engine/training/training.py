"""The parts of a training, as train.py makes them and hands them to what works on them."""
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configurator import Config


@dataclass(frozen=True)
class Training:
    """
    config: the settings; record: the settings and what was derived from them, for checkpoints and
    trackers; state: what a resumed run needs besides weights and optimizer; args: ModelArgs; model:
    the Transformer; network: the model as a training step calls it, wrapped for several processes
    or compiled; amp: the autocast context; changes: [[setting, before, now]] of a resumed run;
    exports: whether model files are written besides checkpoints.
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


@dataclass(frozen=True)
class Resolved:
    """
    What is known before the model is made.

    config: every setting as the training will use it; start: the step folder or model that the
    weights are loaded from, None for new weights; resuming: whether start is this run's own
    checkpoint; changes: as of Training; clock: see progress.session_clock; setup: the
    costs.TrialSetup; prepared: the tokens; args: ModelArgs.
    """
    config: Config
    start: Path | None
    resuming: bool
    changes: list
    clock: dict
    setup: Any
    prepared: Any
    args: Any
