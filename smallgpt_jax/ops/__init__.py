"""Numerical kernels: everything that is written one way for one compiler and another way for another.

Every branch on the platform, and every rewriting for a compiler's sake, stands in this folder, with what it was
measured to gain, where, and with which versions. The rest of the package is plain JAX.
"""
