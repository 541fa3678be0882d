"""
Following and recording: consoles of other programs, and what is redacted before it leaves the machine.

May import engine.files and engine.streams only.
"""
