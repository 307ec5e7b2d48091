"""What all architectures share: the model's configuration, the pre-LayerNorm block and its parts.

Shapes stand in names: B batch, T time (positions), D model width, H heads, K width of a head,
F width of the MLP, L layers, V vocabulary. Every weight here names its axes; `sharding.py` maps the
names onto the mesh. Layers of flax that name none (nn.Dense, nn.RMSNorm) work as well: each device
then has the whole weight. Weights are float32; products are computed in `config.dtype`.
"""

import dataclasses
import functools
import math
import typing

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import attention, positions

REMAT = {  # what the forward pass of a block keeps for the backward pass, which computes the rest again
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(attention.OUTPUT)),
    "full": jax.checkpoint_policies.nothing_saveable,
}
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
INIT_STD = 0.02  # GPT-2's: every weight normal(0, 0.02), residual projections scaled down


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The `model` group of a config, frozen; each field is explained in `configs/base.py`.

    The last group of fields belongs to single architectures and is None for the others.
    """

    architecture: str
    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    d_model: int
    mlp_ratio: int
    dropout: float
    use_bias: bool
    tie_embeddings: bool
    dtype: str
    scan_layers: bool
    activation: str = "gelu"
    position: str = "learned"
    attention: str = "auto"
    remat: str = "none"
    num_paths: int | None = None
    path_weights: str | None = None
    blocks_per_stage: int | None = None
    compress_last_stage: bool | None = None
    stage_heads: str | None = None
    conv_kernel: int | None = None

    def refuse(self, field: str, rule: str):
        """Raises UserError naming a field of the model group, its value and the rule it breaks."""
        raise UserError(f"config.model.{field}={getattr(self, field)!r}: {rule}")

    def check_types(self) -> None:
        """Raises UserError for a value of another type than its field's: a config.json can hold anything."""
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), typing.get_args(field.type) or (field.type,)
            kinds += (int,) * (float in kinds)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                self.refuse(field.name, f"must be {TYPE_NAMES[kinds[0]]}")

    def check(self) -> None:
        """Raises UserError if no model of any architecture can have these sizes."""
        for field in ("vocab_size", "context_length", "num_layers", "num_heads", "d_model",
                      "mlp_ratio"):
            if getattr(self, field) < 1:
                self.refuse(field, "must be at least 1")
        if not 0 <= self.dropout < 1:
            self.refuse("dropout", "must be at least 0 and below 1")
        for field, allowed in (("dtype", ("float32", "bfloat16")), ("remat", ("none", *REMAT)),
                               ("activation", ACTIVATIONS), ("position", positions.KINDS),
                               ("attention", attention.BACKENDS)):
            if getattr(self, field) not in allowed:
                self.refuse(field, f"must be one of {', '.join(allowed)}")
        if self.d_model % self.num_heads:
            self.refuse("num_heads", f"must divide config.model.d_model={self.d_model}")
        self.check_rotation()

    def check_rotation(self) -> None:
        """Raises UserError if `position` is "rope" and a head's entries are no pairs."""
        head_width = self.d_model // self.num_heads
        if self.position == "rope" and head_width % 2:
            self.refuse("position", f"heads must have an even width, those of blocks of width {self.d_model} have "
                        f"{head_width}; set another config.model.num_heads")


@flax.struct.dataclass
class Mode:
    """How a model is applied: what layers have to know besides the activations.

    In training and evaluation each row is a whole text from position 0 on, or, with segments, several
    that know nothing of each other. In decoding the rows go on from where their caches end, and layers
    keep in the collection "cache", row by row, what later positions need of these. Rows may differ in
    length: what fills them up comes last.
    """

    train: bool = flax.struct.field(pytree_node=False, default=False)  # dropout is applied
    # Decoding: the number of positions that a new cache has room for; None when not decoding.
    cache_length: int | None = flax.struct.field(pytree_node=False, default=None)
    start_B: jax.Array | None = None  # the position of each row's first token
    length_B: jax.Array | None = None  # how many tokens each row has
    segments_BxT: jax.Array | None = None  # not decoding: integers that number the texts of a row

    @property
    def decode(self) -> bool:
        return self.cache_length is not None

    def positions(self, time: int):
        """The position of each token in its text, (B or 1, time)."""
        places_1xT = jnp.arange(time)[None]
        if self.decode:
            return self.start_B[:, None] + places_1xT
        if self.segments_BxT is None:
            return places_1xT
        begins_BxT = jnp.diff(self.segments_BxT, axis=1, prepend=-1) != 0
        return places_1xT - jax.lax.cummax(jnp.where(begins_BxT, places_1xT, 0), axis=1)


