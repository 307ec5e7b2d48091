"""The device mesh and the shardings of arrays on it."""

import contextlib
import dataclasses
import functools
import itertools
import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from smallgpt_jax.config.group import ConfigGroup, free
from smallgpt_jax.devices.platform import platform
from smallgpt_jax.errors import UserError

# Logical axis → mesh axes. Logical axes without a rule, and dimensions that the mesh does not
# divide evenly, are replicated.
_RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("path_embed", "tensor"),
    ("path", "path"),
)
# Whole rows of a weight are gathered in place; parts of rows are copied after they are gathered.
# With gpt on v5e:2x4, sharding rows takes 8% fewer cycles, and gradients are summed by
# reduce-scatters instead of all-reduces.
_BEFORE_EMBED = {"heads", "mlp", "vocab"}
# The rules inside `sum_over_data_shards`, where a function gets the rows of only one shard of the
# mesh axis `data`.
_RULES_IN_DATA_SHARD = tuple((name, "fsdp" if name == "batch" else axes) for name, axes in _RULES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(ConfigGroup):
    GROUP: ClassVar[str] = "mesh"

    # data parallelism: number of parts of the batch, each with whole weights; -1: number of devices
    # / (fsdp · tensor · path). Where fsdp is 1, each device stores and updates a part of the
    # weights, and gathers the others in each step
    data: int = free(-1)
    # FSDP: number of shards of weights, optimizer state and batch. With model.remat "dots" or
    # "full", no device holds the weights of all blocks at the same time
    fsdp: int = free(1)
    # tensor parallelism: number of shards of heads, MLP width and vocabulary
    tensor: int = free(1)
    # path parallelism: number of shards of pgpt's paths
    path: int = free(1)


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    devices = jax.devices() if devices is None else devices
    lengths = dataclasses.asdict(config)
    requested = ", ".join(f"{axis}={length}" for axis, length in lengths.items())
    left_over = [axis for axis, length in lengths.items() if length == -1]
    is_invalid = any(length == 0 or length < -1 for length in lengths.values())
    if is_invalid or len(left_over) > 1:
        raise UserError(
            f"config.mesh: {requested}: lengths must be at least 1; one of them may be -1"
        )
    fixed = math.prod(length for length in lengths.values() if length != -1)
    if left_over and len(devices) % fixed == 0:
        lengths[left_over[0]] = len(devices) // fixed
    if math.prod(lengths.values()) != len(devices):
        rule = f"the lengths must multiply to the number of devices, which is {len(devices)}"
        raise UserError(f"config.mesh: {requested}: {rule}")
    try:
        return jax.make_mesh(
            tuple(lengths.values()),
            tuple(lengths),
            axis_types=(AxisType.Auto,) * len(lengths),
            devices=devices,
        )
    except NotImplementedError:
        # only on v5e, JAX splits a side of a slice of TPUs between two axes
        places = zip(*[device.coords for device in devices])
        sides = "×".join(str(len(set(places_on_side))) for places_on_side in places)
        raise UserError(
            f"config.mesh: {requested}: does not fit the {sides} chips of the slice; each length "
            "must be 1 or a product of sides of the slice, and no side may be used twice"
        ) from None


def num_batch_shards(mesh: Mesh | None = None) -> int:
    mesh = mesh or jax.sharding.get_abstract_mesh()
    axes = {"data", "fsdp"} & _auto_axes(mesh)
    return math.prod(mesh.shape[axis] for axis in axes)


def use_mesh(mesh: Mesh):
    """Returns a context that maps logical axis names to `mesh`; trace jitted functions inside."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.set_mesh(mesh))
    stack.enter_context(nn.logical_axis_rules(_RULES))
    return stack


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(dict(_RULES)["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, params):
    """Returns the shardings of weights in computations, for leaves with `shape` and `axes`."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, _divisible_spec(mesh, p.axes, p.shape)), params
    )


def stored_shardings(mesh: Mesh, params):
    """Returns the shardings of weights in the train state."""
    return jax.tree.map(lambda p: NamedSharding(mesh, _stored_spec(mesh, p.axes, p.shape)), params)


