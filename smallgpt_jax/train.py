"""Training, from a config to a finished run: the whole story, top to bottom."""

import functools
import json
import math
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from smallgpt_jax import data, inference, models, processes, sharding, stopping
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.analysis import chips, memory
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.checkpoint import Checkpoints
from smallgpt_jax.data import batches
from smallgpt_jax.data.packing import Rows
from smallgpt_jax.errors import Diverged, UserError
from smallgpt_jax.files import local_path
from smallgpt_jax.metrics import METRICS_FILE, MetricsWriter, Progress, Stopwatch, read_lines
from smallgpt_jax.optimizer import learning_rate_schedule, make_optimizer
from smallgpt_jax.output import best_effort
from smallgpt_jax.step import TrainState, eval_step, init_state, train_step
from smallgpt_jax.words import duration


@best_effort("stdout")
def train(config: ConfigDict, workdir: str) -> None:
    """Trains the model of `config` in `workdir`, from where the workdir left off.

    Raises UserError, before it writes anything, for what cannot be trained; Diverged; Stopped when the
    run was asked to stop (see stopping.py).
    """
    processes.check_same("a config", config.to_json_best_effort(sort_keys=True))
    folder = local_path("--workdir", workdir)
    processes.first(lambda: run_folder.check(folder, config))
    setup = set_up(config)
    with stopping.listening() as stop:
        text = open_text(setup, config)
        with run_folder.taken(folder):
            processes.first(lambda: run_folder.check(folder, config))  # another run may have begun meanwhile
            evaluated = evaluated_steps(folder, config, text.corpus)  # before the config there is replaced
            processes.first(lambda: run_folder.begin(folder, config, text.corpus))
            try:
                run(config, folder, setup, text, evaluated, stop)
            except Diverged as diverged:
                run_folder.record(folder, {"diverged": str(diverged)})
                raise
            except jax.errors.JaxRuntimeError as error:
                if not memory.is_exhausted(error):
                    raise
                raise UserError(out_of_memory(config, error)) from None


def out_of_memory(config: ConfigDict, error: Exception) -> str:
    """The message of a run that a device's memory cannot hold."""
    return (f"config.train.batch_size={config.train.batch_size}: in config.train.microbatches="
            f"{config.train.microbatches} parts it needs more memory than a device has "
            f"({textwrap.shorten(str(error), 160, placeholder=' …')});\nset more config.train.microbatches, "
            "config.model.remat='full' or, on several devices, a larger config.mesh.fsdp")


