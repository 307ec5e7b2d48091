"""Paths, atomic writes, locks, the cache folder, object storage, and JSON that is read back."""
