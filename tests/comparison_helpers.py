"""Made-up runs of comparisons: records of runs, and workdirs that look trained."""

import copy
import json
import shlex
from collections.abc import Callable
from pathlib import Path

from absl import flags
from conftest import ROOT, load_config
from ml_collections import ConfigDict, config_flags

from smallgpt_jax import cli
from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.record import (
    Depth,
    Inside,
    Point,
    Record,
    Run,
    Session,
    TrainingText,
)
from smallgpt_jax.data import store
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.errors import DivergenceError
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.workdir import initialize_workdir, lock_workdir
from smallgpt_jax.training.branch import open_branch

_SPLIT = {"tokens": 1000, "documents": 10, "text_bytes": 4000}
TEXT = {
    "description": {
        "format": store.FORMAT,
        "vocab_size": 300,
        "end_of_text": 1,
        "begin_of_text": 2,
        "dtype": "uint16",
        "skipped": {},
        "made_from": {
            "source": "books.txt",
            "tokenizer": "bytes",
            "text_field": "text",
            "text_endings": "",
            "max_document_bytes": 1000,
            "invalid_utf8": "refuse",
            "invalid_items": "refuse",
            "validation_fraction": 0.1,
        },
        "splits": {"train": _SPLIT, "validation": _SPLIT},
        "fingerprints": {"train": "t", "validation": "v"},
    },
    "tokenizer": "0" * 64,
}
STEP_MS = {"median": 2.0, "low": 1.9, "high": 2.2, "count": 24}
INFERENCE = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": 64,
    "cache_bytes": 6400,
    "cache_bytes_per_token": 100,
    "prefill_ms": STEP_MS,
    "decoding": [{"batch": 1, "cache": "full", "step_ms": STEP_MS}],
}
INSIDE = Inside(
    step=2,
    loss=2.5,
    in_context_score=-0.1,
    least_important_block=0.1,
    most_important_block=1.0,
    blocks=(Depth(0.5, 0.6, 9.0, None, None),),
)
SESSION = Session(
    time="2026-11-23T00:00:00+00:00",
    device="cpu",
    devices=1,
    versions={"jax": "1"},
    argument_bytes=5,
    temp_bytes=5,
    padding=0.0,
)


def run(
    name: str,
    seed: int,
    loss: float,
    *,
    fingerprint: str = "v",
    targets: int = 512,
    config: dict | None = None,
    **fields,
) -> Run:
    """Returns a finished run of two steps, whose second evaluation has the loss. `config` are
    fields of its config, {"group__field": value}; `fields` are fields of `Run`.
    """
    settings = load_config("gpt", train__seed=seed, train__steps=2, **(config or {}))
    text = copy.deepcopy(TEXT)
    text["description"]["fingerprints"]["validation"] = fingerprint
    curve = tuple(
        Point(step, step * 100, step * 1e6, 1.0 * step, loss + 2 - step, 1.5, targets)
        for step in (1, 2)
    )
    defaults = {
        "name": name,
        "workdir": f"/elsewhere/{name}-seed{seed}",
        "seed": seed,
        "config": json.loads(json.dumps(Config.of(settings).flat())),
        "text": TrainingText(**text),
        "is_finished": True,
        "diverged": False,
        "is_imported": False,
        "steps_done": 2,
        "parameters": 100,
        "active_parameters": 100,
        "components": {"blocks": 100},
        "flops_per_token": 600.0,
        "tokens_per_step": 100.0,
        "curve": curve,
        "tokens_per_second": 1e3,
        "memory_bytes": 10**6,
        "sessions": (SESSION,),
        "expert_load": None,
        "texts": (),
        "benchmarks": {},
        "weight_bytes": 400,
    }
    return Run(**{**defaults, **fields})


def record(*runs: Run, **fields) -> Record:
    defaults = {"title": "t", "budget": "Equal tokens.", "command": "c", "reference": "gpt"}
    return Record(**{**defaults, "runs": runs, **fields})


def saved(path: Path, *runs: Run, **fields) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(record(*runs, **fields), path)
    return path


def config_of(command: str) -> ConfigDict:
    """Returns the config of a comparison's command, with its flags."""
    _, _, module, *arguments = shlex.split(command)
    assert module == "smallgpt_jax.compare"
    file, *fields = [one for one in arguments if one.startswith("--config")]
    file = file.replace("--config=", f"--config={ROOT}/")
    quoted = cli.quote_run_names(["compare", file, *fields])
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=quoted)
    values(quoted)
    return values["config"].value


class FakeTrain:
    """Replaces `trainer.train_and_evaluate`: locks the workdir and starts from the trunk, but writes the loss that
    `loss_of(config)` returns, inf for a run that diverges.

    `trained` lists (folder, number of steps that were trained).
    """

    def __init__(self, loss_of: Callable[[Config], float] = lambda config: 3.0):
        self.trained: list[tuple[str, int]] = []
        self.loss_of = loss_of

    @property
    def folders(self) -> list[str]:
        return [folder for folder, _ in self.trained]

    def __call__(self, config: Config, folder: str, corpus) -> None:
        folder, steps = Path(folder), config.train.steps
        trunk = open_branch(folder, config)
        with lock_workdir(folder):
            if is_finished(folder, config, corpus):
                return
            initialize_workdir(folder, config, corpus)
            if trunk:
                trunk.copy_to(folder)
            first_step = max(saved_steps(folder / "checkpoints"), default=0)
            append_session(
                folder,
                {
                    "first_step": first_step,
                    "devices": 1,
                    "device": "cpu",
                    "argument_bytes": 10**6,
                    "temp_bytes": 10**6,
                    "padding": 0.0,
                },
            )
            self.trained.append((folder.name, steps - first_step))
            loss = self.loss_of(config)
            if loss == float("inf"):
                append_session(folder, {"diverged": "loss"})
                raise DivergenceError("training has diverged")
            self._write_metrics(folder, config, corpus, loss)
            for step in (*config.train.kept_steps, steps):
                (folder / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)

    def _write_metrics(self, folder: Path, config: Config, corpus, loss: float) -> None:
        targets = num_validation_targets(corpus, config.data, config.model, config.train)
        steps = config.train.steps
        lines = [{"step": steps, "split": "train", "loss": loss, "tokens_per_second": 1000.0}]
        for step, value in ((steps // 2, loss + 1), (steps, loss)):
            line = {"step": step, "split": "eval", "loss": value, "bits_per_byte": value}
            lines.append({**line, "targets": targets})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def untrained_run(folder, source, **fields):
    """Writes a workdir that has an evaluation at the last step, but no checkpoint. Returns
    `folder`.
    """
    config = load_config("gpt", data__source=str(source), **fields)
    folder.mkdir(parents=True, exist_ok=True)
    initialize_workdir(folder, config, load_or_prepare(config.data))
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(
            json.dumps(
                {
                    "step": config.train.steps,
                    "split": "eval",
                    "loss": 4.0,
                    "bits_per_byte": 2.0,
                    "targets": 8,
                }
            )
        )
    return folder