def run(config: ConfigDict, folder: Path, setup: "Setup", text: "Text", evaluated: set[int], stop: stopping.Stop,
        ) -> None:
    """The run itself, in its workdir: all that `train` does between checking and the last words."""
    model, mesh = setup.model, setup.mesh
    progress = Progress(config.train.steps)

    # ------------------------------------------------------------------ State
    # What fills it: 1. the newest good checkpoint; 2. if there is none, the initialisers, from the seed. An
    # imported model's has no optimiser state: that begins anew.
    checkpoints = Checkpoints(
        folder / run_folder.CHECKPOINT_FOLDER, config.train.keep_checkpoints, say=progress.note)
    state = checkpoints.restore_newest(abstract_state(setup, config)) or initial_state(setup, config)
    losses = checkpoints.unlogged_losses(int(state.step)) if state.step else []  # since the last line of metrics.jsonl
    if state.opt_state is None:
        state = state._replace(opt_state=initial_optimizer_state(setup, state.params))
    first_step = int(state.step)
    is_evaluated, = processes.from_first((first_step in evaluated,))
    print(describe(setup, config, text, first_step), flush=True)
    if first_step >= config.train.steps and is_evaluated:
        return

    # ------------------------------------------------------------------ Compiled steps
    started = time.monotonic()
    step_program = compile_train_step(setup, config)
    eval_program = compile_eval_step(setup, config)
    needs = step_program.memory_analysis()
    run_folder.record(folder, {
        "first_step": first_step, "device": chips.name(mesh.devices.flat[0]), "devices": mesh.size,
        "argument_bytes": needs.argument_size_in_bytes, "temp_bytes": needs.temp_size_in_bytes,
        "padding": text.texts.padding})
    print(f"compiled in {time.monotonic() - started:.0f} s; memory a device: "
          f"{memory.in_words(needs.argument_size_in_bytes)} for the state and a batch, "
          f"{memory.in_words(needs.temp_size_in_bytes)} more while a step runs", flush=True)
    run_step, run_eval = runnable(step_program, mesh), runnable(eval_program, mesh)

    # ------------------------------------------------------------------ What it tells
    writer, watch = MetricsWriter(folder, first_step, say=progress.note), Stopwatch()
    skips = Skips(config.train.on_nonfinite, config.train.max_nonfinite)
    tokens_per_step = config.train.batch_size * config.model.context_length * (1 - text.texts.padding)
    chip = chips.chip(mesh.devices.flat[0].device_kind)
    flops_per_token = train_flops_per_token(model)
    told_step, told_seconds = first_step, 0.0

    def tell(step: int, values) -> None:
        nonlocal told_step, told_seconds
        values = {name: float(value) for name, value in jax.device_get(values).items()}
        losses.append(values["loss"])
        if not values.pop("is_finite"):
            rows = ", ".join(map(str, text.row_numbers[step - 1]))
            progress.note(skips.count(step, values, rows, checkpoints))
        else:
            skips.in_a_row = 0
        if step % config.train.log_every and step < config.train.steps:
            return
        seconds = watch.seconds()
        speed = (step - told_step) * tokens_per_step / (seconds - told_seconds)
        told_step, told_seconds = step, seconds
        values |= {"loss_mean": statistics.fmean(losses), "tokens": round(step * tokens_per_step),
                   "tokens_per_second": speed}
        losses.clear()
        if chip:
            values["mfu"] = speed * flops_per_token / (chip.flops * mesh.size)
        writer.write(step, "train", values)
        left = (config.train.steps - step) * seconds / (step - first_step)
        progress.update(step, f"loss {values['loss']:.4f}   {speed:,.0f} tokens/s"
                        + (f"   MFU {values['mfu']:.1%}" if chip else "")
                        + f"   {duration(left)} left")

    def evaluate(step: int, params) -> bool:
        """False, with nothing written, if the run is to stop meanwhile."""
        with watch.paused():
            found = mean_loss(run_eval, params, map(text.to_devices, text.validation_batches), stop.is_agreed)
        if found is None:
            return False
        nats, targets = found
        bits_per_byte = nats / math.log(2) / text.corpus.bytes_per_token("validation")
        writer.write(step, "eval", {"loss": nats, "bits_per_byte": bits_per_byte, "targets": targets,
                                    "tokens": round(step * tokens_per_step)})
        progress.stay(step, f"validation loss {nats:.4f}, {bits_per_byte:.4f} bits per byte")
        return True

    # ------------------------------------------------------------------ The loop
    def is_due(step: int, every: int) -> bool:
        return step >= config.train.steps or step % every == 0

    step, last_step, stops = first_step, config.train.steps, False
    if first_step and is_due(first_step, config.train.eval_every) and not is_evaluated:
        # The run was stopped after saving, before evaluating, or is now to be evaluated on other rows.
        stops = not evaluate(first_step, state.params)
        last_step = first_step if stops else last_step
    unread = None  # the metrics of a step are read only when the next one is under way
    for step, batch in zip(range(first_step + 1, last_step + 1),
                           batches.read_ahead(text.train_batches, first_step, config.data.workers)):
        state, values = run_step(state, text.to_devices(batch))
        stop.has_something_to_save = True
        if unread:
            tell(*unread)
        unread = (step, values)
        stops = stop.is_agreed()
        saves = stops or is_due(step, config.train.checkpoint_every)
        evaluates = not stops and is_due(step, config.train.eval_every)
        if saves or evaluates:
            tell(*unread)
            unread = None
        if saves:
            with watch.paused():
                checkpoints.save(step, state, losses)
        if evaluates:
            stops = not evaluate(step, state.params)
        if stops:
            break

    # ------------------------------------------------------------------ The end
    checkpoints.finish()
    if step > first_step and step not in checkpoints.steps():
        checkpoints.save(step, state, losses)  # stopped while evaluating between two checkpoints, or a second try
    checkpoints.close()
    writer.close()
    if step > first_step and step not in checkpoints.steps():
        raise UserError(f"--workdir={folder}: step {step}, the last one, could not be saved. Make room "
                        "there; the same command then goes on from the newest checkpoint")
    if stops:
        stop.end(step)


