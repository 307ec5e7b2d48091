"""The fewest microbatches with which the training step fits into the memory of a device, for
config.train.microbatches=0. The compiler tells how much memory a step needs.
"""

import bisect
import math
from collections.abc import Callable, Sequence

import jax

from smallgpt_jax.devices import distributed, host_memory, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import format_bytes
from smallgpt_jax.run.config import Config
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.memory_errors import is_out_of_memory
from smallgpt_jax.training.program import preparation_shown

# On CPUs, the process keeps its memory, and then needs about twice as much (devices/host_memory.py).
_OF_HOST = 0.5


def with_microbatches(config: Config, log: Callable[[str], None] = print) -> Config:
    """Returns a config whose number of microbatches is known. Compiles a few programs at most; the
    chosen one is shared, unless there is a teacher. Raises UserError if none fits.
    """
    if config.train.microbatches:
        return config
    mesh = sharding.make_mesh(config.mesh)
    # Of one process: all must find the same number, and compile the same programs on the way.
    limit = distributed.from_primary(memory_limit(jax.local_devices()[0]))
    limit = math.inf if limit is None else limit

    def needed(microbatches: int) -> float:
        return _step_bytes(config.replace(train={"microbatches": microbatches}))

    numbers = possible_numbers(config, mesh)
    with preparation_shown():
        sizes = fewest_that_fit(numbers, needed, limit)
    number = fitting_number(sizes, limit)
    if number > 1:
        log(microbatches_message(sizes, limit))
    return config.replace(train={"microbatches": number})


def possible_numbers(config: Config, mesh: jax.sharding.Mesh) -> list[int]:
    rows = max(1, config.train.batch_size // sharding.num_batch_shards(mesh))  # of a device
    return [number for number in range(1, rows + 1) if rows % number == 0]


def fewest_that_fit(
    numbers: Sequence[int], needed: Callable[[int], float], limit: float
) -> dict[int, float]:
    """Returns {number: bytes} of the numbers that were tried: the first that fits, and the one
    before, which does not.
    """
    sizes = {}

    def fits(number: int) -> bool:
        sizes[number] = needed(number)
        return sizes[number] <= limit

    if not fits(numbers[0]):
        bisect.bisect_left(numbers, True, lo=1, key=fits)
    return sizes


def fitting_number(sizes: dict[int, float], limit: float) -> int:
    """Returns the fewest microbatches that fit. Raises UserError if none do."""
    fitting = [number for number, size in sizes.items() if size <= limit]
    if fitting:
        return min(fitting)
    raise UserError(
        f"config.train.microbatches=0: with {max(sizes)} microbatches, the most, a device needs "
        f"{_shown(min(sizes.values()))} and has {format_bytes(limit)}; set "
        "config.model.remat='full', increase config.mesh.fsdp, or choose a smaller model"
    )


def microbatches_message(sizes: dict[int, float], limit: float) -> str:
    number = fitting_number(sizes, limit)
    fewer = max((other for other in sizes if other < number), default=None)
    comparison = f"; {fewer} would need {_shown(sizes[fewer])}" if fewer else ""
    return (
        f"{number} microbatches per step, the fewest that fit: {format_bytes(sizes[number])} of "
        f"{format_bytes(limit)} per device{comparison}"
    )


def _shown(size: float) -> str:
    return format_bytes(size) if size < math.inf else "more"


def memory_limit(device: jax.Device) -> float | None:
    """Returns the bytes that programs can use of a device, or None if unknown."""
    if stats := device.memory_stats():
        return stats.get("bytes_limit")
    available = host_memory.available_bytes() if device.platform == "cpu" else None
    return None if available is None else _OF_HOST * available / jax.local_device_count()


def _step_bytes(config: Config) -> float:
    try:
        memory = shared_program(config).compiled_train_step.memory_analysis()
    except jax.errors.JaxRuntimeError as error:  # the TPU compiler refuses what does not fit
        if not is_out_of_memory(error):
            raise
        return math.inf
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    # The next state is in the memory of this one, so it does not count twice.
    return total + memory.output_size_in_bytes - memory.alias_size_in_bytes
