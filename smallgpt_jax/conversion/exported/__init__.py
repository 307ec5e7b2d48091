"""PyTorch code that exports contain. It imports nothing from this project."""
