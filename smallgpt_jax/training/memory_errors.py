"""Explains that a device has too little memory, and what to do."""

import contextlib
import textwrap
from collections.abc import Iterator

import jax

from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import TrainConfig


@contextlib.contextmanager
def memory_errors_explained(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = textwrap.shorten(str(error), 160, placeholder=" …")
        raise UserError(
            f"config.train.batch_size={config.batch_size}: needs more memory than a device has, "
            f"with config.train.microbatches={config.microbatches} ({reason});\nincrease "
            "config.train.microbatches, set config.model.remat='full' or, on several devices, "
            "increase config.mesh.fsdp"
        ) from None


def is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    # A smaller batch does not reduce the use of TPU vmem and smem.
    return (
        "RESOURCE_EXHAUSTED" in text
        and "memory space vmem" not in text
        and "memory space smem" not in text
    )
