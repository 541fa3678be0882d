"""
What a training stands on: checkpoints, processes and devices, the plan of sizes, costs, the largest batch.

May import engine.text, engine.formats, engine.tracking and what lies below them; never debug.
"""
