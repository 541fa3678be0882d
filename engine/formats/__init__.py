"""
Model files: names, shapes and types of their tensors, and readers of GGUF, llama2.c, Hugging Face
and Meta files.

May import engine.ops, engine.files, engine.untrusted, engine.advice, configurator.py, model.py and
tokenizer.py; never text, training or debug.
"""
