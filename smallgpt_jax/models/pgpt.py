"""ParallelGPT (arXiv 2404.14462, section 3.1): paths side by side, joined by a learned weighting."""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.models.layers import Dense, Mode, ModelConfig, Trunk, blocks


class Path(nn.Module):
    """One path: its own dense layer with a bias, then `length` blocks; (B, T, D) → (B, T, D).

    The dense layer starts with weights that keep the variance: GPT-2's 0.02 would shrink the
    embeddings of narrow models.
    """

    config: ModelConfig
    length: int

    @nn.compact
    def __call__(self, x_BxTxD, mode: Mode):
        c = self.config
        x_BxTxD = Dense(
            (c.d_model,), ("embed", "path_embed"), c.d_model**-0.5, True, c.dtype, name="dense")(
                x_BxTxD, mode)
        return blocks(c, self.length, mode, name="blocks")(x_BxTxD)


class PGPT(Trunk):
    """`num_paths` paths of num_layers / num_paths blocks; (B, T, D) → (B, T, D).

    The weights of the paths are a softmax over P logits, the last of which stays at zero: with two
    paths that is the released code's sigmoid(w)·path0 + (1 − sigmoid(w))·path1. The other logits
    start at 0.5, as w does there. With `path_weights` "equal" each path has 1/P. Path parameters are stacked
    on a leading `path` axis.
    """

    own_fields = ("num_paths", "path_weights")

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if config.num_paths < 1:
            config.refuse("num_paths", "must be at least 1")
        if config.num_layers % config.num_paths:
            config.refuse("num_paths", f"must divide config.model.num_layers={config.num_layers}")
        if config.path_weights not in ("learned", "equal"):
            config.refuse("path_weights", "must be 'learned' or 'equal'")

    @nn.compact
    def __call__(self, x_BxTxD, mode: Mode):
        num_paths = self.config.num_paths
        length = self.config.num_layers // num_paths
        if mode.decode:  # weights apart, as those of `blocks`
            y_PxBxTxD = jnp.stack([Path(self.config, length, name=f"paths_{p}")(x_BxTxD, mode)
                                   for p in range(num_paths)])
        else:
            paths = nn.vmap(
                Path, in_axes=None, out_axes=0, axis_size=num_paths, variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True}, spmd_axis_name="path",
                metadata_params={nn.PARTITION_NAME: "path"})
            y_PxBxTxD = paths(self.config, length, name="paths")(x_BxTxD, mode)
        if num_paths == 1:
            return y_PxBxTxD[0]
        if self.config.path_weights == "equal":
            return jnp.mean(y_PxBxTxD, axis=0)
        logits = self.param(
            "path_logits",
            nn.with_logical_partitioning(nn.initializers.constant(0.5), ("path_logits",)),
            (num_paths - 1,))
        # Whole on each device, so that nothing but the sum of the paths passes between them.
        weights_P = nn.with_logical_constraint(
            jax.nn.softmax(jnp.append(logits, 0.0)).astype(y_PxBxTxD.dtype), ("path_weights",))
        return jnp.einsum("p,pbtd->btd", weights_P, y_PxBxTxD)


def path_weights(params) -> np.ndarray:
    """The weights of a pgpt's paths, (P,) float64; they sum to 1."""
    equal = np.zeros(len(params["trunk"]["paths"]["dense"]["bias"]) - 1)
    logits = np.asarray(params["trunk"].get("path_logits", equal), np.float64)
    exponentials = np.exp(np.append(logits, 0.0))
    return exponentials / exponentials.sum()


def with_paths(config: ModelConfig, params, paths: Sequence[int]):
    """The pgpt that is left with these paths only: its config and parameters.

    The weights of the paths are those it has, renormalised over the chosen ones.
    """
    trunk = params["trunk"]
    chosen = np.array(paths)
    kept = {"paths": jax.tree.map(lambda x: x[chosen], trunk["paths"])}
    if len(chosen) > 1 and "path_logits" in trunk:
        logits = jnp.append(trunk["path_logits"], 0.0)[chosen]
        kept["path_logits"] = logits[:-1] - logits[-1]
    length = config.num_layers // config.num_paths
    config = dataclasses.replace(config, num_paths=len(chosen), num_layers=length * len(chosen))
    return config, {**params, "trunk": kept}
