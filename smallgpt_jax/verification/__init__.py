"""Verification: what a record claims, checked without training and by training some of its runs
again.
"""
