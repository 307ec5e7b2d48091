"""Devices: the mesh and its shardings, processes, and settings of the platform."""
