"""Messages at the start and end of a run. Training estimates costs only in this module."""

import math
import sys
from pathlib import Path

import jax

from smallgpt_jax import inference, models
from smallgpt_jax.data.config import embedding_rows, is_synthetic
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.data.probe_corpus import ProbeCorpus
from smallgpt_jax.devices import chips, distributed, sharding
from smallgpt_jax.devices.platform import processor_identity
from smallgpt_jax.errors import UserError, command_line
from smallgpt_jax.formatting import BARS, format_bytes, parameter_count, sparkline
from smallgpt_jax.models import structure
from smallgpt_jax.models.flops import train_cost
from smallgpt_jax.models.naming import architecture_name
from smallgpt_jax.optim.learning_rate import learning_rate_schedule
from smallgpt_jax.output import best_effort
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.logger import Units, evaluation_message
from smallgpt_jax.run.metrics import answers_in, sample_lines
from smallgpt_jax.run.names import CURVES_FILE, METRICS_FILE
from smallgpt_jax.storage.paths import as_path
from smallgpt_jax.training.program import Program

LOSSES = {
    "prefix": "those of tokens after random prefixes",
    "masked": "those of masked tokens",
}  # by objective
MANY_EPOCHS = 4  # up to which repeated text is nearly as good as new (arXiv 2305.16264)
_MIN_EXAMPLES = 20  # of a validation split, for a loss that says something
_MIN_BARS = 8  # fewer logged losses are not worth a line in the final message


def startup_message(
    config: Config, program: Program, pipeline: DataPipeline, first_step: int
) -> str:
    lines = [_headline(config, program, first_step)]
    if not first_step:
        lines += _vocabulary_messages(config.model.vocab_size, pipeline.corpus.tokenizer.vocab_size)
    lines += [packing.summary for packing in pipeline.train.packings]
    lines += [pipeline.corpus.warning] if pipeline.corpus.warning else []
    lines += validation_messages(pipeline.corpus)
    lines += epochs_messages(config, pipeline)
    objective = config.train.objective
    if objective in LOSSES and config.data.format == "text":
        lines.append(
            f"objective {objective!r}: losses are {LOSSES[objective]}, and do not compare with "
            "those of other objectives"
        )
    steps, decay_steps = config.train.steps, config.optimizer.decay_steps
    if decay_steps != steps and config.optimizer.schedule != "constant":
        lines.append(
            f"learning rate decay ends at step {decay_steps}, training at step {steps}; the last "
            f"rate is {float(learning_rate_schedule(config.optimizer)(steps - 1)):.3g} "
            "(config.optimizer.decay_steps, config.train.steps)"
        )
    return "\n".join([*lines, *fallback_messages(program)])


def _vocabulary_messages(rows: int, entries: int) -> list[str]:
    if rows < 2 * entries:
        return []
    return [
        f"config.model.vocab_size={rows}: the tokenizer has only {entries:,} entries; a smaller "
        f"model has --config.model.vocab_size={embedding_rows(entries)}"
    ]


def validation_messages(corpus: Corpus | ProbeCorpus) -> list[str]:
    """Text has passages or documents of any length, so only examples are counted."""
    if isinstance(corpus, ProbeCorpus) or not corpus.stores[0].validation.has_answers:
        return []
    count = sum(store.validation.documents for store in corpus.stores)
    if count >= _MIN_EXAMPLES:
        return []
    examples = "1 example" if count == 1 else f"{count} examples"
    return [
        f"warning: validation: {examples}: its loss says little; raise "
        "config.data.validation_fraction"
    ]


def epochs(config: Config, pipeline: DataPipeline, steps: int) -> float | None:
    """Returns how often the steps read the training text; None for probes, which make examples."""
    if is_synthetic(config.data):
        return None
    return pipeline.train.epochs(steps * config.train.batch_size)


def epochs_messages(config: Config, pipeline: DataPipeline) -> list[str]:
    steps = config.train.steps
    times = epochs(config, pipeline, steps)
    if times is None:
        return []
    if times < 0.01:
        amount = "under 1% of the training text"
    elif times < 1:
        amount = f"{times:.0%} of the training text"
    else:
        amount = f"the text {times:.1f} times"
    if times <= MANY_EPOCHS or config.data.format != "text":
        return [f"{steps:,} steps read {amount}"]
    return [
        f"warning: {steps:,} steps read {amount}; beyond {MANY_EPOCHS} times, repeated text teaches "
        "less than new text: use more text, fewer steps or a smaller model"
    ]


def _headline(config: Config, program: Program, first_step: int) -> str:
    model, mesh = program.model, program.mesh
    parameters = parameter_count(models.num_parameters(model), models.num_active_parameters(model))
    devices = f"{mesh.size} {mesh.devices.flat[0].device_kind} device"
    if mesh.size > 1:
        devices += "s"
    if jax.process_count() > 1:
        devices += f" of {jax.process_count()} processes"
    work = f"{config.train.steps} steps of {config.train.batch_size} × "
    work += f"{model.config.context_length} tokens"
    if first_step:
        work += f", {first_step} done"
    return (
        f"{architecture_name(model.config)}, {parameters} parameters, on {devices} in "
        f"{model.config.dtype}: {work}"
    )


