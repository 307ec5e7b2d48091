"""The sizes of activations after a few training steps, and configs at other widths and depths.

coordinate_check.py, learning_rate_transfer.py and the tests import it. It defines no flags.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import Training
from smallgpt_jax.models import LanguageModel
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.state import TrainState


def coordinates(config: Config, steps: int = 5) -> dict[str, float]:
    """Returns {kind of layer: mean |output|} after `steps` training steps; of the logits, the mean
    |change|.
    """
    training = Training(config.replace(optimizer={"schedule": "constant", "warmup_steps": 0}))
    model, inputs_BxT = training.program.model, training.batch.tokens_BxT1[:, :-1]
    initial_logits, _ = outputs(model, training.state, inputs_BxT)
    training.run(steps)
    logits, collected = outputs(model, training.state, inputs_BxT)
    return {
        **mean_sizes(collected),
        "change of logits": float(jnp.mean(jnp.abs(logits - initial_logits))),
    }


@functools.partial(jax.jit, static_argnums=0)
def outputs(model: LanguageModel, state: TrainState, tokens_BxT):
    """Returns the logits, and the mean |output| of each module as the value "size" in the
    collection "features".
    """

    def record(call, arguments, keywords, method: nn.module.InterceptorContext):
        y = call(*arguments, **keywords)
        if method.method_name == "__call__" and isinstance(y, jax.Array):
            method.module.sow("features", "size", jnp.mean(jnp.abs(y.astype(jnp.float32))))
        return y

    with nn.intercept_methods(record):
        return model.apply(
            {"params": state.params, "state": state.model_state}, tokens_BxT, mutable=["features"]
        )


def mean_sizes(collected) -> dict[str, float]:
    sizes: dict[str, list] = {}
    for path, size in jax.tree_util.tree_leaves_with_path(collected["features"]):
        *modules, name = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        if (
            name == "size" and modules and modules[-1] != "Dropout_0"
        ):  # modules is empty for the model itself
            sizes.setdefault(kind(modules), []).append(float(jnp.mean(size)))
    return {kind: float(np.mean(means)) for kind, means in sizes.items()}


def kind(modules: list[str]) -> str:
    """Returns the name of a layer without the number of its stack, such as
    "blocks/attention/out".
    """
    names = {("dropout",): "embedding", ("trunk",): "trunk"}
    return names.get(tuple(modules)) or "/".join(
        name for name in modules if name != "trunk" and not name.isdigit()
    )


def at_size(config: Config, field: str, value: int, base: int) -> Config:
    """Returns the config with the width or depth `value`. A `base` of 0 turns muP or CompleteP
    off.
    """
    model = config.model
    fields = {field: value}
    if field == "d_model" and model.head_dim:  # the number of heads is proportional to the width
        fields |= {
            name: getattr(model, name) * value // model.d_model
            for name in ("num_heads", "num_kv_heads")
        }
    return config.replace(
        model=fields, optimizer={"base_width" if field == "d_model" else "base_depth": base}
    )


def spread(means: list[dict[str, float]]) -> dict[str, float]:
    """Returns {kind of layer: its largest mean, divided by its smallest}."""
    return {kind: max(m[kind] for m in means) / min(m[kind] for m in means) for kind in means[0]}
