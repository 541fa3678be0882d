"""
Text to tokens: readers of files, encodings, preparation, the built-in stories, a survey of a text.

May import engine.formats, engine.files, engine.streams and tokenizer.py; never training or debug.
"""
