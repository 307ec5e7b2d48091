"""Diagnoses a trained model: measures it beside its own initialisation, and writes diagnose.json
and plots.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.diagnosis import experts, figures, losses
from smallgpt_jax.diagnosis.observation import (
    WHOLE,
    chosen_experts,
    observe,
    observe_streams,
)
from smallgpt_jax.diagnosis.summary import FORMAT, JSON_FILE, VALIDATION
from smallgpt_jax.diagnosis.table import table_lines
from smallgpt_jax.diagnosis.windows import WINDOWS, validation_windows, windows_of_file
from smallgpt_jax.inference.loading import TrainedModel, load_trained, require_next_tokens
from smallgpt_jax.inference.single_blocks import num_blocks
from smallgpt_jax.models.variants import Ablation
from smallgpt_jax.objectives.objective import make_objective
from smallgpt_jax.optim.transfer import scale_initial
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.custom_code import refuse_training_code
from smallgpt_jax.run.names import DIAGNOSIS_FOLDER
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.paths import as_path, local_path
from smallgpt_jax.training.build import transfer_multipliers

MEASURED = (
    8  # windows on which activations and attention are measured; losses are computed on all windows
)
DEEP = 24  # blocks of the untrained model whose collapse is measured
# Ablations of an untrained model whose collapse is measured (Dong et al., arXiv 2103.03404, section
# 4).
COLLAPSE = {
    "whole": WHOLE,
    "without_skips": Ablation(skips=0.0),
    "attention_alone": Ablation(skips=0.0, mlps=0.0),
}


class Diagnosis(NamedTuple):
    content: dict[str, Any]  # of diagnose.json (docs/inside.md)
    table: str
    folder: Path  # of diagnose.json and the plots


def diagnose(
    workdir: str | Path,
    texts: Sequence[str | Path] = (),
    *,
    step: int | None = None,
    windows: int = WINDOWS,
    deep: int = DEEP,
    trust_custom_code: bool = False,
) -> Diagnosis:
    """Measures what happens inside a trained model; writes diagnose.json and plots to the workdir.

    `texts` are files to observe the model on; by default, it is the run's validation split. Of each
    text, `windows` windows of context_length tokens are read. `deep` is the number of blocks of an
    untrained model whose collapse without skip connections is measured; 0: none. `step` is the
    checkpoint's; None: the newest. Progress is shown on standard error. Raises UserError.
    """
    trained = load_trained(workdir, step, trust_custom_code)
    require_next_tokens(trained.model)
    if not num_blocks(trained.model):
        trained.model.config.refuse(
            "architecture",
            "has blocks of another class than models/block.py, which diagnose "
            "cannot observe; derive them from Block",
        )
    folder = as_path("--workdir", workdir)
    config = read_config(folder, trust_custom_code)
    refuse_training_code(config, folder, trust_custom_code)
    length = trained.model.config.context_length
    read = {
        str(path): windows_of_file(local_path("--text", path), trained.tokenizer, length, windows)
        for path in texts
    } or validation_windows(config, trained.tokenizer, windows)

    def log(message: str) -> None:
        print(f"{folder.name}: {message}", file=sys.stderr, flush=True)

    content = {
        **diagnose_model(trained, config, read, deep, log),
        "split": None if texts else VALIDATION,
    }
    output = folder / DIAGNOSIS_FOLDER
    output.mkdir(parents=True, exist_ok=True)
    for name, image in figures.draw(content).items():
        write_atomically(output / name, image)
    # last: where it exists, the plots exist, too
    write_atomically(
        output / JSON_FILE, json.dumps(with_nulls(content), indent=1, allow_nan=False) + "\n"
    )
    return Diagnosis(content, "\n".join(table_lines(content)), output)


def with_nulls(value):
    """Returns JSON values with null in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: with_nulls(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(with_nulls, value))
    return None if isinstance(value, float) and not np.isfinite(value) else value


