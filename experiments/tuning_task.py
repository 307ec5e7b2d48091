"""Writes a task as JSON lines for fine-tuning: examples to train on, and others to test on.

    python experiments/tuning_task.py --output=data/sentiment
    python experiments/tuning_task.py --output=data/topics --task=topics

`sentiment` has the form of SST-2, and a bag of words solves it. A sentence has neutral words and
one to three words of opinion, all positive or all negative, in random order. Half of the sentences
are of each kind.

`topics` asks from which package of Python's standard library a few lines are (topics.py). The lines
of train.jsonl and test.jsonl are from different files.
"""

import json
import random

import topics
from absl import app, flags

from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.paths import local_path

OUTPUT = flags.DEFINE_string("output", None, "Folder to write to.", required=True)
TASK = flags.DEFINE_enum("task", "sentiment", ["sentiment", "topics"], "The task.")

NEUTRAL = (
    "the film story actor plot music scene camera director ending dialogue cast script pace sound "
    "it was has and with a of in this that its very quite rather"
).split()
WORDS = {
    "positive": (
        "good great lovely moving funny clever warm bright fresh honest charming rich superb "
        "elegant gentle"
    ).split(),
    "negative": (
        "bad awful boring clumsy dull cold empty stale false ugly tired weak flat noisy cheap"
    ).split(),
}
PROMPT = "Classify the following sentence as positive or negative.\nSentence: {}\nSentiment:"
COUNTS = {"train": 4000, "test": 500}
TOPIC_PROMPT, CHARACTERS, COUNTS_PER_TOPIC = "{}\n# Package:", 130, {"train": 600, "test": 70}


def sentiment() -> dict[str, list[dict[str, str]]]:
    rng = random.Random(0)
    distinct = {
        row["prompt"]: row for row in (example(rng) for _ in range(2 * sum(COUNTS.values())))
    }
    rows = iter(distinct.values())
    return {name: [next(rows) for _ in range(count)] for name, count in COUNTS.items()}


def packages() -> dict[str, list[dict[str, str]]]:
    return {
        name: [
            {"prompt": TOPIC_PROMPT.format(text), "completion": f" {topic}"}
            for topic, text in found
        ]
        for name, found in topics.pieces(CHARACTERS, COUNTS_PER_TOPIC).items()
    }


def example(rng: random.Random) -> dict[str, str]:
    label = rng.choice(sorted(WORDS))
    words = rng.choices(WORDS[label], k=rng.randint(1, 3)) + rng.choices(
        NEUTRAL, k=rng.randint(4, 8)
    )
    rng.shuffle(words)
    return {"prompt": PROMPT.format(" ".join(words)), "completion": f" {label}"}


def main(_) -> None:
    folder = local_path("--output", OUTPUT.value)
    rows = sentiment() if TASK.value == "sentiment" else packages()
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        write_atomically(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in found))
    print(json.dumps({"output": str(folder), **{name: len(found) for name, found in rows.items()}}))


if __name__ == "__main__":
    app.run(main)
