"""Training objectives: the examples of a batch, and the terms of the loss."""
