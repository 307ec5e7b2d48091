"""Platform-dependent code, kernels and compiler workarounds. All other code of the models is plain JAX.

Some operations are rewritten to be faster on CPUs. The table shows how many times as fast each rewrite is as the plain
form. The first number is for the quickstart's shapes. The second number, if any, is for a model of width 256. Measured
with `python benchmarks/ops.py --rounds=11` in float32 on two cores of an AMD EPYC, 2026-11-22:

    rewrite                                              jax 0.10.2    jax 0.12.0.1
    matmul: tall weight transposed                       1.20, 1.17     1.17,  1.20
    activations: gelu saves its derivative               1.41, 1.53    12.65, 13.27
    cross_entropy: gradient computed with the loss       1.51, 2.45     0.91,  2.42
    cross_entropy: gradient of the head transposed       1.19, 1.09     1.17,  1.15
    attention: weights normalized after the product      1.02, 1.18     0.90,  0.93
    attention: queries in chunks, context 1,024          1.87           1.75
    update_cache: one slice per row, 8 rows              0.95           1.04
    update_cache: one slice, 1 row                       1.13           1.10
    cached_attention: a single query without its axis    0.86           1.08
    inference.sampling: argmax in two passes             3.23           2.20

With JAX 0.12, normalizing the weights after the product is slower than the plain form. This rewrite stays while
`constraints.txt` pins JAX 0.10.2.

On CPUs with bfloat16 instructions, products of bfloat16 matrices are rewritten, too (`bfloat16.py`).
"""
