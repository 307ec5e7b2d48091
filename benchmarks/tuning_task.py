"""Writes a sentiment task in the form of SST-2, which a bag of words solves, as JSON lines for fine-tuning.

    python benchmarks/tuning_task.py --output=data/sentiment

A sentence has neutral words and one to three words of opinion, all positive or all negative, in random order. Half of
the sentences are of each kind. The sentences of test.jsonl are not in train.jsonl.
"""

import json
import random

from absl import app, flags

from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.paths import local_path

OUTPUT = flags.DEFINE_string("output", None, "Folder to write to.", required=True)

NEUTRAL = ("the film story actor plot music scene camera director ending dialogue cast script pace sound it was has "
           "and with a of in this that its very quite rather").split()
WORDS = {"positive": ("good great lovely moving funny clever warm bright fresh honest charming rich superb elegant "
                      "gentle").split(),
         "negative": ("bad awful boring clumsy dull cold empty stale false ugly tired weak flat noisy "
                      "cheap").split()}
PROMPT = "Classify the following sentence as positive or negative.\nSentence: {}\nSentiment:"
COUNTS = {"train": 4000, "test": 500}


def example(rng: random.Random) -> dict[str, str]:
    label = rng.choice(sorted(WORDS))
    words = rng.choices(WORDS[label], k=rng.randint(1, 3)) + rng.choices(NEUTRAL, k=rng.randint(4, 8))
    rng.shuffle(words)
    return {"prompt": PROMPT.format(" ".join(words)), "completion": f" {label}"}


def main(_) -> None:
    rng, folder = random.Random(0), local_path("--output", OUTPUT.value)
    distinct = {row["prompt"]: row for row in (example(rng) for _ in range(2 * sum(COUNTS.values())))}
    rows = iter(distinct.values())
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in COUNTS.items():
        write_atomically(folder / f"{name}.jsonl", "".join(json.dumps(next(rows)) + "\n" for _ in range(count)))
    print(json.dumps({"output": str(folder), **COUNTS}))


if __name__ == "__main__":
    app.run(main)
