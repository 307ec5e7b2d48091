"""Measures inside a trained model: by depth, in attention, by position, without some blocks."""
