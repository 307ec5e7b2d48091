"""The platform for which the function being traced will be compiled."""

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the current mesh or, if no mesh is set, JAX's default platform.

    In ahead-of-time compilation, the devices of the mesh may be absent from this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
