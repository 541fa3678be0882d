"""What is refused before anything is computed. `s` has the settings of train.py as attributes."""
import importlib.util

from configurator import fail
from engine import parallel


def check_settings(s):
    """Refuse settings that can't train."""
    for name in ("eval_interval", "log_interval", "batch_size", "gradient_accumulation_steps", "max_iters"):
        if getattr(s, name) < 1:
            fail(f"{name} is {getattr(s, name)}, expected at least 1")
    for name in ("eval_iters", "warmup_iters", "weight_decay", "grad_clip", "min_lr", "vocab_size", "depth",
                 "peak_tflops"):
        if getattr(s, name) < 0:
            fail(f"{name} is {getattr(s, name)}, expected 0 or more")
    if not 0 < s.learning_rate < 1:
        fail(f"learning_rate is {s.learning_rate}, expected above 0 and below 1; 1e-3 is a good start")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(s, name) < 1:
            fail(f"{name} is {getattr(s, name)}, expected 0 <= {name} < 1")
    if s.optimizer not in ("muon", "adamw"):
        fail(f"optimizer is {s.optimizer!r}, expected muon or adamw")
    if s.schedule not in ("cosine", "linear"):
        fail(f"schedule is {s.schedule!r}, expected cosine or linear")
    if s.wandb_watch not in ("off", "all", "gradients", "parameters"):
        fail(f"wandb_watch is {s.wandb_watch!r}, expected off, all, gradients or parameters")
    if s.sharded and parallel.world > 1 and not importlib.util.find_spec("safetensors"):
        fail("--sharded=True saves its slices as safetensors; needed: pip install safetensors")
