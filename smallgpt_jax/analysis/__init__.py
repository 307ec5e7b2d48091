"""What the record of a comparison says: `analyse(record)` returns `Findings`.

Pure: no text, no figures, no JAX. report/ puts findings into words, tables and figures.
"""