def mean_loss(run_eval, params, batches, is_stopped: Callable[[], bool] = lambda: False,
              ) -> tuple[float, int] | None:
    """The mean loss in nats over all targets of the batches that count, and their number; None if stopped before
    the last batch."""
    sums = []
    for batch in batches:
        if is_stopped():
            return None
        sums.append(run_eval(params, batch))
    loss, targets = (sum(values) for values in zip(*jax.device_get(sums)))
    return float(loss / targets), int(targets)


class Skips:
    """What becomes of updates whose loss or gradient is not finite: `train.on_nonfinite`. One that was made and
    has left weights that are not finite is always the last."""

    def __init__(self, on_nonfinite: str, most: int):
        self._on_nonfinite, self._most = on_nonfinite, most
        self.in_a_row = 0

    def count(self, step: int, values: dict[str, float], rows: str, checkpoints: Checkpoints) -> str:
        """What to say of such a step. Raises Diverged if it is to be the last one."""
        self.in_a_row += 1
        was_made = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        trouble = (f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
                   + (", the updated weights are not finite" if was_made else "")
                   + f"; its batch: rows {textwrap.shorten(rows, 60, placeholder=' …')} of the training text")
        skips = self._on_nonfinite == "skip" and not was_made
        if skips and self.in_a_row < self._most:
            return f"{trouble}. This update is skipped ({values['skipped']:.0f} so far)"
        checkpoints.finish()
        newest = max(checkpoints.steps(), default=None)
        why = (f"{self.in_a_row} updates in a row (config.train.max_nonfinite) were not finite" if skips
               else "training has diverged")
        good = ("There is no checkpoint" if newest is None else
                f"The newest checkpoint, of step {newest}, is good")
        mend = "" if skips or was_made else ", or --config.train.on_nonfinite=skip"
        raise Diverged(f"{why}: {trouble}.\n{good}. Try a lower config.optimizer.learning_rate{mend}")


class Text(NamedTuple):
    """What a run reads."""

    corpus: data.Corpus
    texts: batches.Mixture  # for training
    row_numbers: Any  # item `step` − 1: which rows of `texts` are that step's batch
    train_batches: Any  # item `step` − 1: the rows of it that this process needs
    validation_batches: Any
    to_devices: Callable  # such rows → the global batch


def open_text(setup: "Setup", config: ConfigDict) -> Text:
    """The text of a config, made ready for the devices of this process.

    Raises UserError if there is none, too little of it, or another one in another process.
    """
    corpus = find_or_make(config)
    if corpus.tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(f"config.model.vocab_size={config.model.vocab_size}: the tokenizer of the text has "
                        f"{corpus.tokenizer.vocab_size:,} entries")
    processes.check_same("a text", json.dumps(corpus.description))
    batch_size, seed = config.train.batch_size, config.train.seed
    rows = sharding.local_rows(setup.mesh, batch_size)
    texts = mixture(corpus, "train", config)
    to_devices = functools.partial(sharding.global_batch, setup.mesh, rows, batch_size)
    return Text(
        corpus, texts, batches.row_numbers(texts, batch_size, seed),
        batches.train_batches(texts, batch_size, seed, rows),
        validation_batches(corpus, config, rows),
        functools.partial(jax.tree.map, to_devices))


def mixture(corpus: data.Corpus, split: str, config: ConfigDict) -> batches.Mixture:
    """The rows of a split as `config` packs them."""
    return batches.Mixture(corpus.packed(split, config.data.packing, config.data.separate_documents,
                                         config.model.context_length), corpus.weights)


def validation_batches(corpus: data.Corpus, config: ConfigDict, rows: slice | np.ndarray = slice(None)):
    """The batches of one evaluation; of each the `rows` that a process needs."""
    return batches.validation_batches(
        mixture(corpus, "validation", config), config.train.batch_size, config.train.eval_steps, rows)


def find_or_make(config: ConfigDict) -> data.Corpus:
    """The corpus of a config. Process 0 makes it where there is none; the others then find it, or make
    the same one again if they do not see process 0's files."""
    processes.first(lambda: data.find_or_make(config.data))
    return data.find_or_make(config.data)


def is_finished(folder: Path, config: ConfigDict, corpus: data.Corpus) -> bool:
    """Whether the workdir holds a run that has been trained for all steps of `config`, saved, and evaluated on the
    rows that `config` asks for."""
    steps = config.train.steps
    return ((folder / run_folder.CHECKPOINT_FOLDER / str(steps)).is_dir()
            and steps in evaluated_steps(folder, config, corpus))


