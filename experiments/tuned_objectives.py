"""Compares objectives of pretraining by the accuracy of the models after tuning.

    python -m smallgpt_jax.compare --config=configs/compare/objectives.py --output=runs/objectives \
        --config.compare.names=causal,prefix,masked
    python experiments/tuned_objectives.py --pretrained=runs/objectives --output=runs/tuned

Each model is tuned on tasks of tuning_task.py, with each of two objectives: "causal", and "prefix",
in which attention sees the whole prompt. A masked model predicts no next tokens before it is tuned,
so all models have the same choice. An untrained model ("none") is tuned, too. Only finished runs
are kept when the command is repeated.

OUTPUT/TASK/report.md and results.json are the report of smallgpt_jax.compare. A run has the name
PRETRAINED-TUNED.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from absl import app, flags

from smallgpt_jax.storage.paths import local_path

PRETRAINED = flags.DEFINE_string(
    "pretrained", None, "Output of configs/compare/objectives.py.", required=True
)
OUTPUT = flags.DEFINE_string("output", None, "Folder to write to.", required=True)
SEEDS = flags.DEFINE_list("seeds", ["1337", "1338", "1339"], "Seeds of the pretrained runs.")
TASKS = flags.DEFINE_list("tasks", ["sentiment", "topics"], "Tasks of tuning_task.py.")

STEPS = {"sentiment": 100, "topics": 200}  # of tuning, by task of tuning_task.py
# Pretrained and tuned objectives.
PAIRS = (
    ("causal", "causal"),
    ("causal", "prefix"),
    ("prefix", "causal"),
    ("prefix", "prefix"),
    ("masked", "causal"),
    ("masked", "prefix"),
    ("none", "causal"),
)
UNTRAINED = "none"


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], check=True, cwd=Path(__file__).parent.parent)


def tune(task: Path, pretrained: Path, objective: str, tuned: str, seed: str) -> Path:
    """Returns the workdir of a model that was tuned and evaluated."""
    workdir = task / f"{objective}-{tuned}-seed{seed}"
    if list(workdir.glob("evaluations/*.json")):
        return workdir
    imported = (
        task / "imported" if objective == UNTRAINED else workdir
    )  # a run in another folder has new weights
    for folder in {imported, workdir}:
        shutil.rmtree(folder, ignore_errors=True)
    source = f"{'causal' if objective == UNTRAINED else objective}-seed{seed}"
    run(
        "-m",
        "smallgpt_jax.convert",
        "--from=run",
        f"--input={pretrained}/runs/{source}",
        f"--workdir={imported}",
    )
    run(
        "-m",
        "smallgpt_jax.main",
        f"--config=run:{imported}",
        f"--workdir={workdir}",
        f"--config.data.source={task}/train.jsonl",
        "--config.data.format=completion",
        "--config.data.packing=best_fit",
        "--config.data.separate_documents=True",
        f"--config.model.attention_mask={tuned}",
        f"--config.train.objective={tuned}",
        f"--config.train.seed={seed}",
        f"--config.train.steps={STEPS[task.name]}",
        "--config.optimizer.learning_rate=1e-3",
    )
    run(
        "-m",
        "smallgpt_jax.evaluate",
        f"--workdir={workdir}",
        f"--examples={task}/test.jsonl",
        "--metrics=accuracy",
    )
    return workdir


def accuracies(workdirs: list[Path]) -> dict[str, float]:
    return {
        workdir.name: json.loads(next(workdir.glob("evaluations/examples-*.json")).read_text())[
            "results"
        ]["accuracy"]["mean"]
        for workdir in workdirs
    }


def main(_) -> None:
    pretrained = local_path("--pretrained", PRETRAINED.value).resolve()
    output, found = local_path("--output", OUTPUT.value).resolve(), {}
    for name in TASKS.value:
        task = output / name
        run("experiments/tuning_task.py", f"--output={task}", f"--task={name}")
        workdirs = [
            tune(task, pretrained, objective, tuned, seed)
            for seed in SEEDS.value
            for objective, tuned in PAIRS
        ]
        run("-m", "smallgpt_jax.compare", f"--workdirs={task}/*-seed*", f"--output={task}")
        found[name] = accuracies(workdirs)
    print(json.dumps({"steps": STEPS, "accuracy": found}))


if __name__ == "__main__":
    app.run(main)
