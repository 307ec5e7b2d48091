"""Checks the kernels of a model's mixers on the devices that use them: before a run, and before
decoding.

Shapes as in `ops.attention`: B batch, H heads, G key–value heads, R = H/G, T time, S keys, K head
width; C is a chunk of queries.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.gated_delta import GatedDeltaNet
from smallgpt_jax.models.language_model import LanguageModel
from smallgpt_jax.models.mamba import Mamba2
from smallgpt_jax.models.structure import AttentionLayers, attention_layers, mixers
from smallgpt_jax.ops import gated_delta, recurrence_kernel, state_space
from smallgpt_jax.ops.attention import attention
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.ops.chunks import RecurrenceInputs

TOLERANCE = 0.01  # the error of a correct kernel in bfloat16 is below 0.006
_LEAST = 1e-3  # of a norm by which an error is divided, relative to the largest one
_PARTS = (
    "outputs",
    "last state",
    *(f"gradients of {inputs}" for inputs in ("queries", "keys", "values", "decays", "β")),
)


def check_attention_kernels(
    model: LanguageModel, mesh: jax.sharding.Mesh, separate_documents: bool
) -> None:
    """Raises UserError if a kernel is wrong on these devices (collective)."""
    if mesh.devices.flat[0].platform == "cpu":
        return
    kernels = {}  # one of each kind, in an order that all processes have
    for layers in attention_layers(model, mesh, separate_documents):
        if layers.backend != "xla":
            kind = (layers.backend, layers.head_width, layers.window, layers.heads, layers.kv_heads)
            kernels[kind] = layers
    for layers in kernels.values():
        error = _relative_error(mesh, layers, model.config, separate_documents)
        if not error < TOLERANCE:  # also true for NaN
            raise UserError(
                f"config.model.attention={model.config.attention}: on this "
                f"{jax.devices()[0].device_kind}, the {layers.backend} kernel for heads of width "
                f"{layers.head_width} has a relative error of {error:.2g}; set "
                "--config.model.attention=xla"
            )


def check_recurrence_kernels(model: LanguageModel, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError if a kernel of delta or mamba is wrong on these devices (collective)."""
    c = model.config
    if mesh.devices.flat[0].platform != "tpu" or c.attention == "xla":
        return
    for mixer, heads, *widths in sorted(recurrences(model)):
        if not recurrence_kernel.fits(c.context_length, *widths):
            continue
        errors = _recurrence_errors(mesh, mixer, heads, *widths)
        worst = int(np.argmax(errors))  # the index of NaN, if there is one
        if not errors[worst] < TOLERANCE:
            raise UserError(
                f"config.model.mixers={c.mixers}: on this {jax.devices()[0].device_kind}, the "
                f"kernel of {mixer!r} for keys of width {widths[0]} has a relative error of "
                f"{errors[worst]:.2g} in the {_PARTS[worst]}; set --config.model.attention=xla, "
                "with which no mixer uses a kernel"
            )


def recurrences(model: LanguageModel) -> set[tuple[str, int, int, int]]:
    """Returns (mixer, heads, width of keys, width of values) of all blocks."""
    sizes = set()
    for mixer in mixers(model).values():
        c = mixer.config
        if isinstance(mixer, GatedDeltaNet):
            sizes.add(("delta", c.num_heads, c.delta_key_width, c.delta_value_width))
        elif isinstance(mixer, Mamba2):
            sizes.add(("mamba", c.num_heads, c.mamba_state, c.mamba_head_width))
    return sizes


def _recurrence_errors(
    mesh, mixer: str, heads: int, key_width: int, value_width: int
) -> np.ndarray:
    """Returns the relative errors of _PARTS, for two rows per device."""
    # A row is the end of one text, which sees the state that another call has left, and the
    # beginning of the next.
    is_delta = mixer == "delta"
    in_kernel = recurrence_kernel.in_kernel
    in_plain_jax = (gated_delta if is_delta else state_space).in_plain_jax
    rows, time = 2 * sharding.num_batch_shards(mesh), 1024
    shared = heads if is_delta else 1  # heads of queries and keys

    def errors():
        keys = iter(jax.random.split(jax.random.key(0), 7))

        def normal(*shape):
            return jax.random.normal(next(keys), (rows, *shape))

        q, k = normal(time, shared, key_width), normal(time, shared, key_width)
        v, dy = normal(time, heads, value_width), normal(time, heads, value_width)
        decay, beta = normal(time, heads), normal(time, heads)
        state = normal(heads, key_width, value_width)
        k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
        # values that bfloat16 represents, because the kernel rounds them to it
        q, k, v, dy = (x.astype("bfloat16").astype("float32") for x in (q, k, v, dy))
        inputs = [q, k, v, -jax.nn.softplus(decay - 3)]
        if is_delta:
            inputs.append(jax.nn.sigmoid(beta))
        begins_1xT = jnp.arange(time)[None] == 700  # the border of the texts, inside a chunk
        return _relative_errors(
            lambda *inputs: in_kernel(RecurrenceInputs(*inputs), begins_1xT, state),
            lambda *inputs: in_plain_jax(RecurrenceInputs(*inputs), begins_1xT, state),
            inputs,
            dy,
        )

    return _run_on_all(errors, mesh)


