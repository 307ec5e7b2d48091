"""Import and export: Hugging Face folders, and the `.pt` files of the paper's released code.

`tensors.py` maps our parameters to named tensors in PyTorch's layouts. Each format's module renames these tensors.
"""
