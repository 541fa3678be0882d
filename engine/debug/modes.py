"""
The modes of train.py. Each function of MODES takes a Training and train.py's train_step, and
returns the exit code of the program or None for 0. dry_run(config, main) takes train.py's main
instead, and runs the real program.
"""
from engine.debug.dry_run import dry_run  # noqa: F401
from engine.debug.lr_find import lr_find
from engine.debug.overfit import overfit
from engine.debug.profiler import profile

MODES = {"overfit": overfit, "lr_find": lr_find, "profile": profile}
