"""Platform-dependent code, kernels and compiler workarounds. The rest of the models is plain JAX."""
