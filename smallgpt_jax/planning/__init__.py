"""Estimates of memory and speed from compiled programs."""
