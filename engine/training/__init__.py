"""
What a training is made of: checkpoints, processes and devices, settings, sizes, costs.

May import engine.text, engine.formats, engine.tracking and what is below them, but not
engine.debug.
"""