def _stored_spec(mesh, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    return _divisible_spec(mesh, names, shape, _storage_axis(mesh))


def _storage_axis(mesh) -> str:
    """Returns the mesh axis along which devices divide the train state."""
    # Without `fsdp`, all devices of `data` would store and update the same weights (ZeRO:
    # Rajbhandari et al., arXiv 1910.02054).
    has_data_shards = mesh.shape["data"] > 1 and "data" in _auto_axes(mesh)
    return "data" if mesh.shape["fsdp"] == 1 and has_data_shards else "fsdp"


def gather_stored(weights, params, dtype: str):
    """Gathers weights that are stored divided along `data`, once for all microbatches."""
    mesh = _current_mesh()
    if not mesh or _storage_axis(mesh) != "data":
        return weights

    # weights that the model only reads in its compute dtype are sent in it
    def gather(p, x):
        x = x.astype(dtype) if p.is_cast else x
        return jax.lax.with_sharding_constraint(x, _divisible_spec(mesh, p.axes, p.shape))

    return jax.tree.map(gather, params, weights)


def scatter_gradients(gradients, params):
    """Shards gradients, sums over all rows, like weights that are divided along `data`."""
    mesh = _current_mesh()
    if not mesh or _storage_axis(mesh) != "data":
        return gradients

    def scatter(p, x):
        return jax.lax.with_sharding_constraint(x, _stored_spec(mesh, p.axes, p.shape))

    return jax.tree.map(scatter, params, gradients)


def _divisible_spec(
    mesh, names: tuple[str, ...], shape: tuple[int, ...], embed_axis: str = "fsdp"
) -> PartitionSpec:
    """An axis is replicated if its length is not divisible by the number of shards."""
    divided = []
    for axes, size in zip(_ruled_axes(mesh, names, shape, embed_axis), shape):
        # axes: None, "tensor" or ("data", "fsdp")
        num_shards = math.prod(mesh.shape[axis] for axis in jax.tree.leaves(axes))
        divided.append(axes if size % num_shards == 0 else None)
    return PartitionSpec(*divided)


def _ruled_axes(
    mesh, names: tuple[str, ...], shape: tuple[int, ...], embed_axis: str = "fsdp"
) -> list[str | tuple[str, ...] | None]:
    """Returns the mesh axes by _RULES, with `embed_axis` for "embed", or an axis before it."""
    rules = _RULES if "data" in _auto_axes(mesh) else _RULES_IN_DATA_SHARD
    ruled = nn.logical_to_mesh_axes(names, rules)
    mesh_axes = [embed_axis if axes == "fsdp" else axes for axes in ruled]
    if "embed" not in names or mesh.shape["tensor"] > 1:  # tensor parallelism divides the others
        return mesh_axes
    embed = names.index("embed")
    if mesh_axes[embed] != embed_axis:  # an earlier axis has it
        return mesh_axes
    # divide an axis before "embed" in its place, so that rows stay whole
    looks_up_columns = embed_axis == "fsdp" and platform(mesh) != "tpu"  # so "vocab" stays whole
    before_embed = _BEFORE_EMBED - {"vocab"} if looks_up_columns else _BEFORE_EMBED
    for i in range(embed):
        if names[i] in before_embed and shape[i] % mesh.shape[embed_axis] == 0:
            mesh_axes[embed], mesh_axes[i] = None, embed_axis
            break
    return mesh_axes


def replicated_dimensions(mesh: Mesh, params) -> list[str]:
    """Returns a message per weight axis that is replicated because it cannot be divided."""
    lines = []
    for p in jax.tree.leaves(params):
        ruled = _ruled_axes(mesh, p.axes, p.shape)
        actual = _divisible_spec(mesh, p.axes, p.shape)
        for name, size, axis, actual_axis in zip(p.axes, p.shape, ruled, actual):
            if axis != actual_axis:
                lines.append(
                    f"{name} = {size} is replicated: config.mesh.{axis}={mesh.shape[axis]} does "
                    "not divide it"
                )
    return list(dict.fromkeys(lines))  # without repetitions


def optimizer_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, params):
    """Shards an array like the parameter whose path it has; others are replicated."""
    by_path = {p.path: p for p in jax.tree.leaves(params)}

    def place(path, array):
        # such as 0, mu, trunk, blocks, kernel: the parameter's path is trunk, blocks, kernel
        keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for start, end in itertools.combinations(range(len(keys) + 1), 2):
            param = by_path.get(keys[start:end])
            if param:
                return _param_state_sharding(mesh, param, array.shape)
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def _param_state_sharding(mesh: Mesh, param, shape: tuple[int, ...]) -> NamedSharding:
    """Shards an optimizer's array like its parameter in the dimensions that are equally long."""
    if shape == param.shape:
        return NamedSharding(mesh, _stored_spec(mesh, param.axes, shape))
    names = [None] * len(shape)  # an optimizer's array may have more or fewer axes
    for i, (size, param_size, name) in enumerate(zip(shape, param.shape, param.axes)):
        if size == param_size:
            names[i] = name
    # An optimizer's matrices can be larger than the weights, so none may be replicated: without
    # "embed", which is divided along the storage axis, the first divisible dimension takes its place.
    if "embed" not in names:
        num_shards = mesh.shape[_storage_axis(mesh)]
        for i, size in enumerate(shape):
            if names[i] is None and size % num_shards == 0:
                names[i] = "embed"
                break
    return NamedSharding(mesh, _stored_spec(mesh, tuple(names), shape))


