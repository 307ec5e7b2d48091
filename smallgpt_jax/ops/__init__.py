"""Platform-dependent code, kernels and compiler workarounds of the models; their other code is plain JAX."""
