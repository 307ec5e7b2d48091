"""The data pipeline, from text to batches: source → tokenizers → store → packing → batches."""