EVALUATION = Mode()


class Trunk(nn.Module):
    """What an architecture is: the layers between the embedding and the final LayerNorm.

    A subclass maps (B, T, D) activations to (B, T, `output_width(config)`) ones, lists in
    `own_fields` the fields of ModelConfig that it alone reads, and refuses in `check` what it
    cannot build. It hands `mode` on to its blocks.
    """

    config: ModelConfig

    own_fields = ()

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises UserError if this architecture cannot be built from `config`."""

    @classmethod
    def output_width(cls, config: ModelConfig) -> int:
        return config.d_model

    def __call__(self, x_BxTxD, mode: Mode):
        raise NotImplementedError


class Dense(nn.Module):
    """x·W (+ b) on (B, T, *inputs) → (B, T, *features); kernel (*inputs, *features).

    `axes` names the kernel's axes. The product is taken on two-dimensional arrays: on a CPU, XLA
    fuses what surrounds a three-dimensional one into slower loops. Decoding keeps the kernel as such
    an array, (inputs, outputs).
    """

    features: tuple[int, ...]
    axes: tuple[str, ...]
    init_std: float
    use_bias: bool
    dtype: str

    @nn.compact
    def __call__(self, x, mode: Mode):
        return self.decoding_product(x) if mode.decode else self.product(x)

    def product(self, x):
        batch_and_time, inputs = x.shape[:2], x.shape[2:]
        kernel_IxO = self.kernel(inputs).reshape(math.prod(inputs), -1)
        y_RxO = product(x.reshape(-1, len(kernel_IxO)).astype(self.dtype), kernel_IxO)
        return self.with_bias(y_RxO.reshape(*batch_and_time, *self.features))

    def decoding_product(self, x):
        batch_and_time, size_in = x.shape[:2], math.prod(x.shape[2:])
        matrix_IxO = self.param("matrix", nn.initializers.zeros,
                                (size_in, math.prod(self.features))).astype(self.dtype)
        y_RxO = jnp.dot(x.reshape(-1, size_in).astype(self.dtype), matrix_IxO)
        return self.with_bias(y_RxO.reshape(*batch_and_time, *self.features))

    def kernel(self, inputs: tuple[int, ...]):
        weight = self.param("kernel", normal(self.init_std, *self.axes), inputs + self.features)
        return sharding.gathered(weight.astype(self.dtype), self.axes)

    def with_bias(self, y_BxTxO):
        if not self.use_bias:
            return y_BxTxO
        bias = self.param("bias", zeros(*self.axes[-len(self.features):]), self.features)
        return y_BxTxO + bias[None, None].astype(self.dtype)


class IntoHeads(Dense):
    """The fused projection to queries, keys and values, (B, T, D) → three of (B, H, T, K).

    Heads come first in the fused kernel, (D, H, 3, K), so that a mesh can split it by heads. The
    three products are taken apart, each writing what attention reads: TPUs would else copy them. On a
    CPU one product is faster, copies included.
    """

    def product(self, x_BxTxD):
        if sharding.platform() == "cpu":
            return in_heads(super().product(x_BxTxD))
        kernel_DxHx3xK = self.kernel(x_BxTxD.shape[2:])
        parts = (jnp.einsum("btd,dhk->bhtk", x_BxTxD.astype(self.dtype), kernel_DxHx3xK[:, :, i])
                 for i in range(3))
        if not self.use_bias:
            return tuple(parts)
        bias_Hx3xK = self.param("bias", zeros(*self.axes[1:]), self.features).astype(self.dtype)
        return tuple(part + bias_Hx3xK[None, :, i, None] for i, part in enumerate(parts))

    def decoding_product(self, x_BxTxD):
        return in_heads(super().decoding_product(x_BxTxD))


def in_heads(y_BxTxHx3xK):
    """Three of (B, H, T, K)."""
    return tuple(jnp.moveaxis(y_BxTxHx3xK, (3, 2), (0, 2)))


class FromHeads(Dense):
    """The projection of what heads have found, (B, H, T, K) → (B, T, D); kernel (H, K, D)."""

    def product(self, x_BxHxTxK):
        _, heads, _, head_width = x_BxHxTxK.shape
        kernel_HxKxD = self.kernel((heads, head_width))
        return self.with_bias(
            jnp.einsum("bhtk,hkd->btd", x_BxHxTxK.astype(self.dtype), kernel_HxKxD))

    def decoding_product(self, x_BxHxTxK):
        return super().decoding_product(jnp.swapaxes(x_BxHxTxK, 1, 2))


def product(x_RxI, w_IxO):
    """x·w, (R, O). On a CPU a tall w is transposed first, so that its gradient is the product that gives a
    wide matrix: XLA has that one a fifth faster. The barrier keeps it from undoing this."""
    inputs, outputs = w_IxO.shape
    if sharding.platform() == "cpu" and inputs > outputs:
        contract_last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x_RxI, jax.lax.optimization_barrier(w_IxO.T), contract_last)
    return jnp.dot(x_RxI, w_IxO)


def normal(std: float, *axes: str):
    """Initialiser of a weight: normal(0, std), its axes named."""
    return nn.with_logical_partitioning(nn.initializers.normal(std), axes)


def zeros(*axes: str):
    """Initialiser of a bias, its axes named."""
    return nn.with_logical_partitioning(nn.initializers.zeros, axes)


def layer_norm(config: ModelConfig, name: str) -> nn.LayerNorm:
    """LayerNorm over the last axis, a bias only if the model has biases.

    The variance is E[x²] − E[x]², in float32: one pass where E[(x − E[x])²] takes two.
    """
    return nn.LayerNorm(
        epsilon=1e-5, use_bias=config.use_bias, dtype=config.dtype,
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("norm",)),
        bias_init=zeros("norm"), name=name)


@jax.custom_vjp
def gelu(x):
    """GELU, x·Φ(x), with the exact Φ (Hendrycks & Gimpel, arXiv 1606.08415).

    Computed in float32: in bfloat16, 1 + erf loses what Φ is for negative x. Its derivative is computed with its
    value and kept for the backward pass, in place of x and in its type: no more memory, and a quarter of the time
    on a CPU, where `erf` and `exp` are what it costs.
    """
    return _gelu_forward(x)[0]


def _gelu_forward(x):
    x_f32 = x.astype(jnp.float32)
    cdf = 0.5 * (1 + jax.lax.erf(x_f32 * math.sqrt(0.5)))
    density = jnp.exp(-0.5 * jnp.square(x_f32)) * (1 / math.sqrt(2 * math.pi))
    return (x_f32 * cdf).astype(x.dtype), (cdf + x_f32 * density).astype(x.dtype)


def _gelu_backward(derivative, cotangent):
    return (cotangent * derivative,)


gelu.defvjp(_gelu_forward, _gelu_backward)


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": functools.partial(nn.gelu, approximate=True)}


class Attention(nn.Module):
    """Causal self-attention with one fused projection to queries, keys and values.

    When decoding, keys (with "rope" as they are rotated) and values of all positions so far are kept:
    2·B·S·D numbers of the model's type, S the cache's length.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, mode: Mode):
        c = self.config
        heads, head_width = c.num_heads, c.d_model // c.num_heads
        q, k, v = IntoHeads(
            (heads, 3, head_width), ("embed", "heads", "qkv", "head_width"),
            INIT_STD, c.use_bias, c.dtype, name="qkv")(x_BxTxD, mode)
        if c.position == "rope":
            positions_BxT = mode.positions(x_BxTxD.shape[1])
            q, k = positions.rotated(q, positions_BxT), positions.rotated(k, positions_BxT)
        slopes_H = positions.alibi_slopes(heads) if c.position == "alibi" else None
        if mode.decode:
            y_BxHxTxK = self.attend_with_cache(q, k, v, slopes_H, mode)
        else:
            y_BxHxTxK = attention.causal_attention(
                q, k, v, mode.segments_BxT, slopes_H, backend=c.attention)
        return FromHeads(
            (c.d_model,), ("heads", "head_width", "embed"),
            residual_std(c), c.use_bias, c.dtype, name="out")(y_BxHxTxK, mode)

    def attend_with_cache(self, q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, slopes_H, mode: Mode):
        """Attention to each row's earlier positions too, which the cache holds; adds these to it.

        Slot s of the cache is position s. What fills up short rows is written as well, beyond their
        ends: nothing looks there before it is written over. Rows and heads share an axis: with two,
        XLA's CPU compiler copies the whole cache for each token.
        """
        batch, heads, time, head_width = k_BxHxTxK.shape
        shape = (batch * heads, mode.cache_length, head_width)
        keys, is_new = remembered(self, "keys", shape, k_BxHxTxK.dtype)
        values, _ = remembered(self, "values", shape, v_BxHxTxK.dtype)
        q, k, v = (x.reshape(batch * heads, time, head_width) for x in (q_BxHxTxK, k_BxHxTxK, v_BxHxTxK))
        if slopes_H is not None:
            slopes_H = np.tile(slopes_H, batch)
        if is_new:
            room = ((0, 0), (0, mode.cache_length - time), (0, 0))
            keys.value, values.value = jnp.pad(k, room), jnp.pad(v, room)
            part = attention.QUERIES
            y = jnp.concatenate([  # a part of the queries at a time, which look at no later keys
                attend(q[:, i:i + part], k[:, :i + part], v[:, :i + part],
                       jnp.arange(i, min(i + part, time))[None], slopes_H)
                for i in range(0, time, part)], axis=1)
        else:
            keys.value = write(keys.value, k, jnp.repeat(mode.start_B, heads))
            values.value = write(values.value, v, jnp.repeat(mode.start_B, heads))
            y = attend(q, keys.value, values.value, jnp.repeat(mode.positions(time), heads, axis=0), slopes_H)
        return y.reshape(batch, heads, time, head_width)


