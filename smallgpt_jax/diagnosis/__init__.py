"""What happens inside a trained model: with depth, in attention, by position."""
