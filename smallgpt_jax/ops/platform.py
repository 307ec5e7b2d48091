"""The platform that the function being traced is compiled for."""

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": that of the mesh in context, which may be of devices that are not here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
