"""ParallelGPT (arXiv 2404.14462, section 3.1): a weighted sum of parallel paths of blocks."""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.layers import Dense
from smallgpt_jax.models.stacks import PER_LAYER, apply_slice, layer_configs, stack_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PGPTConfig(ModelConfig):
    # parallel paths; must divide num_layers
    num_paths: int = 2
    # weights of the paths: "learned" | "equal"
    path_weights: str = "learned"

    @property
    def depth(self) -> int:
        return self.num_layers // self.num_paths

    def validate(self) -> None:
        super().validate()
        self.validate_range("num_paths", least=1)
        if self.num_layers % self.num_paths:
            self.refuse("num_paths", f"must divide config.model.num_layers={self.num_layers}")
        self.validate_choice("path_weights", ("learned", "equal"))


class ParallelPath(nn.Module):
    config: PGPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        axes = ("embed", "path_embed")
        # The std 1/√D preserves the variance of the embeddings; 0.02 would shrink narrow ones.
        dense = Dense((c.d_model,), axes, c.d_model**-0.5, True, c.dtype, name="dense")
        blocks = stack_blocks(layer_configs(c, c.depth), context)
        return blocks(dense(x_BxTxD, context))


class PGPT(nn.Module):
    """A weighted sum of paths, whose parameters are stacked along a leading `path` axis. Learned
    weights are the softmax of P logits; the last is 0, the others start at 0.5. With two paths,
    this is the paper's released code: sigmoid(w)·path0 + (1 − sigmoid(w))·path1 with w initialized
    to 0.5.
    """

    config: PGPTConfig

    Config = PGPTConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        num_paths = self.config.num_paths
        if context.decode:  # without vmap, because each path has its own arrays (see `apply_slice`)
            path = ParallelPath(self.config, name="paths")
            outputs = [apply_slice(path, p, x_BxTxD, context) for p in range(num_paths)]
            y_PxBxTxD = jnp.stack(outputs)
        else:
            paths = nn.vmap(
                ParallelPath,
                in_axes=None,
                out_axes=0,
                axis_size=num_paths,
                variable_axes=PER_LAYER,
                split_rngs={"params": True, "dropout": True},
                spmd_axis_name="path",
                metadata_params={nn.PARTITION_NAME: "path"},
            )
            y_PxBxTxD = paths(self.config, name="paths")(x_BxTxD, context)
        if num_paths == 1:
            return y_PxBxTxD[0]
        if self.config.path_weights == "equal":
            return jnp.mean(y_PxBxTxD, axis=0)
        initial = nn.with_logical_partitioning(nn.initializers.constant(0.5), ("path_logits",))
        logits = self.param("path_logits", initial, (num_paths - 1,))
        # The path weights are replicated, so that devices exchange only the weighted sum of the
        # paths.
        weights_P = jax.nn.softmax(jnp.append(logits, 0.0)).astype(y_PxBxTxD.dtype)
        weights_P = nn.with_logical_constraint(weights_P, ("path_weights",))
        return jnp.einsum("p,pbtd->btd", weights_P, y_PxBxTxD)


def path_weights(params) -> np.ndarray:
    """Returns the path weights, (number of paths,) float64; they sum to 1."""
    trunk = params["trunk"]
    num_paths = len(trunk["paths"]["dense"]["bias"])
    equal = np.zeros(num_paths - 1)
    logits = np.asarray(trunk.get("path_logits", equal), np.float64)
    exponentials = np.exp(np.append(logits, 0.0))
    return exponentials / exponentials.sum()


def with_paths(config: PGPTConfig, params, model_state, paths: Sequence[int]):
    """Keeps only the paths with the indices `paths`; their weights are renormalized to sum to 1."""
    chosen = np.array(paths)

    def cut(variables):
        trunk = dict(variables.get("trunk", {}))
        if "paths" in trunk:
            trunk["paths"] = jax.tree.map(lambda x: x[chosen], trunk["paths"])
        return {**variables, "trunk": trunk} if trunk else variables

    params, model_state = cut(params), cut(model_state)
    # Removed from the copy made by `cut`, not from the caller's dict.
    logits = params["trunk"].pop("path_logits", None)
    if logits is not None and len(chosen) > 1:
        # Only differences of logits count, and the last one has to be 0.
        logits = jnp.append(logits, 0.0)[chosen]
        params["trunk"]["path_logits"] = logits[:-1] - logits[-1]
    length = config.num_layers // config.num_paths
    config = config.replace(num_paths=len(chosen), num_layers=length * len(chosen))
    return config, params, model_state