def evaluated_steps(folder: Path, config: ConfigDict, corpus: data.Corpus) -> set[int]:
    """The steps whose last evaluation was on the rows that `config` asks for, told by the number of targets.

    Older versions did not record that number: their rows are those of the workdir's own config.
    """
    lines = {line["step"]: line for line in read_lines(folder / METRICS_FILE) if line["split"] == "eval"}
    if not lines:
        return set()
    wanted = sum(int(batch.counts_BxT.sum()) for batch in validation_batches(corpus, config))
    unrecorded = wanted if run_folder.read_config(folder).train.eval_steps == config.train.eval_steps else None
    return {step for step, line in lines.items() if line.get("targets", unrecorded) == wanted}


@best_effort("stdout")
def conclude(workdir: str) -> None:
    """The last words of a run: a text of its own (if one process sees the whole model), how good it is."""
    if not processes.is_first():
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
    """The last evaluation of a run in a sentence; "" where metrics.jsonl was removed or cannot be read."""
    try:
        lines = [line for line in read_lines(folder / METRICS_FILE) if line["split"] == "eval"]
    except OSError:
        lines = []
    if not lines:
        return ""
    loss, bits = (math.nan if lines[-1][name] is None else lines[-1][name] for name in ("loss", "bits_per_byte"))
    return f"Step {lines[-1]['step']}: validation loss {loss:.4f}, {bits:.4f} bits per byte. "


def check(config: ConfigDict, mesh) -> None:
    """Raises UserError for a `train` group that cannot be run on this mesh."""
    train = config.train
    for field in ("steps", "batch_size", "microbatches", "loss_chunks", "log_every", "eval_every",
                  "checkpoint_every", "keep_checkpoints", "max_nonfinite"):
        if train[field] < 1:
            raise UserError(f"config.train.{field}={train[field]}: must be at least 1")
    if train.eval_steps < 0:
        raise UserError(f"config.train.eval_steps={train.eval_steps}: must not be negative")
    if not 0 <= train.seed < 2**32:
        raise UserError(f"config.train.seed={train.seed}: must be at least 0 and below 2^32")
    parts = sharding.batch_parts(mesh) * train.microbatches
    if train.batch_size % parts:
        raise UserError(
            f"config.train.batch_size={train.batch_size}: must be a multiple of {parts}: "
            f"{sharding.batch_parts(mesh)} devices (config.mesh.data × fsdp) × "
            f"{train.microbatches} microbatches")
    if config.model.context_length % train.loss_chunks:
        raise UserError(f"config.train.loss_chunks={train.loss_chunks}: must divide "
                        f"config.model.context_length={config.model.context_length}")
    if config.mesh.path != 1:
        if config.model.architecture != "pgpt":
            raise UserError(f"config.mesh.path={config.mesh.path}: only pgpt has paths")
        if config.model.num_paths % mesh.shape["path"]:
            raise UserError(f"config.mesh.path={config.mesh.path}: must divide config.model.num_paths="
                            f"{config.model.num_paths}")
    if train.on_nonfinite not in ("stop", "skip"):
        raise UserError(f"config.train.on_nonfinite={train.on_nonfinite!r}: must be 'stop' or 'skip'")
    if config.data.workers < 0:
        raise UserError(f"config.data.workers={config.data.workers}: must not be negative")


class Setup(NamedTuple):
    """What a config asks for: the model, where it is trained and how it is updated."""

    model: models.LanguageModel
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    shardings: TrainState


def set_up(config: ConfigDict, devices=None) -> Setup:
    """What `config` asks for, on all devices if none are named. Nothing is allocated.

    Raises UserError for what cannot be trained.
    """
    model = models.build(**config.model)
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    check(config, mesh)
    boxed_params = models.abstract_params(model)
    optimizer = make_optimizer(boxed_params, **config.optimizer)
    params = sharding.param_shardings(mesh, boxed_params)
    opt_state = sharding.optimizer_shardings(mesh, optimizer, nn.unbox(boxed_params), params)
    return Setup(model, mesh, optimizer, TrainState(sharding.replicated(mesh), params, opt_state))


def abstract_state(setup: Setup, config: ConfigDict) -> TrainState:
    """The shapes of a state, and where each part is to lie."""
    shapes = jax.eval_shape(lambda: init_state(setup.model, setup.optimizer, config.train.seed))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                        shapes, setup.shardings)


