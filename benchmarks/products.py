"""Measures products of float32 and bfloat16 matrices on a CPU, in billions of floating-point
operations per second.

    python benchmarks/products.py
    python benchmarks/products.py --rows=4096 --inputs=1024 --outputs=256

The products are those of a dense layer: y = x·w, the gradient of x, dy·wᵀ, and the gradient of w,
xᵀ·dy. They are computed in these forms, one after the other in each round:

- float32: float32 operands and result
- bfloat16: bfloat16 operands and result
- bfloat16 to float32: bfloat16 operands and a float32 result
- ours: `ops.bfloat16`, bfloat16 operands and a float32 result; the time includes transpositions

Prints the median over rounds.
"""

import functools
import json
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from measuring import in_turn, seconds_of, table

from smallgpt_jax.devices.chips import device_name
from smallgpt_jax.ops import bfloat16

_ROWS = flags.DEFINE_integer("rows", 4096, "Rows of x: the tokens per step.", lower_bound=2)
_INPUTS = flags.DEFINE_integer("inputs", 256, "Columns of x.", lower_bound=2)
_OUTPUTS = flags.DEFINE_integer("outputs", 1024, "Columns of w.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Number of rounds.", lower_bound=1)
FORMS = {  # form → (dtype of the operands, dtype of the result)
    "float32": (jnp.float32, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "bfloat16 to float32": (jnp.bfloat16, jnp.float32),
    "ours": (jnp.bfloat16, jnp.float32),
}
CALLS = 3  # per round


def products() -> dict[tuple[str, str], tuple]:
    """Returns {(product, form): (compiled function, its two arguments)}."""
    rng = np.random.default_rng(0)
    rows, inputs, outputs = _ROWS.value, _INPUTS.value, _OUTPUTS.value
    x, w, d_y = (
        rng.standard_normal(shape, np.float32)
        for shape in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )
    operands = {"x·w": (x, w), "dy·wᵀ": (d_y, w), "xᵀ·dy": (x, d_y)}
    contracted = {"x·w": ((1,), (0,)), "dy·wᵀ": ((1,), (1,)), "xᵀ·dy": ((0,), (0,))}
    ours = {
        "x·w": bfloat16.dot,
        "dy·wᵀ": lambda d_y, w: bfloat16.dot(d_y, w.T),
        "xᵀ·dy": bfloat16.transposed_dot,
    }
    found = {}
    for name in operands:
        for form, (dtype, result) in FORMS.items():
            function = (
                ours[name]
                if form == "ours"
                else functools.partial(
                    jax.lax.dot_general,
                    dimension_numbers=(contracted[name], ((), ())),
                    preferred_element_type=result,
                )
            )
            arguments = [jnp.asarray(operand, dtype) for operand in operands[name]]
            found[name, form] = jax.jit(function).lower(*arguments).compile(), arguments
    return found


def measure() -> list[dict]:
    def seconds_per_call(function, arguments) -> float:
        return seconds_of(lambda: [function(*arguments) for _ in range(CALLS)]) / CALLS

    seconds = in_turn(
        {
            key: functools.partial(seconds_per_call, *compiled)
            for key, compiled in products().items()
        },
        _ROUNDS.value,
    )
    operations = 2 * _ROWS.value * _INPUTS.value * _OUTPUTS.value
    return [
        {
            "product": name,
            "form": form,
            "gflops": operations / statistics.median(times) / 1e9,
            "best_gflops": operations / min(times) / 1e9,
        }
        for (name, form), times in seconds.items()
    ]


def main(_) -> None:
    rows = measure()
    print(
        table(
            ["product", "form", "GFLOP/s", "best round"],
            (
                (row["product"], row["form"], f"{row['gflops']:,.0f}", f"{row['best_gflops']:,.0f}")
                for row in rows
            ),
        )
    )
    print(
        json.dumps(
            {
                "rows": rows,
                "shape": [_ROWS.value, _INPUTS.value, _OUTPUTS.value],
                "device": device_name(jax.devices()[0]),
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    app.run(main)