def diagnose_model(
    trained: TrainedModel,
    config: Config,
    texts: Mapping[str, np.ndarray],
    deep: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """`texts` are {name: windows}; `deep` is the number of blocks of the untrained model, 0:
    none.
    """
    model = trained.model.clone(config=dataclasses.replace(trained.model.config, dtype="float32"))
    variables = {"params": trained.params, "state": trained.model_state}
    windows = np.concatenate(list(texts.values()))
    measured = windows[
        np.linspace(0, len(windows) - 1, min(MEASURED, len(windows))).round().astype(int)
    ]
    log("measuring the initial model")
    initial = {"blocks": measure_blocks(model, initial_variables(config, model), measured)}
    log("measuring the trained model")
    found = {"blocks": measure_blocks(model, variables, measured)}
    log("losses without some blocks")
    found["losses"] = measure_losses(trained._replace(model=model), windows)
    if model.config.mlp == "moe":
        found["experts"] = measure_experts(model, variables, texts, trained.tokenizer)
    content = {
        "format": FORMAT,
        "step": trained.step,
        "architecture": model.config.architecture,
        "parameters": models.num_parameters(model),
        "context_length": model.config.context_length,
        "paths": num_paths(model),
        "windows": {name: len(rows) for name, rows in texts.items()},
        "trained": found,
        "initial": initial,
    }
    if deep:
        log(f"measuring an untrained model of {deep} blocks")
        content["deep"] = {
            "blocks": deep,
            **measure_collapse(model, config.train.seed, deep, measured),
        }
    return content


def num_paths(model: models.LanguageModel) -> int:
    return getattr(model.config, "num_paths", 1)


def initial_variables(config: Config, model: models.LanguageModel):
    """Returns those of the run's first step. For a run that started from other weights, random ones
    all the same.
    """
    heads = make_objective(config.train, model).abstract_heads()
    scales = transfer_multipliers(config, {**models.abstract_params(model), **heads})

    @jax.jit
    def initialize():
        variables = models.init_variables(model, config.train.seed)
        return {
            "params": scale_initial(variables["params"], scales),
            "state": variables.get("state", {}),
        }

    return initialize()


def measure_blocks(model: models.LanguageModel, variables, windows_NxT1: np.ndarray) -> list[dict]:
    """Returns the means over windows of `observe`, with the residual after each block of the model
    without skips.
    """
    blocks = mean([observe(model, variables, window[:-1]) for window in windows_NxT1])
    alone = mean(
        [
            observe_streams(model, variables, window[:-1], COLLAPSE["without_skips"])
            for window in windows_NxT1
        ]
    )
    return [
        {**block, "residual_without_skips": streams["residual"]}
        for block, streams in zip(blocks, alone)
    ]


def measure_collapse(
    model: models.LanguageModel, seed: int, depth: int, windows_NxT1: np.ndarray
) -> dict[str, Any]:
    """Returns measures by depth of an untrained stack of the model's blocks, {"whole": {measure:
    (depth,)}, …}.

    Its norms have a negligible ε. Otherwise, activations would vanish without skips, before they
    become equal.
    """
    fields = {
        field.name: getattr(model.config, field.name)
        for field in dataclasses.fields(models.ModelConfig)
    }
    deep = models.build(
        **fields
        | {
            "architecture": "gpt",
            "num_layers": depth,
            "tie_embeddings": True,
            "norm_epsilon": 1e-30,
            "loops": 1,
        }
    )
    variables = jax.jit(lambda: models.init_variables(deep, seed))()
    found = {}
    for name, parts in COLLAPSE.items():
        blocks = mean(
            [observe_streams(deep, variables, window[:-1], parts) for window in windows_NxT1]
        )
        found[name] = {measure: [block[measure] for block in blocks] for measure in blocks[0]}
    return found


def mean(trees: Sequence[Any]):
    """Returns numbers, or lists of numbers for arrays."""
    return jax.tree.map(
        lambda *values: np.mean(np.asarray(values, np.float64), axis=0).tolist(), *trees
    )


def measure_losses(trained: TrainedModel, windows_NxT1: np.ndarray) -> dict[str, Any]:
    """Returns mean losses in nats per token, with standard errors over windows; `difference` is to
    the whole model.
    """
    model, variables = trained.model, {"params": trained.params, "state": trained.model_state}
    count, paths = num_blocks(model), num_paths(model)

    def losses_of(kept, model=model, variables=variables) -> np.ndarray:
        return losses.token_losses(model, variables, windows_NxT1, kept)

    def compared(losses_NxT) -> dict[str, float]:
        difference, error = losses.mean_and_error((losses_NxT - whole_NxT).mean(axis=1))
        return {"loss": float(losses_NxT.mean()), "difference": difference, "error": error}

    number, depth = np.arange(count), count // paths
    whole_NxT = losses_of(number >= 0)
    left_out = [losses_of(number != block) for block in number]
    loss, error = losses.mean_and_error(whole_NxT.mean(axis=1))
    score, score_error = losses.in_context_score(whole_NxT)
    found = {
        "loss": loss,
        "error": error,
        "by_position": whole_NxT.mean(axis=0).tolist(),
        "in_context_score": score,
        "in_context_score_error": score_error,
        "repeats": losses.loss_of_repeats(whole_NxT, windows_NxT1),
        "after_blocks": [compared(losses_of(number % depth < kept)) for kept in range(depth + 1)],
        "without_block": list(map(compared, left_out)),
        "without_best_block_per_window": float(
            np.min([losses_NxT.mean(axis=1) for losses_NxT in left_out], axis=0).mean()
        ),
    }
    if paths > 1:
        others = [
            trained.with_paths([other for other in range(paths) if other != path])
            for path in range(paths)
        ]
        found["without_path"] = [
            compared(
                losses_of(
                    number[: depth * (paths - 1)] >= 0,
                    other.model,
                    {"params": other.params, "state": other.model_state},
                )
            )
            for other in others
        ]
    return found


def measure_experts(
    model: models.LanguageModel, variables, texts: Mapping[str, np.ndarray], tokenizer
) -> list[dict]:
    """Returns for each block {"by_text": {name: load per expert}, "by_token": [[[token, fraction],
    …] per expert]}.
    """
    chosen = {
        name: [chosen_experts(model, variables, window[:-1]) for window in windows]
        for name, windows in texts.items()
    }
    tokens_R = np.concatenate([windows[:, :-1].ravel() for windows in texts.values()])

    def readable(token: int) -> str:
        return tokenizer.decode([token]) if token < tokenizer.vocab_size else f"id {token}"

    found = []
    for block in range(len(next(iter(chosen.values()))[0])):
        of_block = {
            name: np.stack([window[block] for window in windows])
            for name, windows in chosen.items()
        }
        choices_RxK = np.concatenate([x.reshape(-1, x.shape[-1]) for x in of_block.values()])
        by_token = experts.load_by_token(tokens_R, choices_RxK, model.config.num_experts)
        found.append(
            {
                "by_text": experts.load_by_text(of_block, model.config.num_experts),
                "by_token": [
                    [[readable(token), fraction] for token, fraction in listed]
                    for listed in by_token
                ],
            }
        )
    return found
