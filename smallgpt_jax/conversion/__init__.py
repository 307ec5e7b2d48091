"""Imports and exports models."""
