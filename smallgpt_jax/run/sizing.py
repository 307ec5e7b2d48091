"""The values of a sized recipe that follow from its size, config.train.size: the shape of the model,
steps, batch and learning rate. docs/sizes.md gives the rules.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from smallgpt_jax.config import sizes
from smallgpt_jax.config.group import AT_START
from smallgpt_jax.config.sizes import Size
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models import (
    LanguageModel,
    ModelConfig,
    abstract_params,
    make_config,
    num_active_parameters,
)
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.shape import fit_shape

_FOLLOWING = {"train": ("steps", "batch_size"), "optimizer": ("learning_rate", "weight_decay")}
_NEAR_BUDGET = 0.03  # relative error of the tokens per parameter at which the search ends
_TRIALS = 6  # models that are fitted at most


def with_sizes(groups: Mapping[str, dict], saved: Mapping[str, dict] | None) -> dict[str, dict]:
    """Returns the groups with each AT_START that follows from the size replaced: by the value in the
    run that is resumed, if any, and by the rules otherwise.
    """
    text = groups["train"].get("size", "")
    if not text:
        return dict(groups)
    groups = {
        group: dict.fromkeys(_FOLLOWING.get(group, ()), AT_START) | dict(fields)
        for group, fields in groups.items()
    }
    open_fields = {group: _open_fields(group, fields) for group, fields in groups.items()}
    if not any(open_fields.values()):
        return groups
    _validate(groups["train"])
    # The rules may have changed since that run started. A run of another architecture is refused
    # later.
    if saved and saved["model"]["architecture"] == groups["model"].get("architecture"):
        for group, names in open_fields.items():
            for field in names:
                groups[group][field] = saved[group][field]
        return groups
    size = Size.parse(text, "config.train.size")
    model = _fitted(json.dumps(groups["model"]), size)
    rules = _rules(model, size, groups)
    for group, names in open_fields.items():
        for field in names:
            groups[group][field] = (
                getattr(model, field) if group == "model" else rules[group][field]
            )
    return groups


def _open_fields(group: str, fields: Mapping[str, Any]) -> list[str]:
    names = fields if group == "model" else _FOLLOWING.get(group, ())
    return [
        name for name in names if type(fields[name]) in (int, float) and fields[name] == AT_START
    ]


def _validate(train: Mapping[str, Any]) -> None:
    """Refuses values that the rules cannot use. Others are validated with their group."""
    if not isinstance(train["size"], str):
        raise UserError(f"config.train.size={short_repr(train['size'])}: must be a string")
    for field in _FOLLOWING["train"]:
        value = train[field]
        if type(value) is not int or (value < 1 and value != AT_START):
            raise UserError(
                f"config.train.{field}={short_repr(value)}: must be an integer, at least 1"
            )


@functools.lru_cache(maxsize=16)
def _fitted(fields: str, size: Size) -> ModelConfig:
    """Returns the model of a size. `fields` are the group `model` as JSON."""
    # JSON, because arguments of a cached function must have a hash.
    model_fields = json.loads(fields)
    if AT_START not in model_fields.values():
        return make_config(**model_fields)
    fit = functools.partial(fit_shape, model_fields)
    return fit(size.parameters) if size.parameters is not None else _fit_budget(fit, size)


def _fit_budget(fit: Callable[[float], ModelConfig], size: Size) -> ModelConfig:
    """Returns the model that has nearly the size's tokens per parameter within its budget. `fit`
    returns a model of about a number of parameters.
    """
    parameters = size.estimated_parameters
    trials: list[tuple[float, ModelConfig]] = []
    for _ in range(_TRIALS):
        model = fit(parameters)
        tokens_per_parameter = _tokens_of_budget(size.flops, model) / _parameters(model)
        error = math.log(tokens_per_parameter / size.tokens_per_parameter)
        is_new = model not in (tried for _, tried in trials)
        trials.append((abs(error), model))
        if abs(error) < _NEAR_BUDGET:
            break
        # With as many tokens per parameter, FLOPs grow with the square of the parameters. Half of
        # that where it leads back: shapes near each other differ in depth, and so in FLOPs.
        parameters *= math.exp(error / (2 if is_new else 4))
    return min(trials, key=lambda trial: trial[0])[1]


def _parameters(model: ModelConfig) -> int:
    return num_active_parameters(LanguageModel(model))


def _tokens_of_budget(flops: float, model: ModelConfig) -> float:
    # FLOPs per token are not 6 per parameter in small models, where attention and head count.
    language_model = LanguageModel(model)
    per_token = train_flops_per_token(language_model)
    if per_token is None:  # custom code whose FLOPs cannot be counted
        per_token = sizes.FLOPS_PER_PARAMETER * _parameters(model)
    return flops / per_token


def _rules(model: ModelConfig, size: Size, groups: Mapping[str, dict]) -> dict[str, dict]:
    """Returns the rules' values. Those that depend on others use the given values of these."""
    parameters = _parameters(model)
    tokens = size.tokens_per_parameter * parameters
    if size.flops is not None:
        tokens = _tokens_of_budget(size.flops, model)
    sequences = groups["train"]["batch_size"]
    if sequences == AT_START:
        batch = sizes.batch_tokens(block_parameters(model), tokens / parameters)
        most = max(sizes.MIN_SEQUENCES, batch / model.context_length)
        # a power of two, so that devices and microbatches divide it
        sequences = 2 ** math.floor(math.log2(sizes.BATCH_EXCESS * most))
    steps = groups["train"]["steps"]
    if steps == AT_START:
        steps = max(1, round(tokens / (sequences * model.context_length)))
    batch = sequences * model.context_length
    return {
        "train": {"steps": steps, "batch_size": sequences},
        "optimizer": {
            "learning_rate": usual_rate(model, batch),
            "weight_decay": _rounded(
                sizes.weight_decay(block_parameters(model), batch, steps * batch / parameters)
            ),
        },
    }


def usual_rate(model: ModelConfig, batch: float) -> float:
    """Returns the rule's learning rate for a batch of this number of tokens."""
    factor = model.rate_factor
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise UserError(
            f"{type(model).__qualname__}.rate_factor: is {short_repr(factor)}; must be a finite "
            "number above 0"
        )
    return _rounded(factor * sizes.learning_rate(block_parameters(model), batch))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def block_parameters(model: ModelConfig) -> int:
    """Returns the number of active parameters without embeddings and head."""
    outside = 0
    for p in jax.tree.leaves(abstract_params(LanguageModel(model))):
        if "vocab" in p.axes or "position" in p.axes:
            outside += p.size
    return max(1, _parameters(model) - outside)
