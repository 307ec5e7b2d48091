"""Checks a model's attention kernels on the accelerator of a run, before the run starts."""

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.analysis.memory import attention_layers
from smallgpt_jax.errors import UserError
from smallgpt_jax.ops.attention import AttentionMask, attention
from smallgpt_jax.program import Program

TOLERANCE = 0.02  # the error of a correct kernel in bfloat16 is below 0.005


def check_attention_kernels(program: Program) -> None:
    """Raises UserError if an attention kernel of the model gives wrong results on this process's first accelerator.

    A kernel may fail on a chip, driver or compiler for which it was never tested, and wrong gradients would go
    unnoticed. Plain XLA attention is not checked. Runs on CPUs are not checked either.
    """
    if program.mesh.devices.flat[0].platform == "cpu":
        return
    c, separate_documents = program.model.config, program.config.data.separate_documents
    kernels = {(layers.backend, layers.head_width, layers.window)
               for layers in attention_layers(program.model, program.mesh, separate_documents)}
    for backend, head_width, window in sorted(kernels):
        if backend == "xla":
            continue
        heads_per_group = c.num_heads // (c.num_kv_heads or c.num_heads)
        error = relative_error(backend, heads_per_group, c.context_length, head_width, c.dtype, window,
                               separate_documents)
        if not error < TOLERANCE:  # also true for NaN
            raise UserError(
                f"config.model.attention={c.attention}: on this {jax.devices()[0].device_kind}, the {backend} kernel "
                f"for heads of width {head_width} has a relative error of {error:.2g}; set "
                "--config.model.attention=xla")


def relative_error(backend: str, heads: int, time: int, head_width: int, dtype: str, window: int,
                   separate_documents: bool) -> float:
    """Returns the largest relative error of the outputs and gradients of attention with one key–value head.

    The relative error of x is ‖x − r‖ / ‖r‖, where r is the result of the reference backend in float32.
    """
    rng = np.random.default_rng(0)
    shapes = [(1, heads, time, head_width), *[(1, 1, time, head_width)] * 2, (1, heads, time, head_width)]
    *qkv, weights = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    segment_ids = jnp.asarray(np.arange(time)[None] >= time // 3, jnp.int32) if separate_documents else None
    mask = AttentionMask(window, segment_ids)

    def output_and_gradients(backend: str, dtype: str) -> list[np.ndarray]:
        def weighted_sum(*qkv):
            y = attention(*qkv, mask, backend=backend)
            return jnp.sum(y.astype(jnp.float32) * weights), y

        gradients, y = jax.jit(jax.grad(weighted_sum, (0, 1, 2), has_aux=True))(*(x.astype(dtype) for x in qkv))
        return [np.float64(x) for x in (y, *gradients)]

    with jax.default_matmul_precision("highest"):
        expected = output_and_gradients("reference", "float32")
    return max(np.linalg.norm(a - b) / np.linalg.norm(b)
               for a, b in zip(output_and_gradients(backend, dtype), expected))
