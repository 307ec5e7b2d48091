"""Estimates the memory and speed of a recipe on given hardware, by compiling the recipe for it."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from smallgpt_jax import models
from smallgpt_jax.config.group import AUTO
from smallgpt_jax.config.recipes import ConfigLike, load_config
from smallgpt_jax.devices import chips, sharding
from smallgpt_jax.devices.platform import faster_dtype
from smallgpt_jax.errors import UserError
from smallgpt_jax.output import elapsed_time_shown, print_error
from smallgpt_jax.planning import topologies
from smallgpt_jax.planning.estimate import Estimate, estimate, largest_batch
from smallgpt_jax.planning.inference import InferenceEstimate, estimate_inference
from smallgpt_jax.planning.table import format_plan
from smallgpt_jax.run.config import Config
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.microbatches import fewest_that_fit, possible_numbers
from smallgpt_jax.training.program import Program
from smallgpt_jax.training.size_messages import size_messages


class Plan(NamedTuple):
    estimate: Estimate
    table: str
    problem: str  # why it does not fit, and what to change; "" if it fits
    config: Config  # with the values that it was compiled with

    def __str__(self) -> str:
        return self.table

    def require_fit(self) -> None:
        """Raises UserError if training or evaluation does not fit into the devices' memory."""
        if self.problem:
            raise UserError(self.problem)


def plan(
    config: ConfigLike,
    topology: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    search: bool = False,
    log: Callable[[str], None] = print_error,
) -> Plan:
    """Estimates the memory and speed of training, without the hardware; print() shows a table.

    `config` is a recipe such as "gpt:quickstart", or its fields; `overrides` are further values,
    such as {"train.batch_size": 64}. `topology` is, for example, "v5e:4x4", "h100:8" or "cpu:8".
    With `search`, the batch size becomes the largest one that fits, after several compilations.
    `log` gets what the size of a sized recipe means, before the first compilation, and again if a
    search has changed it.
    Raises UserError, among others if the compiler of the topology is not installed.
    """
    with topologies.settings_restored():
        devices = topologies.topology_devices(topology)
        planned = _config_on(devices, config, overrides)
        for line in size_messages(planned):
            log(line)
        progress = functools.partial(_compilation_shown, topology)
        if search:
            # A search takes 0 as 1: with enough microbatches, almost every batch would fit.
            planned = planned.replace(train={"microbatches": max(1, planned.train.microbatches)})
            batch_size = _find_largest_batch(planned, topology, devices)
            # steps, rate and weight decay of a sized recipe follow the batch
            with_batch = {**(overrides or {}), "train.batch_size": batch_size}
            microbatches = planned.train.microbatches
            planned = _config_on(devices, config, with_batch).replace(
                train={"microbatches": microbatches}
            )
            for line in size_messages(planned):
                log(line)
        program, result = _compiled(planned, devices, progress)
        planned = planned.replace(train={"microbatches": program.config.train.microbatches})
        problem = "" if result.fits else _misfit(program, result)
        return Plan(result, format_plan(program, result), problem, planned)


def plan_inference(
    config: ConfigLike,
    topology: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    batch: int = 1,
) -> InferenceEstimate:
    """Estimates decoding of `batch` texts at a time on one device of a topology; see `plan`."""
    with topologies.settings_restored():
        devices = topologies.topology_devices(topology)
        model = models.LanguageModel(_config_on(devices, config, overrides).model)
        with _compilation_shown(topology, "decoding step"):
            return estimate_inference(model, devices[0], batch)


def _config_on(
    devices: list[jax.Device],
    config: ConfigLike,
    overrides: Mapping[str, Any] | None,
) -> Config:
    loaded = load_config(config, overrides)
    if loaded.get("model", {}).get("dtype") == AUTO:
        # `faster_dtype` is that of the current mesh's platform, here of `devices`. `Config.of` stays
        # outside the mesh: it runs programs, which absent devices cannot.
        with jax.set_mesh(jax.sharding.Mesh(devices, ("device",))):
            loaded.model.dtype = faster_dtype()
    return Config.of(loaded)


def _compilation_shown(topology: str, name: str):
    return elapsed_time_shown(f"compiling the {name} for {topology}")


def _find_largest_batch(config: Config, topology: str, devices: list[jax.Device]) -> int:
    chip = chips.find_chip(devices[0].device_kind)
    if not chip:
        raise UserError(
            f"--topology={topology}: --search needs chips of known memory; choose TPUs or GPUs"
        )

    def build(batch_size: int) -> Program:
        return build_program(config.replace(train={"batch_size": batch_size}), devices)

    progress = functools.partial(_compilation_shown, topology)
    return largest_batch(build, _batch_divisor(config, devices), chip.hbm, progress)


def _compiled(
    config: Config, devices: list[jax.Device], progress: Callable
) -> tuple[Program, Estimate]:
    """Compiles the config; where its microbatches are 0, with the fewest that fit, or with the most
    if none fit.
    """
    chip = chips.find_chip(devices[0].device_kind)
    trials = {}  # {microbatches: program and its estimate}

    def needed_bytes(microbatches: int) -> float:
        program = build_program(config.replace(train={"microbatches": microbatches}), devices)
        result = estimate(program, progress)
        trials[microbatches] = program, result
        return result.peak_bytes

    if config.train.microbatches:
        numbers = [config.train.microbatches]
    else:
        numbers = possible_numbers(config, sharding.make_mesh(config.mesh, devices))
    limit = chip.hbm if chip else math.inf
    sizes = fewest_that_fit(numbers, needed_bytes, limit)  # {microbatches: bytes}, of those tried
    # If nothing fits, the most microbatches need the least memory, and the message states it.
    fitting = [number for number, size in sizes.items() if size <= limit]
    return trials[min(fitting, default=max(sizes))]


def _batch_divisor(config: Config, devices) -> int:
    """Returns the batch size that has one sequence per device and microbatch."""
    shards = sharding.num_batch_shards(sharding.make_mesh(config.mesh, devices))
    return shards * config.train.microbatches


def _misfit(program: Program, result: Estimate) -> str:
    """Says which step does not fit, and what to change."""
    # needed_bytes is that of the training step, peak_bytes that of the larger one of both steps
    step = "training" if result.needed_bytes == result.peak_bytes else "evaluation"
    assert result.hbm_bytes is not None  # on devices of unknown memory, everything fits
    peak, available = result.peak_bytes / chips.GiB, result.hbm_bytes / chips.GiB
    return (
        f"does not fit: the {step} step needs {peak:.2f} GiB, the chip has {available:.3g} GiB; "
        f"{' or '.join(remedies(program))}"
    )


def remedies(program: Program) -> list[str]:
    """Returns the changes that reduce the memory per device, if the config has room for them."""
    config, mesh = program.config, program.mesh
    changes = []
    # One sequence cannot be divided into microbatches.
    if config.train.batch_size > _batch_divisor(config, mesh.devices.ravel()):
        changes.append("increase config.train.microbatches")
    if mesh.shape["fsdp"] < mesh.size:
        changes.append("increase config.mesh.fsdp")
    if config.model.remat != "full":
        changes.append("set config.model.remat=full")
    return changes or ["use more devices with config.mesh.fsdp"]