def _auto_axes(mesh) -> set[str]:
    """Returns the axes over which the compiler shards: inside shard_map, the unmapped ones."""
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}


def _current_mesh():
    """Returns None without partitions: on one device, or in a shard_map over all axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.size > 1 and _auto_axes(mesh) else None  # size 0: no mesh


def gather_weight(weight, names: tuple[str, ...]):
    """Returns the weight, whole along `fsdp`."""
    # Without this, the compiler splits products into parts too small to be fast, and exchanges
    # shards between them. A weight that `gather_stored` returned stays as it is.
    mesh = _current_mesh()
    if not mesh:
        return weight
    spec = _divisible_spec(mesh, names, weight.shape)
    whole = PartitionSpec(*[None if axis == "fsdp" else axis for axis in spec])
    if _is_partitioned_for_tpus():
        return jax.lax.with_sharding_constraint(weight, whole)
    return _gather_and_scatter_gradient(weight, _stored_spec(mesh, names, weight.shape), whole)


def _is_partitioned_for_tpus() -> bool:
    # For GPUs, `fsdp` sums gradients with reduce-scatters, and `look_up` exchanges rows. For TPUs,
    # the compiler splits the products of such gradients into rings of collective-permutes: 10% more
    # cycles (gpt of 2 blocks, v5e:2x4).
    return platform() == "tpu"


# Shards the gradient at once: otherwise, an all-reduce would send twice as much.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_and_scatter_gradient(x, of_gradient: PartitionSpec, whole: PartitionSpec):
    return jax.lax.with_sharding_constraint(x, whole)


_gather_and_scatter_gradient.defvjp(
    lambda x, of_gradient, whole: (_gather_and_scatter_gradient(x, of_gradient, whole), None),
    lambda of_gradient, whole, _, d_x: (jax.lax.with_sharding_constraint(d_x, of_gradient),),
)


def look_up(table_VxD, names: tuple[str, str], indices_BxT, dtype: str):
    """Returns rows of a table, (B, T, D). `names` are the logical axes of the table."""
    # Along `fsdp`, each device looks up its columns for the indices of all. Then the devices exchange
    # the rows and their gradients, which are smaller than the whole table and its gradient.
    mesh = _current_mesh()
    if mesh and mesh.shape["fsdp"] > 1 and not _is_partitioned_for_tpus():
        columns = _divisible_spec(mesh, (None, names[1]), table_VxD.shape)
        rows = _divisible_spec(mesh, ("batch", None), indices_BxT.shape)
        if columns[1] is not None and rows[0] is not None:
            axes = {"data", "fsdp"} & _auto_axes(mesh)
            return jax.shard_map(
                functools.partial(_look_up_columns, dtype=dtype),
                in_specs=(columns, rows),
                out_specs=rows,
                axis_names=axes,
                check_vma=False,
            )(table_VxD, indices_BxT)
    return jnp.take(gather_weight(table_VxD, names), indices_BxT, axis=0).astype(dtype)


def _look_up_columns(table_VxC, indices_bxT, dtype: str):
    """Returns the rows of this device's b texts, from its C columns and those of the others."""
    indices_BxT = jax.lax.all_gather(indices_bxT, "fsdp", tiled=True)
    columns_BxTxC = jnp.take(table_VxC, indices_BxT, axis=0).astype(dtype)
    return jax.lax.all_to_all(columns_BxTxC, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def per_device(function, axes: tuple[tuple[str | None, ...], ...], summed: str | None = None):
    """Returns `function` under shard_map, for kernels, which the compiler cannot partition.

    `axes` names the logical axes of each argument. The result is sharded like the first argument,
    and summed over the devices that divide the logical axis `summed`.
    """
    mesh = _current_mesh()
    if not mesh:
        return function

    def mapped(*arguments):
        specs = tuple(_divisible_spec(mesh, names, x.shape) for names, x in zip(axes, arguments))
        summed_axes = set()  # of the mesh
        for names, spec in zip(axes, specs):
            divided = {name: mesh_axis for name, mesh_axis in zip(names, spec) if mesh_axis}
            if summed in divided:
                summed_axes.add(divided[summed])

        def on_one_device(*shards):
            y = function(*shards)
            return jax.lax.psum(y, tuple(summed_axes)) if summed_axes else y

        return jax.shard_map(
            on_one_device,
            in_specs=specs,
            out_specs=specs[0],
            axis_names=_auto_axes(mesh),
            check_vma=False,
        )(*arguments)

    return mapped


def has_data_shards() -> bool:
    mesh = _current_mesh()
    return mesh is not None and mesh.shape["data"] > 1


def sum_over_data_shards(function, params, dtype):
    """Returns `function`(weights, model state, batch) → ((loss, gradients, further sums over rows),
    model state) under shard_map over `data`. The model state must not depend on the rows.
    """
    # The sums are added once, matrices of floats as `dtype`, and gradients are scattered like the
    # stored weights. The compiler would add gradients in every iteration of a loop.
    mesh, everywhere = _current_mesh(), PartitionSpec()

    def gradient_spec(p) -> PartitionSpec:
        # Only `data` is manual; the compiler places the other axes.
        stored = _stored_spec(mesh, p.axes, p.shape)
        return PartitionSpec(*[axes if axes == "data" else None for axes in stored])

    gradient_specs = jax.tree.map(gradient_spec, params)

    def total(x, spec=everywhere):
        is_matrix = x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
        sent = x.astype(dtype) if is_matrix else x
        if "data" not in spec:
            return jax.lax.psum(sent, "data").astype(x.dtype)
        axis = spec.index("data")
        scattered = jax.lax.psum_scatter(sent, "data", scatter_dimension=axis, tiled=True)
        return scattered.astype(x.dtype)

    def mapped(*arguments):
        with nn.logical_axis_rules(_RULES_IN_DATA_SHARD):
            (loss, gradients, sums), model_state = function(*arguments)
            loss = total(loss)
            gradients = jax.tree.map(total, gradients, gradient_specs)
            return (loss, gradients, jax.tree.map(total, sums)), model_state

    return jax.shard_map(
        mapped,
        in_specs=(everywhere, everywhere, PartitionSpec("data")),
        out_specs=((everywhere, gradient_specs, everywhere), everywhere),
        axis_names={"data"},
        check_vma=False,
    )


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Returns the sorted indices of the batch rows on this process's devices, maybe with gaps."""
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[rows] for (rows,) in slices]))


def global_batch(mesh: Mesh, rows: np.ndarray, batch_size: int, local) -> jax.Array:
    """Returns the global (batch, …) array of all processes; `local` has the rows `rows`."""

    def shard(index):
        rows_of_shard = np.arange(batch_size)[index[0]]
        return local[np.searchsorted(rows, rows_of_shard)]

    return jax.make_array_from_callback((batch_size, *local.shape[1:]), batch_sharding(mesh), shard)
