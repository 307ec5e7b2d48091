"""Trains a run of a record again, in several ways that only round differently."""

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax

from smallgpt_jax.analysis.record import Point, Record, Run, TrainingText
from smallgpt_jax.comparison import comparability
from smallgpt_jax.data.corpus import Corpus, load_or_prepare
from smallgpt_jax.devices.platform import platform, processor_flags, processor_identity
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.metrics import read_evaluations
from smallgpt_jax.run.provenance import package_versions
from smallgpt_jax.run.training_text import identity_of
from smallgpt_jax.training import trainer
from smallgpt_jax.verification.bands import ComparedLoss, Curve, compare_curves

LOSS_CHUNKS = (1, 2, 4, 8, 16)
MAX_CHUNK_VARIANTS = 2
OTHER_INSTRUCTIONS = "--xla_cpu_max_isa=AVX2"


def machine_differences(run: Run) -> str:
    """Returns how versions, processor and devices differ from those of the record's last session."""
    if not run.sessions:
        return "versions and processor are not recorded"
    session, versions = run.sessions[-1], package_versions()
    names = [name for name in session.versions if session.versions[name] != versions.get(name)]
    texts = [f"{name} {versions.get(name)}, recorded {session.versions[name]}" for name in names]
    if not session.processor:
        texts.append(f"another processor, perhaps: only the name {session.device!r} is recorded")
    elif session.processor != processor_identity():
        texts.append("another processor")
    if session.devices != jax.device_count():
        texts.append(f"{jax.device_count()} devices, recorded {session.devices}")
    return "; ".join(texts)


def steps_to_train(run: Run, fraction: float) -> int:
    """Returns the step of the first evaluation at or after the fraction of the run's steps."""
    least = fraction * run.steps
    return next(point.step for point in run.curve if point.step >= least or point is run.last)


