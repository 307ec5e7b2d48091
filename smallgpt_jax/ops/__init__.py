"""Platform-dependent code, kernels and compiler workarounds. All other code of the models is plain
JAX.
"""
