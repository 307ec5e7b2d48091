"""Imports models from Hugging Face folders and from `.pt` files of the paper's released code. Exports models to Hugging
Face folders.

`tensors.py` maps our parameters to named tensors in PyTorch's layouts. The module of each format maps our tensor names
to the names in that format. `low_rank.py` converts models to matrices of low rank.
"""
