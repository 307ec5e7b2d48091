"""The mesh, and where everything lies on it: the only file that knows both.

Modules name the axes of their weights and activations; RULES maps the names onto the mesh axes.
"""

import contextlib
import math

import flax.linen as nn
import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from smallgpt_jax.errors import UserError

# Logical axis → mesh axes. Names that are not here, and dimensions that the axes do not divide, are
# replicated.
RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("path_embed", "tensor"),
    ("path", "path"),
)


def make_mesh(*, data: int, fsdp: int, tensor: int, path: int, devices=None) -> Mesh:
    """The config's `mesh` group as a mesh; −1 stands for the devices that are left.

    Raises UserError if the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    lengths = dict(data=data, fsdp=fsdp, tensor=tensor, path=path)
    asked = ", ".join(f"{axis}={length}" for axis, length in lengths.items())
    left_over = [axis for axis, length in lengths.items() if length == -1]
    if len(left_over) > 1 or any(length == 0 or length < -1 for length in lengths.values()):
        raise UserError(f"config.mesh: {asked}: lengths are at least 1, one of them may be -1")
    fixed = math.prod(length for length in lengths.values() if length != -1)
    if left_over and len(devices) % fixed == 0:
        lengths[left_over[0]] = len(devices) // fixed
    if math.prod(lengths.values()) != len(devices):
        raise UserError(f"config.mesh: {asked}: the lengths must multiply to the number of devices, "
                        f"which is {len(devices)}")
    return jax.make_mesh(tuple(lengths.values()), tuple(lengths),
                         axis_types=(AxisType.Auto,) * len(lengths), devices=devices)


def batch_parts(mesh: Mesh) -> int:
    """The number of parts that the rows of a batch are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def context(mesh: Mesh):
    """Where a jitted function has to be traced for its modules' axis names to mean anything."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.set_mesh(mesh))
    stack.enter_context(nn.logical_axis_rules(RULES))
    return stack


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a (batch, …) array: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(dict(RULES)["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, boxed_params):
    """The sharding of each parameter, from its axis names; `boxed_params` holds shapes or arrays."""
    return jax.tree.map(
        lambda box: NamedSharding(mesh, divisible_spec(mesh, box.names, box.value.shape)),
        boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))


def divisible_spec(mesh: Mesh, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    spec = nn.logical_to_mesh_axes(names, RULES)
    lengths = (math.prod(mesh.shape[axis] for axis in jax.tree.leaves(axes)) for axes in spec)
    return PartitionSpec(*(axes if size % length == 0 else None
                           for axes, size, length in zip(spec, shape, lengths)))


def optimizer_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, abstract_params,
                        shardings):
    """The sharding of the optimiser's state: moments lie with their parameters, counts everywhere."""
    return optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, jax.eval_shape(optimizer.init, abstract_params),
        shardings, transform_non_params=lambda _: replicated(mesh))


def local_rows(sharding: NamedSharding, batch_size: int) -> slice:
    """The rows of a batch that this process's devices hold."""
    rows = [index[0] for index in sharding.addressable_devices_indices_map((batch_size,)).values()]
    return slice(min(r.start or 0 for r in rows),
                 max(batch_size if r.stop is None else r.stop for r in rows))


def global_batch(sharding: NamedSharding, local):
    """The global array of which this process has the rows `local`."""
    return jax.make_array_from_process_local_data(sharding, local)
