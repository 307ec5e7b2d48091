"""Names that the readers of a comparison share. Imports nothing, so that `choose` starts fast."""

RESULTS_FILE = "results.json"  # in a comparison's folder
RESULTS_FORMAT = 1
