"""What happens inside a trained model: with depth, in attention, by position, and without some of
its parts.
"""
