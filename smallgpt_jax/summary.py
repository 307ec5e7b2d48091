"""The lines that a run opens and closes with, and what it records of itself.

The only user of analysis/ on the way to training.
"""

import math
import shlex
from pathlib import Path

import jax

from smallgpt_jax import distributed, inference, models, sharding
from smallgpt_jax.analysis import chips, memory
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.errors import UserError
from smallgpt_jax.metrics import METRICS_FILE, read_lines
from smallgpt_jax.output import best_effort
from smallgpt_jax.program import Program


def opening(program: Program, pipeline: DataPipeline, first_step: int) -> str:
    """Returns what is trained on what, and what differs from what one might expect."""
    config, model, mesh = program.config, program.model, program.mesh
    device = mesh.devices.flat[0].device_kind
    lines = [f"{model.config.architecture}, {models.num_parameters(model):,} parameters, on {mesh.size} "
             f"{device} device{'s' if mesh.size > 1 else ''}"
             + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else "")
             + f": {config.train.steps} steps of {config.train.batch_size} × "
             f"{model.config.context_length} tokens"
             + (f", {first_step} of them done" if first_step else "")]
    lines += [f"{packing.split.folder.name}, {config.data.packing}: {packing.padding:.2%} of the rows is "
              f"padding, {packing.cut_documents:.0%} of the documents are cut"
              for packing in pipeline.train.packings]
    if (end := config.optimizer.decay_steps) != config.train.steps:
        lines.append(f"the learning rate falls until step {end}, training ends at {config.train.steps} "
                     "(config.optimizer.decay_steps, config.train.steps)")
    return "\n".join([*lines, *exceptions(program)])


def exceptions(program: Program) -> list[str]:
    """Returns a line for each dimension that the mesh does not divide, and for each attention that another backend
    computes than the requested one."""
    undivided = sharding.undivided(program.mesh, models.abstract_params(program.model))
    fallbacks = dict.fromkeys(
        f"attention with heads of width {layers.head_width} is plain XLA's: {layers.why}"
        for layers in memory.attention_layers(program.model, program.mesh, program.config.data.separate_documents)
        if layers.why)
    return [*undivided, *fallbacks]


def compiled(needs, seconds: float) -> str:
    """Returns how long compilation took, and the memory per device that the training step needs."""
    return (f"compiled in {seconds:.0f} s; memory a device: {memory.in_words(needs.argument_size_in_bytes)} for the "
            f"state and a batch, {memory.in_words(needs.temp_size_in_bytes)} more while a step runs")


def session(program: Program, pipeline: DataPipeline, needs, first_step: int) -> dict:
    """Returns what a session records in sessions.jsonl."""
    return {"first_step": first_step, "device": chips.name(program.mesh.devices.flat[0]),
            "devices": program.mesh.size, "argument_bytes": needs.argument_size_in_bytes,
            "temp_bytes": needs.temp_size_in_bytes, "padding": pipeline.train.padding}


def peak_tokens_per_second(program: Program) -> float | None:
    """Returns the speed at which all devices would compute at their peak, None if that is not known."""
    chip = chips.chip(program.mesh.devices.flat[0].device_kind)
    return chip and chip.flops * program.mesh.size / train_flops_per_token(program.model)


@best_effort("stdout")
def closing(workdir: str) -> None:
    """Prints a sample of the model (if one process holds it whole) and its last evaluation."""
    if not distributed.is_first():
        return
    folder = Path(workdir).expanduser()
    if jax.process_count() == 1:
        print("\nA text of its own:\n")
        try:
            for piece in inference.load(folder).stream(max_new_tokens=150, temperature=0.7):
                print(piece, end="", flush=True)
        except UserError as error:  # an own architecture that cannot be decoded has been trained all the same
            print(f"(none: {error})")
        print("\n")
    print(f"\n{last_evaluation(folder)}More text:\n"
          f'  python -m smallgpt_jax.generate {shlex.quote(f"--workdir={folder}")} --prompt="..."')


def last_evaluation(folder: Path) -> str:
    """Returns the last evaluation of a run in a sentence; "" where metrics.jsonl was removed or cannot be read."""
    try:
        lines = [line for line in read_lines(folder / METRICS_FILE) if line["split"] == "eval"]
    except OSError:
        lines = []
    if not lines:
        return ""
    loss, bits = (math.nan if lines[-1][name] is None else lines[-1][name] for name in ("loss", "bits_per_byte"))
    return f"Step {lines[-1]['step']}: validation loss {loss:.4f}, {bits:.4f} bits per byte. "
