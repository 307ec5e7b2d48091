"""Optimizers, learning rates, and which parameters are trained."""
