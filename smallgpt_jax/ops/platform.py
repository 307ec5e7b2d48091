"""The platform for which the function being traced will be compiled."""

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the current mesh, or JAX's default platform without a mesh.

    The devices of the mesh need not be attached.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