def write(cache_HxSxK, x_HxTxK, start_H):
    """The cache with x in the slots from each row's start on; slots beyond S are dropped."""
    rows, time, _ = x_HxTxK.shape
    if time > 1:
        slots_HxT = start_H[:, None] + jnp.arange(time)[None]
        return cache_HxSxK.at[jnp.arange(rows)[:, None], slots_HxT].set(x_HxTxK, mode="drop")
    if rows == 1:  # of what follows, the compiler makes something slower
        return jax.lax.dynamic_update_slice(cache_HxSxK, x_HxTxK, (0, start_H[0], 0))
    return jax.vmap(lambda row, x, start: jax.lax.dynamic_update_slice(row, x, (start, 0)))(
        cache_HxSxK, x_HxTxK, start_H)


def attend(q_HxTxK, keys_HxSxK, values_HxSxK, positions_HxT, slopes_H):
    """softmax(q·keysᵀ/√K)·values over the slots up to each query's position, (H, T, K).

    `slopes_H` as in `attention.causal_attention`.
    """
    # One query is a matrix–vector product, which XLA's CPU compiler sees only without the axis.
    t = "" if q_HxTxK.shape[1] == 1 else "t"
    q = (q_HxTxK if t else q_HxTxK[:, 0]) / math.sqrt(q_HxTxK.shape[2])
    scores = jnp.einsum(f"h{t}k,hsk->h{t}s", q, keys_HxSxK, preferred_element_type=jnp.float32)
    slots_1x1xS = jnp.arange(keys_HxSxK.shape[1])[None, None]
    is_past_HxTxS = slots_1x1xS <= positions_HxT[:, :, None]
    if slopes_H is not None:
        distances_HxTxS = positions_HxT[:, :, None] - slots_1x1xS
        scores -= (slopes_H[:, None, None] * distances_HxTxS).reshape(scores.shape)
    weights = jax.nn.softmax(jnp.where(is_past_HxTxS.reshape(-1, *scores.shape[1:]), scores, -1e30))
    y = jnp.einsum(f"h{t}s,hsk->h{t}k", weights.astype(values_HxSxK.dtype), values_HxSxK)
    return y.reshape(q_HxTxK.shape)


