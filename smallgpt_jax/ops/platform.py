"""The platform for which the current function is traced."""

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": that of the mesh in context, whose devices need not be attached."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()