def initial_state(setup: Setup, config: ConfigDict) -> TrainState:
    """The state before the first update, made where it is to lie."""
    return jax.jit(lambda: init_state(setup.model, setup.optimizer, config.train.seed),
                   out_shardings=setup.shardings)()


def initial_optimizer_state(setup: Setup, params) -> optax.OptState:
    """The optimiser's state before the first update of these parameters."""
    return jax.jit(setup.optimizer.init, out_shardings=setup.shardings.opt_state)(params)


def compile_train_step(setup: Setup, config: ConfigDict, compiler_options=None) -> jax.stages.Compiled:
    """(state, batch) → (state, metrics); it takes over the memory of its state."""
    schedule = learning_rate_schedule(**{
        field: config.optimizer[field] for field in
        ("learning_rate", "warmup_steps", "decay_steps", "final_learning_rate")})
    step = functools.partial(
        train_step, model=setup.model, optimizer=setup.optimizer, schedule=schedule,
        seed=config.train.seed, microbatches=config.train.microbatches,
        loss_chunks=config.train.loss_chunks)
    jitted = jax.jit(step, donate_argnums=0,
                     out_shardings=(setup.shardings, sharding.replicated(setup.mesh)))
    with sharding.context(setup.mesh):
        return jitted.lower(abstract_state(setup, config), batch_shape(setup, config)).compile(compiler_options)


def compile_eval_step(setup: Setup, config: ConfigDict) -> jax.stages.Compiled:
    """(params, batch) → (summed loss, number of targets)."""
    evaluation = functools.partial(eval_step, model=setup.model, microbatches=config.train.microbatches,
                                   loss_chunks=config.train.loss_chunks)
    jitted = jax.jit(evaluation, out_shardings=sharding.replicated(setup.mesh))
    with sharding.context(setup.mesh):
        return jitted.lower(abstract_state(setup, config).params,
                            batch_shape(setup, config, evaluates=True)).compile()


def batch_shape(setup: Setup, config: ConfigDict, evaluates: bool = False) -> Rows:
    """The shapes of a global batch, and where it lies. What is not there is as the packing leaves it."""
    def shape(length: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((config.train.batch_size, length), dtype,
                                    sharding=sharding.batch_sharding(setup.mesh))

    time, is_best_fit = config.model.context_length, config.data.packing == "best_fit"
    return Rows(
        shape(time + 1, "int32"), shape(time, "int32") if config.data.separate_documents else None,
        shape(time, "bool") if evaluates or is_best_fit else None, shape(time, "int32") if is_best_fit else None)


def runnable(program: jax.stages.Compiled, mesh):
    """The program as it can be called again and again. Simulated CPU devices share a few threads:
    programs in flight together can each hold some of those that the other's collectives wait for. So
    there each call waits for its end."""
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        return lambda *arguments: jax.block_until_ready(program(*arguments))
    return program


def describe(setup: Setup, config: ConfigDict, text: Text, first_step: int) -> str:
    """What is trained on what, and what of it is not as one might expect."""
    model, mesh = setup.model, setup.mesh
    device = mesh.devices.flat[0].device_kind
    lines = [f"{model.config.architecture}, {models.num_parameters(model):,} parameters, on {mesh.size} "
             f"{device} device{'s' if mesh.size > 1 else ''}"
             + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else "")
             + f": {config.train.steps} steps of {config.train.batch_size} × "
             f"{model.config.context_length} tokens"
             + (f", {first_step} of them done" if first_step else "")]
    lines += [f"{packing.split.folder.name}, {config.data.packing}: {packing.padding:.2%} of the rows is "
              f"padding, {packing.cut_documents:.0%} of the documents are cut"
              for packing in text.texts.packings]
    if (end := config.optimizer.decay_steps) != config.train.steps:
        lines.append(f"the learning rate falls until step {end}, training ends at {config.train.steps} "
                     "(config.optimizer.decay_steps, config.train.steps)")
    return "\n".join([*lines, *exceptions(setup, config.data.separate_documents)])


def exceptions(setup: Setup, separate_documents: bool) -> list[str]:
    """A line for each dimension that the mesh does not divide, and for each attention that is not
    computed as asked for."""
    boxed = models.abstract_params(setup.model)
    undivided = sharding.undivided(setup.mesh, boxed)
    fallbacks = dict.fromkeys(
        f"attention with heads of width {layers.head_width} is plain XLA's: {layers.why}"
        for layers in memory.attention_layers(setup.model, setup.mesh, separate_documents) if layers.why)
    return [*undivided, *fallbacks]
