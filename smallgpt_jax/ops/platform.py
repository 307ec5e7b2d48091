"""The platform for which the function being traced will be compiled."""

import jax


def platform() -> str:
    """Returns the platform of the current mesh, or JAX's default platform without a mesh: "cpu", "gpu" or "tpu".

    The mesh may consist of devices that are not attached to this machine, for ahead-of-time compilation.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