def _relative_error(
    mesh, layers: AttentionLayers, c: ModelConfig, separate_documents: bool
) -> float:
    """Returns the largest ‖x − r‖ / ‖r‖ of outputs and gradients x; r: `plain_attention`."""
    # Each device gets two rows and, if the layers have as many, two key–value heads.
    tensor, per_group = mesh.shape["tensor"], layers.heads // layers.kv_heads
    groups = min(layers.kv_heads, 2 * tensor) if layers.kv_heads % tensor == 0 else layers.kv_heads
    rows, time = 2 * sharding.num_batch_shards(mesh), c.context_length

    def errors():
        q, k, v, dy = _sample_inputs(
            (rows, groups, per_group, time, layers.head_width), c.dtype, layers.window
        )
        # The texts' border differs between the two rows of a device.
        borders_B = (1 + jnp.arange(rows) % 2) * time // 3
        segment_ids = None
        if separate_documents:
            segment_ids = (jnp.arange(time)[None] >= borders_B[:, None]).astype("int32")
        is_causal = c.attention_mask != "bidirectional"
        mask = AttentionMask(layers.window, segment_ids, is_causal=is_causal)
        return _relative_errors(
            lambda *qkv: (attention(*qkv, mask, backend=layers.backend),),
            lambda *qkv: (plain_attention(*qkv, mask),),
            (q, k, v),
            dy,
            c.dtype,
        )

    return float(np.max(_run_on_all(errors, mesh)))


def _relative_errors(kernel, oracle, inputs, dy, dtype: str = "float32"):
    """Returns ‖x − r‖ / ‖r‖ of the outputs, and of the gradients of the first one by the inputs.

    x are those of `kernel` in `dtype`, r those of `oracle`.
    """

    def outputs_and_gradients(function, dtype):
        def weighted_sum(*inputs):
            outputs = function(*inputs)
            return jnp.sum(outputs[0].astype("float32") * dy), outputs

        gradients, outputs = jax.grad(weighted_sum, range(len(inputs)), has_aux=True)(
            *(x.astype(dtype) for x in inputs)
        )
        return [x.astype("float32") for x in (*outputs, *gradients)]

    results = outputs_and_gradients(kernel, dtype)
    with jax.default_matmul_precision("highest"):
        expected = outputs_and_gradients(oracle, "float32")
    norms = jnp.stack([jnp.linalg.norm(r) for r in expected])
    # In a window of one position, the gradients of queries and keys are 0.
    scales = jnp.maximum(norms, _LEAST * jnp.max(norms))
    return jnp.stack([jnp.linalg.norm(x - r) for x, r in zip(results, expected)]) / scales


def _run_on_all(errors, mesh) -> np.ndarray:
    """Every device has the result, so that all processes of a run agree on it."""
    with sharding.use_mesh(mesh):
        return np.asarray(jax.jit(errors, out_shardings=jax.sharding.PartitionSpec())())


def _sample_inputs(shape: tuple[int, ...], dtype: str, window: int) -> list[jax.Array]:
    """Returns float32 queries, keys, values, output gradients that `dtype` represents."""
    rows, groups, per_group, time, width = shape
    q_key, k_key, v_key, dy_key = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(q_key, (rows, groups * per_group, time, width))
    k = jax.random.normal(k_key, (rows, groups, time, width))
    v = jax.random.normal(v_key, (rows, groups, time, width))
    dy = jax.random.normal(dy_key, (rows, groups * per_group, time, width))
    # The keys just inside and outside the window have large scores, because one key among many
    # would hardly show.
    if window:
        inside, outside = jnp.roll(k, window - 1, axis=2), jnp.roll(k, window, axis=2)
        edge_BxHxTxK = jnp.repeat(inside + outside, per_group, axis=1)
        # The score of both keys; less for narrow heads, whose scores vary more.
        score = min(1, width / 16) * math.log(window)
        q += score / math.sqrt(width) * edge_BxHxTxK
    # The kernel and the oracle, which computes in float32, then read equal numbers.
    dtype = jnp.finfo(dtype)
    return [jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant) for x in (q, k, v, dy)]


def plain_attention(q_BxHxTxK, k_BxGxTxK, v_BxGxTxK, mask: AttentionMask):
    """Returns the attention output without any code of `ops/`, in chunks of queries."""
    batch, _, time, width = q_BxHxTxK.shape
    length = math.gcd(time, 128)
    q_BxGxRxTxK = q_BxHxTxK.reshape(batch, k_BxGxTxK.shape[1], -1, time, width)
    ids_BxT = jnp.zeros((batch, time)) if mask.segment_ids_BxT is None else mask.segment_ids_BxT

    @jax.checkpoint
    def outputs(start):
        q_BxGxRxCxK = jax.lax.dynamic_slice_in_dim(q_BxGxRxTxK, start, length, axis=3)
        ids_BxC = jax.lax.dynamic_slice_in_dim(ids_BxT, start, length, axis=1)
        distances_CxS = start + jnp.arange(length)[:, None] - jnp.arange(time)[None]
        allowed_CxS = jnp.abs(distances_CxS) < (mask.window or time)
        if mask.is_causal:
            allowed_CxS &= distances_CxS >= 0
        is_same_text_BxCxS = ids_BxC[:, :, None] == ids_BxT[:, None]
        allowed_BxCxS = allowed_CxS[None] & is_same_text_BxCxS
        scores_BxGxRxCxS = jnp.einsum("bgrck,bgsk->bgrcs", q_BxGxRxCxK, k_BxGxTxK)
        scores_BxGxRxCxS /= math.sqrt(width)
        scores_BxGxRxCxS = jnp.where(allowed_BxCxS[:, None, None], scores_BxGxRxCxS, -jnp.inf)
        weights_BxGxRxCxS = jax.nn.softmax(scores_BxGxRxCxS)
        return jnp.einsum("bgrcs,bgsk->bgrck", weights_BxGxRxCxS, v_BxGxTxK)

    chunks = jax.lax.map(outputs, jnp.arange(0, time, length))
    return jnp.moveaxis(chunks, 0, 3).reshape(q_BxHxTxK.shape)