def fallback_messages(program: Program) -> list[str]:
    undivided = sharding.replicated_dimensions(program.mesh, models.abstract_params(program.model))
    layers = structure.attention_layers(
        program.model, program.mesh, program.config.data.separate_documents
    )
    messages = [_fallback_message(program, one) for one in layers if one.fallback_reason]
    return [*undivided, *dict.fromkeys(messages)]


def _fallback_message(program: Program, layers: structure.AttentionLayers) -> str:
    message = (
        f"attention with head width {layers.head_width} uses plain XLA: {layers.fallback_reason}"
    )
    backend = program.config.model.attention
    if backend == "auto":
        return message
    return f"warning: config.model.attention={backend!r} has no effect: {message}"


def compilation_message(memory_stats, seconds: float) -> str:
    return (
        f"compiled and ready in {seconds:.0f} s; memory per device: "
        f"{format_bytes(memory_stats.argument_size_in_bytes)} for state and batch, "
        f"{format_bytes(memory_stats.temp_size_in_bytes)} temporary"
    )


def session_facts(program: Program, pipeline: DataPipeline, memory_stats, first_step: int) -> dict:
    return {
        "first_step": first_step,
        "device": chips.device_name(program.mesh.devices.flat[0]),
        "devices": program.mesh.size,
        # On CPUs, bits and speed depend on the processor.
        **({"processor": processor_identity()} if jax.default_backend() == "cpu" else {}),
        "argument_bytes": memory_stats.argument_size_in_bytes,
        "temp_bytes": memory_stats.temp_size_in_bytes,
        "padding": pipeline.train.padding,
    }


def log_units(program: Program, pipeline: DataPipeline) -> Units:
    is_masked = program.config.train.objective == "masked"
    bytes_per_token = math.nan if is_masked else pipeline.corpus.bytes_per_token("validation")
    return Units(
        pipeline.tokens_per_step,
        bytes_per_token,
        peak_tokens_per_second(program),
        epochs(program.config, pipeline, steps=1),
    )


def peak_tokens_per_second(program: Program) -> float | None:
    """Returns tokens per second at the devices' peak FLOP/s. Prints why FLOPs are unknown."""
    if not (chip := chips.find_chip(program.mesh.devices.flat[0].device_kind)):
        return None
    cost = train_cost(program.model, program.objective.terms.values())
    if cost.flops is None:
        print(f"MFU is not logged: {cost.problem}", flush=True)
        return None
    return chip.flops * program.mesh.size / cost.flops


@best_effort("stdout")
def print_final_message(workdir: str) -> None:
    """Omits the sample in multi-process runs."""
    if not distributed.is_primary():
        return
    folder = as_path("--workdir", workdir)
    try:
        config = read_config(folder)
    except UserError:  # damaged during the run
        config = None
    is_masked = config is not None and config.train.objective == "masked"
    if jax.process_count() == 1 and not is_masked:
        _print_sample(folder)
    if is_masked:
        export = command_line("convert", "--to=hf", f"--workdir={folder}")
        next_step = f"To export the encoder:\n  {export} --output=..."
    else:
        generate = command_line("generate", f"--workdir={folder}")
        next_step = f'To generate more:\n  {generate} --prompt="..."'
        if config and models.custom_classes(config.model):
            next_step += " --trust_custom_code"
    print(f"\n{loss_message(folder)}{last_evaluation_message(folder)}{next_step}")


def _print_sample(folder: Path) -> None:
    print("\nSample:\n")
    try:
        for piece in inference.load(folder).stream(max_new_tokens=150, temperature=0.7):
            print(piece, end="", flush=True)
    except UserError as error:  # an architecture whose decoding does not work can still be trained
        print(f"(none: {error})")
    print("\n")


def loss_message(folder: Path) -> str:
    """Returns a line with a bar per span of losses; "" if few were logged, or if standard output
    cannot encode bars.
    """
    losses = [
        line["loss_mean"]
        for line in _logged_lines(folder, "train")
        if line.get("loss_mean") is not None
    ]
    try:
        BARS.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return ""
    if len(losses) < _MIN_BARS:
        return ""
    plots = f" ({folder / CURVES_FILE})" if (folder / CURVES_FILE).exists() else ""
    return f"Training loss {losses[0]:.2f} {sparkline(losses)} {losses[-1]:.2f}{plots}\n"


def last_evaluation_message(folder: Path) -> str:
    lines = _logged_lines(folder, "eval")
    if not lines:
        return ""
    last = lines[-1]
    # null where the loss was not finite
    loss = math.nan if last["loss"] is None else last["loss"]
    bits = math.nan if last["bits_per_byte"] is None else last["bits_per_byte"]
    return f"Step {last['step']}: {evaluation_message(loss, bits, answers_in(last))}. "


def _logged_lines(folder: Path, split: str) -> list[dict]:
    try:
        return [line for line in sample_lines(folder / METRICS_FILE) if line["split"] == split]
    except OSError:
        return []
