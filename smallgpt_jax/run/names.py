"""The names of the files and folders in a workdir.

`smallgpt_jax.convert` writes the workdir of an imported model: `tokenizer/`, `origin.json`, a
checkpoint of step 0, and a `config.json` with only the group `model`. Training adds the rest.
"""

CONFIG_FILE = "config.json"
ORIGIN_FILE = "origin.json"  # the source of an imported model
STORE_FILE = "store.json"  # the description of the training text; exists once a run has started
TOKENIZER_FOLDER = "tokenizer"
METRICS_FILE = "metrics.jsonl"
SESSIONS_FILE = "sessions.jsonl"  # one line per start, resumption or divergence
CHECKPOINT_FOLDER = "checkpoints"
DAMAGED_FOLDER = "damaged_checkpoints"
EVALUATION_FOLDER = "evaluations"
DIAGNOSIS_FOLDER = "diagnosis"
PROFILE_FOLDER = "profile"
CURVES_FILE = "curves.png"
TRACKER_FILE = "tracker.json"  # the tracker's id of the run
LOCK_FILE = ".lock"  # exists while the run is training
