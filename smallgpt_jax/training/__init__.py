"""Training: optimizer, learning rate, train step, loop."""
