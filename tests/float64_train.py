"""
Run train.py in float64, with the same arguments. A difference between two runs is then an error,
because rounding is amplified to about 1e-12 at most.

This replaces the default dtype and the two places that ask for float32 by name: Tensor.float(),
which the ops and the rotary table call, and the dtype in which Muon orthogonalizes.
"""
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double
sys.path.insert(0, str(ROOT))

import optim

orthogonalize = optim.orthogonalize
optim.orthogonalize = lambda g, dtype: orthogonalize(g, torch.float64)
runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
