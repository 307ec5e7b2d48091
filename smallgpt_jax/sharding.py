"""The mesh, and where everything lies on it: the only file that knows both.

Modules name the axes of their weights and activations; RULES maps the names onto the mesh axes.
"""

import contextlib
import math

import flax.linen as nn
import jax
import numpy as np
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


def batch_parts(mesh: Mesh | None = None) -> int:
    """The number of parts that the rows of a batch are split into (of the mesh of `context`)."""
    shape = (mesh or jax.sharding.get_abstract_mesh()).shape
    return shape.get("data", 1) * shape.get("fsdp", 1)


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


def divisible_spec(mesh, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Where an array with these axes lies: a dimension that the mesh does not divide is replicated."""
    spec = nn.logical_to_mesh_axes(names, RULES)
    lengths = (math.prod(mesh.shape[axis] for axis in jax.tree.leaves(axes)) for axes in spec)
    return PartitionSpec(*(axes if size % length == 0 else None
                           for axes, size, length in zip(spec, shape, lengths)))


def undivided(mesh: Mesh, boxed_params) -> list[str]:
    """A line for each axis of the weights that its mesh axis does not divide, and so leaves whole."""
    lines = {}
    for box in jax.tree.leaves(boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)):
        wanted = nn.logical_to_mesh_axes(box.names, RULES)
        given = divisible_spec(mesh, box.names, box.value.shape)
        for name, size, axis, kept in zip(box.names, box.value.shape, wanted, given):
            if axis != kept:
                lines[f"{name} = {size} is whole on each device: config.mesh.{axis}={mesh.shape[axis]} "
                      "does not divide it"] = None
    return list(lines)


def optimizer_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, abstract_params,
                        shardings):
    """The sharding of the optimiser's state: moments lie with their parameters, counts everywhere."""
    return optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, jax.eval_shape(optimizer.init, abstract_params),
        shardings, transform_non_params=lambda _: replicated(mesh))


def shared_mesh():
    """The mesh over whose devices the compiler spreads the function being traced; None if there is but one
    device, or each computes its own part already."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.size <= 1 or AxisType.Manual in mesh.axis_types else mesh  # 0 outside of any


def gather_fsdp(weight, names: tuple[str, ...]):
    """A weight as products read it: its `fsdp` parts put together, other parts still apart.

    Said outright, since the compiler's own choice is to pass parts around while it multiplies, in
    products too small to be quick.
    """
    mesh = shared_mesh()
    if not mesh:
        return weight
    parts = divisible_spec(mesh, names, weight.shape)
    return jax.lax.with_sharding_constraint(
        weight, PartitionSpec(*(None if axis == "fsdp" else axis for axis in parts)))


def per_device(function, names: tuple[tuple[str, ...], ...]):
    """`function` of arrays with these axis names, computed by each device on its own part of them.

    For what the compiler cannot split by itself (kernels). The result lies as the first argument.
    """
    mesh = shared_mesh()
    if not mesh:
        return function

    def mapped(*arguments):
        specs = tuple(divisible_spec(mesh, axes, x.shape) for axes, x in zip(names, arguments))
        return jax.shard_map(
            function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arguments)

    return mapped


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Which rows of a batch this process's devices hold, in order; not always neighbours."""
    parts = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[rows] for rows, in parts]))


def global_batch(mesh: Mesh, rows: np.ndarray, batch_size: int, local) -> jax.Array:
    """The global array whose `rows` are those of `local`, all that this process has to hold."""
    def part(index):
        return local[np.searchsorted(rows, np.arange(batch_size)[index[0]])]

    return jax.make_array_from_callback((batch_size, *local.shape[1:]), batch_sharding(mesh), part)
