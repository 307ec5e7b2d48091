"""PyTorch code for Hugging Face's libraries, copied to exported folders. It imports nothing from
this project.
"""
