"""Training: the compiled program, the loop, the run around it."""