def retrained_config(config: Config, steps: int) -> Config:
    """Returns the config of a run that is trained alone, up to `steps` of its schedule."""
    if config.train.teacher:
        raise UserError("was trained with config.train.teacher, which is not in a record")
    mesh, devices = config.mesh, jax.device_count()
    inner = mesh.fsdp * mesh.tensor * mesh.path
    if devices % inner or mesh.data not in (-1, devices // inner):
        mesh = mesh.replace(data=-1, fsdp=1, tensor=1, path=1)  # differs by rounding only
    # Without the trunk, this run computes the steps that the record's run may have copied.
    train = {
        "steps": steps,
        "trunk": "",
        "kept_steps": (),
        "keep_checkpoints": 1,
        "checkpoint_every": max(1, steps // 4),
        "tracker": "",
        "profile_from": 0,
    }
    return config.replace(train=train, mesh=dataclasses.asdict(mesh))


def open_text(config: Config, run: Run) -> Corpus:
    """Returns the text of a run. Raises UserError if it is missing here, or is another one."""
    data = config.data
    # The record may name the folder of a store on the machine that made it.
    if data.store and not Path(data.store).exists() and not data.mixture:
        data = data.replace(store="")  # prepares it from the source, in the cache folder
    corpus = load_or_prepare(data)
    changes = comparability.text_changes(run.text, TrainingText(**identity_of(corpus)))
    if changes:
        raise UserError(
            f"the text here is not that of the record ({changes}); install the versions of the "
            "packages, or use the files, from which it was made"
        )
    return corpus


def trained_curve(config: Config, folder: Path, corpus: Corpus) -> Curve:
    """Returns the validation losses by step. A finished run is only read."""
    if not is_finished(folder, config, corpus):
        try:
            trainer.train_and_evaluate(config, str(folder), corpus)
        except DivergenceError as error:
            raise UserError(f"diverged here: {error}") from None
    return read_curve(folder)


def read_curve(folder: Path) -> Curve:
    return {
        line["step"]: line["loss"] for line in read_evaluations(folder) if line["loss"] is not None
    }


def train_variants(
    config: Config, folder: Path, corpus: Corpus, trust_custom_code: bool
) -> list[Curve]:
    """Returns the curves of runs beside that in `folder`, which only round differently."""
    # Several, because the interval of one variant was up to five times too narrow.
    curves = []
    for fields in variant_fields(config):
        ((field, value),) = fields.items()
        name = f"{field}={value}"
        print(f"again, with config.train.{name}, which only rounds differently", flush=True)
        workdir = folder.with_name(f"{folder.name}-{safe_name(name)}")
        curves.append(trained_curve(config.replace(train=fields), workdir, corpus))
    if has_other_instructions():
        print(f"again, with {OTHER_INSTRUCTIONS}, in another process", flush=True)
        workdir = folder.with_name(f"{folder.name}-avx2")
        if not is_finished(workdir, config, corpus):
            _train_in_subprocess(folder, workdir, trust_custom_code)
        curves.append(read_curve(workdir))
    return curves


def variant_fields(config: Config) -> list[dict[str, int]]:
    """Returns variants: each sets one field of `train`, which only changes the order of sums."""
    fields = [
        {"loss_chunks": chunks}
        for chunks in LOSS_CHUNKS
        if chunks != config.train.loss_chunks and config.model.context_length % chunks == 0
    ][:MAX_CHUNK_VARIANTS]
    doubled = 2 * config.train.microbatches
    # With dropout, another split into microbatches would also draw other masks.
    if not config.model.dropout and config.train.batch_size % (doubled * jax.device_count()) == 0:
        fields.append({"microbatches": doubled})
    return fields


def has_other_instructions() -> bool:
    return platform() == "cpu" and "avx512f" in processor_flags()


def _train_in_subprocess(trained: Path, folder: Path, trust_custom_code: bool) -> None:
    """Trains the run in `trained` again, in `folder`, without AVX-512."""
    # XLA reads its flags once per process.
    command = [sys.executable, "-m", "smallgpt_jax.main"]
    command += [f"--config=run:{trained}", f"--workdir={folder}"]
    command += ["--trust_custom_code"] if trust_custom_code else []
    flags = shlex.join([*shlex.split(os.environ.get("XLA_FLAGS", "")), OTHER_INSTRUCTIONS])
    log = trained.parent / f"{folder.name}.log"
    with log.open("w", encoding="utf-8") as file:
        result = subprocess.run(
            command, stdout=file, stderr=file, env={**os.environ, "XLA_FLAGS": flags}
        )
    if result.returncode:
        raise UserError(f"{folder}: could not be trained with {OTHER_INSTRUCTIONS}; see {log}")


def compare_run(
    run: Run, record: Record, config: Config, folder: Path, corpus: Corpus, trust_custom_code: bool
) -> list[ComparedLoss]:
    """Trains `config`, the first steps of `run`, in `folder`; returns the recorded losses beside its
    own. If they differ, variants are trained as well, to measure what rounding changes.
    """
    steps = config.train.steps
    recorded = {point.step: point for point in run.curve if point.loss and point.step <= steps}
    trained = trained_curve(config, folder, corpus)
    _require_same_targets(recorded, folder)
    losses = {step: point.loss for step, point in recorded.items()}
    seeds = []
    for other in record.runs:
        if (other.name, other.horizon) == (run.name, run.horizon):
            seeds.append({point.step: point.loss for point in other.curve if point.loss})
    # Equal bits need no explanation, and variants take several times as long as the run itself.
    is_equal = all(trained[step] == losses[step] for step in losses.keys() & trained.keys())
    variants = [] if is_equal else train_variants(config, folder, corpus, trust_custom_code)
    is_other_machine = machine_differences(run) != ""
    return compare_curves(losses, trained, variants, seeds, is_other_machine)


def _require_same_targets(recorded: Mapping[int, Point], folder: Path) -> None:
    """Raises UserError if evaluations in `folder` are means over other tokens than recorded."""
    for line in read_evaluations(folder):
        point = recorded.get(line["step"])
        if point and point.targets != line["targets"]:
            raise UserError(
                f"the loss at step {point.step} is a mean over {point.targets:,} targets in the "
                f"record, and over {line['targets']:,} here"
            )
