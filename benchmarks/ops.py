"""Compares the speed of this project's optimized operations with plain JAX implementations, on a
CPU.

    python benchmarks/ops.py

Prints one row per operation: the milliseconds of the plain implementation, those of ours, and their
ratio plain / ours. If the ratio is above 1, ours is faster. The two are timed alternately, and the
ratio is a median over rounds. Run the benchmark with each new version of JAX, and remove
optimizations that are not faster.

Training operations have the shapes of the quickstart (8 × 128 positions, width 128) and of a model
of width 256 (16 × 128 positions).
"""

import functools
import json
import platform as system
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import linen as nn
from measuring import in_turn, median_and_ratio, seconds_of

from smallgpt_jax.devices.chips import device_name
from smallgpt_jax.inference import sampling
from smallgpt_jax.ops import activations, cross_entropy, grouped_matmul, key_value_cache, matmul
from smallgpt_jax.ops.attention import attention
from smallgpt_jax.ops.attention_mask import AttentionMask

_ROUNDS = flags.DEFINE_integer(
    "rounds", 15, "Number of rounds. Each round measures both implementations.", lower_bound=1
)
_ONLY = flags.DEFINE_list(
    "only", None, "Measure only the operations whose names start with one of these words."
)


def training(function):
    """Returns a function that computes the gradients of a weighted sum of `function`'s output for
    all arguments.
    """

    def weighted_sum(*arguments):
        y = function(*arguments)
        return jnp.sum(y * jnp.linspace(0.5, 1.5, y.size).reshape(y.shape))

    return lambda *arguments: jax.grad(weighted_sum, argnums=tuple(range(len(arguments))))(
        *arguments
    )


def on_gpu(function):
    """Returns a version of `function` in which `cross_entropy` takes its code path for GPUs."""

    def traced(*arguments):
        with mock.patch.object(cross_entropy, "platform", lambda: "gpu"):
            return function(*arguments)

    return traced


def plain_cross_entropy(x_BxTxW, head_VxW, targets_BxT):
    logits_BxTxV = jnp.einsum("btw,vw->btv", x_BxTxW, head_VxW)
    return -jnp.sum(
        jnp.take_along_axis(jax.nn.log_softmax(logits_BxTxV), targets_BxT[..., None], axis=-1)
    )


def plain_attention(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK):
    time_ = q_BxHxTxK.shape[2]
    scores = jnp.einsum("bhtk,bhsk->bhts", q_BxHxTxK, k_BxHxTxK) / np.sqrt(q_BxHxTxK.shape[3])
    scores = jnp.where(np.tri(time_, dtype=bool), scores, -1e30)
    return jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores), v_BxHxTxK)


def experts(backend: str):
    """Returns a function that applies a mixture of experts. `choices_BxTxK` has three experts per
    token.
    """

    def apply(x_BxTxD, choices_BxTxK, up_ExDxF, down_ExFxD):
        gates = jnp.full(choices_BxTxK.shape, 1 / 3)
        weights = grouped_matmul.ExpertWeights([up_ExDxF], down_ExFxD)
        return grouped_matmul.grouped_experts(
            x_BxTxD, choices_BxTxK, gates, weights, activations.gelu, backend
        )

    return apply


product = functools.partial(matmul.matmul, decode=False)


def dense_mlp(x_BxTxD, choices_BxTxK, up_ExDxF, down_ExFxD):
    """Returns the output of a dense MLP with the weights, and so the FLOPs, of three experts."""
    up_DxF = jnp.swapaxes(up_ExDxF[:3], 0, 1).reshape(up_ExDxF.shape[1], -1)
    return product(
        activations.gelu(product(x_BxTxD, up_DxF)), down_ExFxD[:3].reshape(-1, len(up_DxF))
    )


