"""ParallelGPT (arXiv 2404.14462, section 3.1): paths side by side, joined by a learned weighting."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.models.layers import Dense, ModelConfig, Trunk, blocks


class Path(nn.Module):
    """One path: its own dense layer with a bias, then `length` blocks; (B, T, D) → (B, T, D).

    The dense layer starts with weights that keep the variance: GPT-2's 0.02 would shrink the
    embeddings of narrow models.
    """

    config: ModelConfig
    length: int
    train: bool

    @nn.compact
    def __call__(self, x_BxTxD):
        c = self.config
        x_BxTxD = Dense(
            (c.d_model,), ("embed", "path_embed"), c.d_model**-0.5, True, c.dtype, name="dense")(x_BxTxD)
        return blocks(c, self.length, self.train, name="blocks")(x_BxTxD)


class PGPT(Trunk):
    """`num_paths` paths of num_layers / num_paths blocks; (B, T, D) → (B, T, D).

    The weights of the paths are a softmax over P logits, the last of which stays at zero: with two
    paths that is the released code's sigmoid(w)·path0 + (1 − sigmoid(w))·path1. The other logits
    start at 0.5, as w does there. Path parameters are stacked on a leading `path` axis.
    """

    own_fields = ("num_paths",)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if config.num_paths < 1:
            config.refuse("num_paths", "must be at least 1")
        if config.num_layers % config.num_paths:
            config.refuse("num_paths", f"must divide config.model.num_layers={config.num_layers}")

    @nn.compact
    def __call__(self, x_BxTxD, train: bool):
        num_paths = self.config.num_paths
        paths = nn.vmap(
            Path, in_axes=None, out_axes=0, axis_size=num_paths, variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True}, spmd_axis_name="path",
            metadata_params={nn.PARTITION_NAME: "path"})
        length = self.config.num_layers // num_paths
        y_PxBxTxD = paths(self.config, length, train, name="paths")(x_BxTxD)
        if num_paths == 1:
            return y_PxBxTxD[0]
        logits = self.param(
            "path_logits",
            nn.with_logical_partitioning(nn.initializers.constant(0.5), ("path_logits",)),
            (num_paths - 1,))
        weights_P = jax.nn.softmax(jnp.append(logits, 0.0)).astype(y_PxBxTxD.dtype)
        return jnp.einsum("p,pbtd->btd", weights_P, y_PxBxTxD)
