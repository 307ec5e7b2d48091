"""Diagnoses a trained model: measures it beside its own initialization; writes JSON and plots."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.diagnosis import experts, figures, losses
from smallgpt_jax.diagnosis.observation import WHOLE, chosen_experts, observe, observe_streams
from smallgpt_jax.diagnosis.summary import FORMAT, JSON_FILE, VALIDATION
from smallgpt_jax.diagnosis.table import table_lines
from smallgpt_jax.diagnosis.windows import (
    WINDOWS,
    evenly_spaced,
    validation_windows,
    windows_of_file,
)
from smallgpt_jax.errors import require_list
from smallgpt_jax.formatting import finite
from smallgpt_jax.inference.loading import TrainedModel, load_trained, require_next_tokens
from smallgpt_jax.inference.single_blocks import num_blocks
from smallgpt_jax.models.variants import Ablation
from smallgpt_jax.objectives.objective import make_objective
from smallgpt_jax.optim.mup import scale_initial
from smallgpt_jax.output import print_error
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.custom_code import refuse_training_code
from smallgpt_jax.run.names import DIAGNOSIS_FOLDER
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.paths import as_path, local_path
from smallgpt_jax.training.build import transfer_multipliers

_MEASURED = 8  # windows on which activations and attention are measured; losses: on all windows
DEEP = 24  # blocks of the untrained model whose collapse is measured
_WITHOUT_SKIPS = Ablation(skips=0.0)
# Ablations of an untrained model whose collapse is measured (Dong et al., arXiv 2103.03404, section
# 4).
COLLAPSE = {
    "whole": WHOLE,
    "without_skips": _WITHOUT_SKIPS,
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
    require_list("texts", texts)
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
    windows_of = {}  # the windows of each text
    for path in texts:
        file = local_path("--text", path)
        windows_of[str(path)] = windows_of_file(file, trained.tokenizer, length, windows)
    if not texts:
        windows_of = validation_windows(config, trained.tokenizer, windows)

    def log(message: str) -> None:
        print_error(f"{folder.name}: {message}")

    content = _diagnose_model(trained, config, windows_of, deep, log)
    content["split"] = None if texts else VALIDATION
    output = folder / DIAGNOSIS_FOLDER
    output.mkdir(parents=True, exist_ok=True)
    for name, image in figures.draw(content).items():
        write_atomically(output / name, image)
    # last: where it exists, the plots exist, too
    serialized = json.dumps(finite(content), indent=1, allow_nan=False)
    write_atomically(output / JSON_FILE, serialized + "\n")
    return Diagnosis(content, "\n".join(table_lines(content)), output)


def _diagnose_model(
    trained: TrainedModel,
    config: Config,
    texts: Mapping[str, np.ndarray],
    deep: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Returns the content of diagnose.json. `texts` are {name: windows}; `deep`: see `diagnose`."""
    # bfloat16 would blur what differs between positions
    trained = trained.with_dtype("float32")
    model = trained.model
    windows = np.concatenate(list(texts.values()))
    few_windows = windows[evenly_spaced(len(windows), _MEASURED)]
    log("measuring the initial model")
    of_initial = {"blocks": _measure_blocks(model, _initial_variables(config, model), few_windows)}
    log("measuring the trained model")
    of_trained = {"blocks": _measure_blocks(model, _variables(trained), few_windows)}
    log("losses without some blocks")
    of_trained["losses"] = _measure_losses(trained, windows)
    if model.config.mlp == "moe":
        of_trained["experts"] = _measure_experts(trained, texts)
    content = {
        "format": FORMAT,
        "step": trained.step,
        "architecture": model.config.architecture,
        "parameters": models.num_parameters(model),
        "context_length": model.config.context_length,
        "paths": _num_paths(model),
        "windows": {name: len(rows) for name, rows in texts.items()},
        "trained": of_trained,
        "initial": of_initial,
    }
    if deep:
        log(f"measuring an untrained model of {deep} blocks")
        collapse = measure_collapse(model, config.train.seed, deep, few_windows)
        content["deep"] = {"blocks": deep, **collapse}
    return content


def _num_paths(model: models.LanguageModel) -> int:
    return getattr(model.config, "num_paths", 1)


def _variables(trained: TrainedModel) -> dict[str, Any]:
    return {"params": trained.params, "state": trained.model_state}


def _initial_variables(config: Config, model: models.LanguageModel):
    """Returns the model's variables as if the run had started from random weights."""
    # The multipliers of the initial weights are computed of all that is trained, with the heads.
    heads = make_objective(config.train, model).abstract_heads()
    scales = transfer_multipliers(config, {**models.abstract_params(model), **heads})

    @jax.jit
    def initialize():
        variables = models.init_variables(model, config.train.seed)
        params = scale_initial(variables["params"], scales)
        return {"params": params, "state": variables.get("state", {})}

    return initialize()


def _measure_blocks(model: models.LanguageModel, variables, windows_NxT1: np.ndarray) -> list[dict]:
    """Returns the means over windows of `observe`, and how far the tokens would be from equal (the
    residual to rank one, see `measures`) without skip connections.
    """
    of_windows, of_windows_without_skips = [], []
    for tokens_T in windows_NxT1[:, :-1]:
        of_windows.append(observe(model, variables, tokens_T))
        streams = observe_streams(model, variables, tokens_T, _WITHOUT_SKIPS)
        of_windows_without_skips.append(streams)
    blocks = _mean(of_windows)
    for block, stream in zip(blocks, _mean(of_windows_without_skips)):
        block["residual_without_skips"] = stream["residual"]
    return blocks


