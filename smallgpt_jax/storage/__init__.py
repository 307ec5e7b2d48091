"""Files: local, in object storage, and JSON that is read back."""
