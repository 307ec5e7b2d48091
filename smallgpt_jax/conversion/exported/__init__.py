"""PyTorch code that is copied to exported folders, for Hugging Face's libraries; imports nothing of this project."""
