"""The platform for which the function being traced will be compiled."""

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the current mesh or, if no mesh is set, JAX's default platform.

    In ahead-of-time compilation, the mesh may consist of devices that this machine does not have. The platform of the
    mesh can then differ from JAX's default platform.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def exchange_dtype(dtype: str) -> str:
    """Returns the dtype in which the shards of the mesh axis `data` exchange gradients.

    This is `dtype`, the compute dtype, but on CPUs it is float32: under a shard_map over some of the mesh axes, XLA's
    CPU compiler aborts on sums of bfloat16 arrays (jaxlib 0.10.2: "Invalid binary instruction opcode copy").
    """
    return "float32" if platform() == "cpu" else dtype
