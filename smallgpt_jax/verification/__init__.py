"""Verification: checks what a record claims, also by training some of its runs again."""
