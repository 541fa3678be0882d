"""
Checks before the first step, overfit, dry run, lr_find, profiler, and instruments that look into a
model.

May import every other package of engine; no other package of engine imports it.
"""
