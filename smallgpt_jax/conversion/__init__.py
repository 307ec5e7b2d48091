"""Imports and exports models: Hugging Face folders, and `.pt` files of the paper's released code
(import only).
"""
