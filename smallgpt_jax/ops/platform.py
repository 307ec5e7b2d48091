"""The platform for which the function being traced will be compiled."""

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the current mesh or, if no mesh is set, JAX's default platform.

    In ahead-of-time compilation, the mesh may consist of devices that this machine does not have. The platform of the
    mesh can then differ from JAX's default platform.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