def measure_collapse(
    model: models.LanguageModel, seed: int, depth: int, windows_NxT1: np.ndarray
) -> dict[str, Any]:
    """Returns {ablation of COLLAPSE: {measure: [value after each block]}} of an untrained stack."""
    c = model.config
    # only the fields of all architectures: a gpt has no paths or stages
    fields = {
        field.name: getattr(c, field.name) for field in dataclasses.fields(models.ModelConfig)
    }
    fields |= {"architecture": "gpt", "num_layers": depth, "tie_embeddings": True, "loops": 1}
    # without skips, activations would vanish before they become equal
    untrained = models.build(**{**fields, "norm_epsilon": 1e-30})
    variables = jax.jit(lambda: models.init_variables(untrained, seed))()
    collapse = {}
    for name, ablation in COLLAPSE.items():
        of_windows = []
        for tokens_T in windows_NxT1[:, :-1]:
            of_windows.append(observe_streams(untrained, variables, tokens_T, ablation))
        blocks = _mean(of_windows)
        collapse[name] = {}
        for measure in blocks[0]:
            collapse[name][measure] = [block[measure] for block in blocks]
    return collapse


def _mean(trees: Sequence[Any]):
    """Returns a tree with the means of corresponding leaves, as numbers or lists for JSON."""

    def mean_of_leaves(*values):
        return np.mean(np.asarray(values, np.float64), axis=0).tolist()

    return jax.tree.map(mean_of_leaves, *trees)


def _token_losses(trained: TrainedModel, windows_NxT1: np.ndarray, kept_L) -> np.ndarray:
    return losses.token_losses(trained.model, _variables(trained), windows_NxT1, kept_L)


def _measure_losses(trained: TrainedModel, windows_NxT1: np.ndarray) -> dict[str, Any]:
    """Returns mean losses in nats per token, with standard errors over windows."""
    # The blocks of path 0 have the numbers 0 … depth − 1, those of path 1 depth … 2·depth − 1.
    count, paths = num_blocks(trained.model), _num_paths(trained.model)
    number_L, depth = np.arange(count), count // paths
    losses_of = functools.partial(_token_losses, trained, windows_NxT1)
    whole_NxT = losses_of(np.ones(count, bool))

    # the error is that of differences within windows: windows differ more than models do
    def compared(losses_NxT) -> dict[str, float]:
        difference, error = losses.mean_and_error((losses_NxT - whole_NxT).mean(axis=1))
        return {"loss": float(losses_NxT.mean()), "difference": difference, "error": error}

    # with the first 0, 1, … blocks of each path
    after_blocks = [losses_of(number_L % depth < kept) for kept in range(depth + 1)]
    without_block = [losses_of(number_L != block) for block in range(count)]
    # of each window, the loss without the block that it needs least
    least_N = np.min([losses_NxT.mean(axis=1) for losses_NxT in without_block], axis=0)
    loss, error = losses.mean_and_error(whole_NxT.mean(axis=1))
    score, score_error = losses.in_context_score(whole_NxT)
    content = {
        "loss": loss,
        "error": error,
        "by_position": whole_NxT.mean(axis=0).tolist(),
        "in_context_score": score,
        "in_context_score_error": score_error,
        "repeats": losses.loss_of_repeats(whole_NxT, windows_NxT1),
        "after_blocks": list(map(compared, after_blocks)),
        "without_block": list(map(compared, without_block)),
        "without_best_block_per_window": float(least_N.mean()),
    }
    if paths > 1:
        without_path = [_losses_without_path(trained, path, windows_NxT1) for path in range(paths)]
        content["without_path"] = list(map(compared, without_path))
    return content


def _losses_without_path(trained: TrainedModel, path: int, windows_NxT1: np.ndarray) -> np.ndarray:
    others = [other for other in range(_num_paths(trained.model)) if other != path]
    fewer = trained.with_paths(others)
    return _token_losses(fewer, windows_NxT1, np.ones(num_blocks(fewer.model), bool))


def _measure_experts(trained: TrainedModel, texts: Mapping[str, np.ndarray]) -> list[dict]:
    """Returns for each block with a router {"by_text": {name: load per expert}, "by_token": [[[token,
    fraction], …] per expert]}.
    """
    model, variables, tokenizer = trained.model, _variables(trained), trained.tokenizer
    choices = {}  # {name of the text: (N, L, T, K)} for L blocks with a router
    for name, windows in texts.items():
        of_windows = [chosen_experts(model, variables, window[:-1]) for window in windows]
        choices[name] = np.array(jax.device_get(of_windows))
    tokens_R = np.concatenate([windows[:, :-1].ravel() for windows in texts.values()])

    def readable(token: int) -> str:
        # the model's embedding may have more rows than the tokenizer has ids
        return tokenizer.decode([token]) if token < tokenizer.vocab_size else f"id {token}"

    num_experts, num_chosen = model.config.num_experts, model.config.experts_per_token
    content = []
    for block in range(next(iter(choices.values())).shape[1]):
        of_block = {name: x_NxLxTxK[:, block] for name, x_NxLxTxK in choices.items()}
        choices_RxK = np.concatenate([x.reshape(-1, num_chosen) for x in of_block.values()])
        by_token = []
        for listed in experts.load_by_token(tokens_R, choices_RxK, num_experts):
            by_token.append([[readable(token), fraction] for token, fraction in listed])
        by_text = experts.load_by_text(of_block, num_experts)
        content.append({"by_text": by_text, "by_token": by_token})
    return content
