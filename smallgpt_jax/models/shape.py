"""The shape of a sized recipe's model: depth, width, heads and MLP of any architecture, for a number
of active parameters. docs/sizes.md describes the rule.

Fields of `model` with the value AT_START follow the rule; all others are kept.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from smallgpt_jax.config.group import AT_START
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models.architectures import find_architecture, make_config
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.language_model import LanguageModel
from smallgpt_jax.models.parameters import num_active_parameters

# that have even head widths, and from 128 on suit matrix units
_WIDTHS = (*range(8, 64, 4), *range(64, 128, 8), *range(128, 256, 32), *range(256, 512, 64))
_WIDTHS += tuple(range(512, 16_385, 128))
_ASPECT = 64  # width per block, as in nanochat
_MIN_BLOCKS = 4  # as in the records
# With learned positions, two wide blocks are better than four (docs/results/sizes.json).
_MIN_BLOCKS_LEARNED = 2
# From about this width on, models learn to copy, which takes attention in two blocks, one after the
# other (arXiv 2209.11895): each path of pgpt needs two (docs/results/sizes065.json).
_COPYING_WIDTH = 80
_MLP_UNITS = {1: 1, 128: 8, 512: 64}  # {d_model from which: widths of MLPs are multiples of this}
_SPREAD = 1.3  # MLPs are at most this factor wider or narrower than usual
_CLOSE = 0.01  # relative error at which the search ends
_ENOUGH = 0.03  # beyond this one, all depths are tried
_TRIALS = 16  # models that are traced at most
_TRIED = 100  # shapes with the same error, after which no other one is tried


def fit_shape(fields: Mapping[str, Any], parameters: float) -> ModelConfig:
    """Returns the config of a model with about `parameters` active parameters, all included."""
    usual = _fit(_Search(fields), parameters)
    if usual.error < _ENOUGH:
        return usual.config
    # Fields that are set may divide no usual depth, such as three paths.
    other = _fit(_Search(fields, all_depths=True), parameters)
    return min(usual, other, key=lambda fit: fit.error).config


class _Fit(NamedTuple):
    error: float  # relative, of the number of parameters
    config: ModelConfig


def _fit(search: "_Search", parameters: float) -> _Fit:
    # Alternates between choosing by an approximate count, which is cheap, and tracing the chosen
    # model, which makes the count exact for its depth and width.
    count = _Count(search.mlp_matrices)
    tried: dict[_Shape, tuple[float, _Fit]] = {}
    shape, config = search.best(count, parameters)
    while shape not in tried and len(tried) < _TRIALS:
        exact = num_active_parameters(LanguageModel(config))
        fit = _Fit(abs(exact / parameters - 1), config)
        tried[shape] = search.cost(shape, exact / parameters), fit
        if fit.error < _CLOSE and len(tried) > 1:
            break
        count.add(shape, config, exact)
        shape, config = search.best(count, parameters)
    return min(tried.values(), key=lambda trial: trial[0])[1]


class _Shape(NamedTuple):
    d_model: int
    num_layers: int
    mlp_width: int


class _Count:
    """The approximate number of parameters: per_width·d_model in embeddings and head; in each block,
    mlp·d_model·mlp_width, and beside the MLP rest·d_model². It is exact where models were counted.
    """

    def __init__(self, mlp: float):
        # guesses until a model is counted; attention has four matrices of d_model²
        self.per_width, self.mlp, self.rest = 2048.0, mlp, 4.0
        # {(d_model, num_layers): (mlp_width, parameters)}
        self.counted: dict[tuple[int, int], tuple[int, int]] = {}

    def __call__(self, shape: _Shape) -> float:
        d, layers, width = shape
        return self._outside(d, layers) + layers * self.mlp * d * width

    def _outside(self, d: int, layers: int) -> float:
        """Returns the number of parameters outside the MLPs."""
        if (d, layers) in self.counted:
            width, exact = self.counted[d, layers]
            return exact - layers * self.mlp * d * width
        return self.per_width * d + layers * self.rest * d**2

    def add(self, shape: _Shape, config: ModelConfig, exact: int) -> None:
        heads = 0 if config.tie_embeddings else config.output_width / config.d_model
        self.per_width = config.vocab_size * (1 + heads)
        if config.position == "learned":
            self.per_width += config.context_length
        d, layers, width = shape
        # Two models that differ only in the MLP's width tell the parameters per unit of it.
        other_width, other_exact = self.counted.get((d, layers), (width, exact))
        if width != other_width:  # of lgpt, narrower stages; other models may have no MLP at all
            self.mlp = max(0.0, (exact - other_exact) / (layers * d * (width - other_width)))
        self.counted[d, layers] = width, exact
        self.rest = (self._outside(d, layers) - self.per_width * d) / (layers * d**2)

    def fitting_mlp(self, parameters: float, d: int, layers: int) -> float:
        """Returns the width of the MLP with which the model has `parameters`."""
        if not self.mlp:
            return 0.0
        return (parameters - self._outside(d, layers)) / (layers * self.mlp * d)


class _Search:
    """The shapes that the fields allow that are not AT_START."""

    def __init__(self, fields: Mapping[str, Any], all_depths: bool = False):
        self.fields, self.all_depths = fields, all_depths
        self.set_fields = {name: value for name, value in fields.items() if value != AT_START}
        # The search computes with these before they are validated.
        names = ("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_paths")
        for name in names:
            value = self.set_fields.get(name, 1)
            least = 0 if name in ("num_kv_heads", "head_dim") else 1
            if type(value) is not int or value < least:
                raise UserError(
                    f"config.model.{name}={short_repr(value)}: must be an integer, at least {least}"
                )
        ratio = self.set_fields.get("mlp_ratio", 1)
        if type(ratio) not in (int, float) or not 0 < ratio < math.inf:
            raise UserError(
                f"config.model.mlp_ratio={short_repr(ratio)}: must be a finite number above 0"
            )
        self.config_class = find_architecture(fields.get("architecture")).Config
        experts = 1
        kind = self.set_fields.get("mlp", "dense")
        if kind == "moe":
            kind = self.set_fields.get("expert_mlp", "dense")
            used = self.set_fields["experts_per_token"] + self.set_fields["num_shared_experts"]
            experts = max(1, used)  # none are refused with the other fields
        self.mlp_matrices = experts * (3 if kind == "gated" else 2)
        # All MLPs have the parameters of two matrices of width 4·d_model.
        self.usual_ratio = self.set_fields.get("mlp_ratio", 8 / self.mlp_matrices)

    def config(self, shape: _Shape) -> ModelConfig:
        """Raises UserError if there is no such model."""
        chosen = {
            "d_model": shape.d_model,
            "num_layers": shape.num_layers,
            "mlp_ratio": shape.mlp_width / shape.d_model,
            **self.set_fields,
        }
        rule = self.config_class.shape(chosen)
        if not isinstance(rule, Mapping):
            raise UserError(
                f"{self.config_class.__qualname__}.shape: returned {short_repr(rule)}; must return "
                "{field: value}"
            )
        follows = {
            name: value
            for name, value in rule.items()
            if name in self.fields and name not in chosen
        }
        return make_config(**{**self.fields, **follows, **chosen})

    def best(self, count: _Count, parameters: float) -> tuple[_Shape, ModelConfig]:
        """Returns the best valid shape by an approximate count. Raises UserError if there is none."""
        shapes = self.shapes(count, parameters)
        ranked = sorted(shapes, key=lambda shape: self.cost(shape, count(shape) / parameters))
        problems: dict[str, UserError] = {}  # by their messages
        for number, shape in enumerate(ranked, start=1):
            try:
                return shape, self.config(shape)
            except UserError as error:  # such as a number of paths that does not divide the blocks
                problems.setdefault(str(error), error)
            if number >= _TRIED and len(problems) == 1:  # it does not depend on the shape
                break
        raise next(iter(problems.values()))

    def shapes(self, count: _Count, parameters: float) -> Iterator[_Shape]:
        for d in self._options("d_model", _WIDTHS):
            usual = self.usual_depth(d)
            # even numbers of blocks, up to twice the usual one
            depths = range(1, 4 * usual + 1) if self.all_depths else range(2, 2 * usual + 1, 2)
            for layers in self._options("num_layers", depths):
                yield _Shape(d, layers, self._mlp_width(count, parameters, d, layers))

    def usual_depth(self, d_model: int) -> int:
        """Returns an even number, which two paths or stages divide."""
        has_learned = self.set_fields["position"] == "learned"
        least = _MIN_BLOCKS_LEARNED if has_learned else _MIN_BLOCKS
        if d_model >= _COPYING_WIDTH:
            least = max(least, 2 * self.set_fields.get("num_paths", 1))
        return max(least, 2 * round(d_model / _ASPECT / 2))

    def _options(self, field: str, usual):
        return (self.set_fields[field],) if field in self.set_fields else usual

    def _mlp_width(self, count: _Count, parameters: float, d: int, layers: int) -> int:
        usual = self.usual_ratio * d
        if "mlp_ratio" in self.set_fields:
            return max(1, round(usual))
        width = count.fitting_mlp(parameters, d, layers) or usual
        near_usual = min(max(width, usual / _SPREAD), usual * _SPREAD)
        unit = max(unit for least_d, unit in _MLP_UNITS.items() if d >= least_d)
        return max(1, unit * round(near_usual / unit))

    def cost(self, shape: _Shape, ratio: float) -> float:
        """An error of 1% costs as much as 2.7 times the usual depth."""
        if ratio <= 0:
            return math.inf
        depth = math.log(shape.num_layers / self.usual_depth(shape.d_model))
        mlp = 2 * math.log(shape.mlp_width / (self.usual_ratio * shape.d_model))
        return depth**2 + mlp**2 + (math.log(ratio) / _CLOSE) ** 2