def rows() -> dict[str, tuple]:
    """Returns the operations to time, {name: (plain implementation, our implementation,
    arguments)}.
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    found = {}
    for label, batch, width in (("quickstart", 8, 128), ("width 256", 16, 256)):
        vocabulary = 1024 if width == 128 else 8192
        x, tall = normal(batch, 128, 4 * width), normal(4 * width, width)
        found[f"matmul: tall weight transposed, {label}"] = (
            training(jnp.dot),
            training(product),
            (x, tall),
        )
        found[f"gelu: derivative kept, {label}"] = (
            training(functools.partial(nn.gelu, approximate=False)),
            training(activations.gelu),
            (x,),
        )
        hidden, head = normal(batch, 128, width), 0.02 * normal(vocabulary, width)
        targets = jnp.asarray(rng.integers(0, vocabulary, (batch, 128)))

        def ours(x, head, targets=targets):
            return cross_entropy.cross_entropy(x, head, targets, jnp.ones(targets.shape), chunks=4)

        found[f"cross-entropy: gradient with the loss, in 4 chunks, {label}"] = (
            training(lambda x, head, targets=targets: plain_cross_entropy(x, head, targets)),
            training(ours),
            (hidden, head),
        )
        found[f"cross-entropy: head's gradient transposed, {label}"] = (
            on_gpu(training(ours)),
            training(ours),
            (hidden, head),
        )
        heads = width // 32
        qkv = tuple(normal(batch, heads, 128, 32) for _ in range(3))
        causal = AttentionMask(0)
        found[f"attention: divided after the product, {label}"] = (
            training(plain_attention),
            training(lambda q, k, v, mask=causal: attention(q, k, v, mask, backend="xla")),
            qkv,
        )
        choices = jnp.asarray(np.argsort(rng.random((batch, 128, 16)))[..., :3])
        weights = normal(batch, 128, width), *(0.1 * normal(16, width, width) for _ in range(2))
        for name, other in (
            ("ragged_dot", experts("ragged")),
            ("a dense MLP of equal FLOPs", dense_mlp),
        ):
            found[f"experts: blocks, compared with {name}, {label}"] = (
                *(
                    training(
                        lambda x, up, down, form=form, choices=choices: form(x, choices, up, down)
                    )
                    for form in (other, experts("blocks"))
                ),
                weights,
            )
    qkv = tuple(normal(2, 4, 1024, 64) for _ in range(3))
    found["attention: chunks of queries, context 1,024"] = (
        training(lambda q, k, v: attention(q, k, v, causal, backend="reference")),
        training(lambda q, k, v: attention(q, k, v, causal, backend="xla")),
        qkv,
    )

    cache, new, start = normal(8, 256, 64), normal(8, 1, 64), jnp.full(8, 100)
    found["update_cache: slice per row, 8 rows of one token"] = (
        lambda cache, x, start: cache.at[jnp.arange(8), start].set(x[:, 0]),
        key_value_cache.update_cache,
        (cache, new, start),
    )
    found["update_cache: one slice, 1 row of one token"] = (
        jax.vmap(lambda row, x, start: jax.lax.dynamic_update_slice(row, x, (start, 0))),
        key_value_cache.update_cache,
        (cache[:1], new[:1], start[:1]),
    )
    found["greedy: argmax in two passes, 50,304 logits"] = (
        lambda logits: jnp.argmax(logits, axis=-1),
        sampling.greedy,
        (normal(8, 50_304),),
    )
    return found


def milliseconds(compiled, arguments) -> float:
    return 1e3 * min(seconds_of(lambda: compiled(*arguments)) for _ in range(5))


def measure() -> list[dict]:
    measured = []
    for name, (plain, ours, arguments) in rows().items():
        if _ONLY.value and not any(name.startswith(word) for word in _ONLY.value):
            continue
        times = in_turn(
            {
                form: functools.partial(
                    milliseconds, jax.jit(form).lower(*arguments).compile(), arguments
                )
                for form in (plain, ours)
            },
            _ROUNDS.value,
        )
        plain_ms, ours_ms, ratio = median_and_ratio(list(zip(*times.values())))
        row = {"name": name, "plain_ms": plain_ms, "ours_ms": ours_ms, "ratio": ratio}
        print(
            f"{row['name']:<64} {row['plain_ms']:9.3f} {row['ours_ms']:9.3f}   {row['ratio']:.2f}×",
            flush=True,
        )
        measured.append(row)
    return measured


def main(_) -> None:
    print(f"{'plain and ours, ms; plain / ours':<64}")
    print(
        json.dumps(
            {
                "rows": measure(),
                "device": device_name(jax.devices()[0]),
                "jax": jax.__version__,
                "python": system.python_version(),
            }
        )
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    app.run(main)
