"""Benchmarks, through lm-evaluation-harness: its tasks and its arithmetic, our forward pass."""
