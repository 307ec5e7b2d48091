"""Kernels, and code for a platform or its compiler. All other code of models is plain JAX."""