def remembered(module: nn.Module, name: str, shape: tuple[int, ...], dtype):
    """A variable of the collection "cache", zero at first, and whether it is new.

    A module that is called several times in one pass has one for each call: layers may be shared.
    """
    calls = module.get_variable("calls", name, 0)
    module.put_variable("calls", name, calls + 1)
    is_new = not module.has_variable("cache", f"{name}_{calls}")
    return module.variable("cache", f"{name}_{calls}", jnp.zeros, shape, dtype), is_new


class MLP(nn.Module):
    """Two dense layers with a GELU between them, `mlp_ratio` times as wide inside."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, mode: Mode):
        c = self.config
        h_BxTxF = Dense(
            (c.mlp_ratio * c.d_model,), ("embed", "mlp"),
            INIT_STD, c.use_bias, c.dtype, name="up")(x_BxTxD, mode)
        return Dense(
            (c.d_model,), ("mlp", "embed"),
            residual_std(c), c.use_bias, c.dtype, name="down")(ACTIVATIONS[c.activation](h_BxTxF), mode)


def residual_std(config: ModelConfig) -> float:
    """Initial scale of what is added to the residual stream: 0.02/√(2N), N the model's blocks.

    The sum of the 2N projections then starts with the variance of one (GPT-2 report, section 2.3).
    """
    return INIT_STD / math.sqrt(2 * config.num_layers)


class Block(nn.Module):
    """A pre-LayerNorm block: x + attention(LN(x)), then x + MLP(LN(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, mode: Mode):
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=not mode.train)
        x_BxTxD += dropout(
            Attention(c, name="attention")(layer_norm(c, "attention_norm")(x_BxTxD), mode))
        x_BxTxD += dropout(MLP(c, name="mlp")(layer_norm(c, "mlp_norm")(x_BxTxD), mode))
        return nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))


def blocks(config: ModelConfig, length: int, mode: Mode, name: str):
    """`length` blocks in a row, (B, T, D) → (B, T, D), their weights stacked on a `layers` axis.

    `config.scan_layers` loops over them (compile time flat in depth); otherwise they are unrolled.
    The weights have the same layout either way. Only for decoding they lie apart, as NAME_0,
    NAME_1, … (see `inference.decoder.unstacked`): slicing a stack would copy the weights for each token.
    """
    if mode.decode:
        def in_a_row(x_BxTxD):
            for block in apart:
                x_BxTxD = block(x_BxTxD, mode)
            return x_BxTxD

        apart = [Block(config, name=f"{name}_{i}") for i in range(length)]
        return in_a_row

    def step(block, x_BxTxD):
        return block(x_BxTxD, mode), None

    if config.remat != "none":
        step = nn.remat(step, policy=REMAT[config.remat], prevent_cse=not config.scan_layers)
    scanned = nn.scan(
        step, length=length, unroll=1 if config.scan_layers else length,
        variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True},
        metadata_params={nn.PARTITION_NAME: "layers"})
    block = Block(config, name=name)
    return lambda x_BxTxD: scanned(block, x_BxTxD)[0]
