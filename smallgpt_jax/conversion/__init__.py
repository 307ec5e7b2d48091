"""Checkpoints in and out: Hugging Face folders, and the `.pt` files of the paper's released code.

Between a foreign format and our parameters lie tensors as PyTorch would have them, by name
(`tensors.py`); each format is a table of its own names for these.
"""
