"""
The parts of a training run: checkpoints, processes and devices, settings, sizes, costs.

May import engine.text, engine.formats, engine.tracking and the layers below them, but not
engine.debug.
"""
