"""Numerical kernels: all code that depends on the platform or is written for a compiler.

Each platform branch and compiler workaround is here, with the measured gain, hardware and versions. The rest of the
package is plain JAX.
"""
