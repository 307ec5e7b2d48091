"""Training, from a config to a finished run: the whole story, top to bottom."""

import functools
import math
import time
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import optax
from ml_collections import ConfigDict

from smallgpt_jax import checkpoint, data, inference, models, processes, sharding
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.analysis import chips, memory
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.data import batches
from smallgpt_jax.data.store import METADATA_FILE
from smallgpt_jax.errors import UserError
from smallgpt_jax.metrics import (
    METRICS_FILE,
    MetricsWriter,
    Progress,
    Stopwatch,
    duration,
    read_lines,
)
from smallgpt_jax.optimizer import learning_rate_schedule, make_optimizer
from smallgpt_jax.step import TrainState, eval_step, init_state, train_step


def train(config: ConfigDict, workdir: str) -> None:
    """Trains the model of `config` in `workdir`, from where the workdir left off.

    Raises UserError, before it writes anything, for what cannot be trained.
    """
    # ------------------------------------------------------------------ What is asked for
    processes.check_same("a config", config.to_json_best_effort(sort_keys=True))
    folder = Path(workdir).expanduser()
    processes.first(lambda: run_folder.check(folder, config))
    setup = set_up(config)
    model, mesh = setup.model, setup.mesh

    # ------------------------------------------------------------------ Text
    store = find_or_make(config)
    if store.tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"config.model.vocab_size={model.config.vocab_size}: the tokenizer "
                        f"{config.data.tokenizer!r} has {store.tokenizer.vocab_size:,} entries")
    batch_size, context_length = config.train.batch_size, model.config.context_length
    rows = sharding.local_rows(mesh, batch_size)
    to_devices = functools.partial(sharding.global_batch, mesh, rows, batch_size)
    shape = dict(context_length=context_length, batch_size=batch_size, rows=rows)
    train_batches = batches.train_batches(store.train, seed=config.train.seed, **shape)
    validation_batches = batches.validation_batches(
        store.validation, limit=config.train.eval_steps, **shape)
    processes.check_same("a text", (store.folder / METADATA_FILE).read_text())
    processes.first(lambda: run_folder.begin(folder, config, store))

    # ------------------------------------------------------------------ State
    # What fills it: 1. the newest checkpoint; 2. if there is none, the initialisers, from the seed.
    checkpoints = checkpoint.open_checkpoints(
        folder / run_folder.CHECKPOINT_FOLDER, config.train.keep_checkpoints)
    first_step, is_evaluated = processes.from_first(where_it_left_off(folder, checkpoints))
    print(describe(setup, config, first_step), flush=True)
    if first_step >= config.train.steps and is_evaluated:
        conclude(folder)
        return
    if first_step:
        state = checkpoint.restore(checkpoints, first_step, abstract_state(setup, config))
    else:
        state = initial_state(setup, config)

    # ------------------------------------------------------------------ Compiled steps
    started = time.monotonic()
    step_program = compile_train_step(setup, config)
    eval_program = compile_eval_step(setup, config)
    needs = step_program.memory_analysis()
    print(f"compiled in {time.monotonic() - started:.0f} s; memory a device: "
          f"{memory.in_words(needs.argument_size_in_bytes)} for the state and a batch, "
          f"{memory.in_words(needs.temp_size_in_bytes)} more while a step runs", flush=True)
    run_step, run_eval = runnable(step_program, mesh), runnable(eval_program, mesh)

    # ------------------------------------------------------------------ What it tells
    writer = MetricsWriter(folder, first_step)
    progress, watch = Progress(config.train.steps), Stopwatch()

    def evaluate(step: int, params) -> None:
        with watch.paused():
            sums = [run_eval(params, *map(to_devices, batch))
                    for batch in validation_batches]
            loss, targets = (sum(values) for values in zip(*jax.device_get(sums)))
        nats = float(loss / targets)
        bits_per_byte = nats / math.log(2) / store.validation.bytes_per_token
        writer.write(step, "eval", {"loss": nats, "bits_per_byte": bits_per_byte})
        progress.stay(step, f"validation loss {nats:.4f}, {bits_per_byte:.4f} bits per byte")

    tokens_per_step = batch_size * context_length
    chip = chips.chip(mesh.devices.flat[0].device_kind)
    flops_per_token = train_flops_per_token(model)
    told_step, told_seconds = first_step, 0.0

    def tell(step: int, values) -> None:
        nonlocal told_step, told_seconds
        values = {name: float(value) for name, value in jax.device_get(values).items()}
        seconds = watch.seconds()
        speed = (step - told_step) * tokens_per_step / (seconds - told_seconds)
        told_step, told_seconds = step, seconds
        values["tokens_per_second"] = speed
        if chip:
            values["mfu"] = speed * flops_per_token / (chip.flops * mesh.size)
        writer.write(step, "train", values)
        left = (config.train.steps - step) * seconds / (step - first_step)
        progress.update(step, f"loss {values['loss']:.4f}   {speed:,.0f} tokens/s"
                        + (f"   MFU {values['mfu']:.1%}" if chip else "")
                        + f"   {duration(left)} left")

    # ------------------------------------------------------------------ The loop
    def is_due(step: int, every: int) -> bool:
        return step >= config.train.steps or step % every == 0

    if first_step and is_due(first_step, config.train.eval_every) and not is_evaluated:
        evaluate(first_step, state.params)  # the run was stopped after saving, before evaluating
    unread = None  # the metrics of a step are read only when the next one is under way
    for step, tokens in zip(range(first_step + 1, config.train.steps + 1),
                            batches.prefetched(train_batches, first_step)):
        state, values = run_step(state, to_devices(tokens))
        if unread:
            tell(*unread)
        unread = (step, values) if step % config.train.log_every == 0 else None
        saves = is_due(step, config.train.checkpoint_every)
        evaluates = is_due(step, config.train.eval_every)
        if unread and (saves or evaluates):
            tell(*unread)
            unread = None
        if saves:
            checkpoint.save(checkpoints, step, state)
        if evaluates:
            evaluate(step, state.params)
    checkpoints.close()
    writer.close()
    conclude(folder)


def find_or_make(config: ConfigDict):
    """The token store of a config. Process 0 makes it where there is none; the others then find it, or
    make the same one again if they do not see process 0's files."""
    processes.first(lambda: data.find_or_make(config.data))
    return data.find_or_make(config.data)


def where_it_left_off(folder: Path, checkpoints) -> tuple[int, bool]:
    """The step of the newest checkpoint, 0 if there is none, and whether that one was evaluated."""
    step = checkpoints.latest_step() or 0
    return step, any(line["split"] == "eval" and line["step"] == step
                     for line in read_lines(folder / METRICS_FILE))


def conclude(folder: Path) -> None:
    """The last words of a run: a text of its own (if one process sees the whole model), how good it is."""
    if not processes.is_first():
        return
    if jax.process_count() == 1:
        print("\nA text of its own:\n")
        for piece in inference.load(folder).stream(max_new_tokens=150, temperature=0.7):
            print(piece, end="", flush=True)
        print("\n")
    last = [line for line in read_lines(folder / METRICS_FILE) if line["split"] == "eval"][-1]
    print(f"\nStep {last['step']}: validation loss {last['loss']:.4f}, {last['bits_per_byte']:.4f} "
          f"bits per byte. More text:\n"
          f'  python -m smallgpt_jax.generate --workdir={folder} --prompt="..."')


def check(config: ConfigDict, mesh) -> None:
    """Raises UserError for a `train` group that cannot be run on this mesh."""
    train = config.train
    for field in ("steps", "batch_size", "microbatches", "loss_chunks", "log_every", "eval_every",
                  "checkpoint_every", "keep_checkpoints"):
        if train[field] < 1:
            raise UserError(f"config.train.{field}={train[field]}: must be at least 1")
    for field in ("eval_steps", "seed"):
        if train[field] < 0:
            raise UserError(f"config.train.{field}={train[field]}: must not be negative")
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
    if config.data.packing != "concat":
        raise UserError(f"config.data.packing={config.data.packing!r}: must be 'concat'")


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


def compile_train_step(setup: Setup, config: ConfigDict) -> jax.stages.Compiled:
    """(state, tokens) → (state, metrics); it takes over the memory of its state."""
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
        return jitted.lower(abstract_state(setup, config), tokens_shape(setup, config)).compile()


def compile_eval_step(setup: Setup, config: ConfigDict) -> jax.stages.Compiled:
    """(params, tokens, which rows count) → (summed loss, number of targets)."""
    evaluation = functools.partial(
        eval_step, model=setup.model, loss_chunks=config.train.loss_chunks)
    counts = jax.ShapeDtypeStruct(
        (config.train.batch_size,), bool, sharding=sharding.batch_sharding(setup.mesh))
    jitted = jax.jit(evaluation, out_shardings=sharding.replicated(setup.mesh))
    with sharding.context(setup.mesh):
        return jitted.lower(
            abstract_state(setup, config).params, tokens_shape(setup, config), counts).compile()


def tokens_shape(setup: Setup, config: ConfigDict) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((config.train.batch_size, config.model.context_length + 1), "int32",
                                sharding=sharding.batch_sharding(setup.mesh))


def runnable(program: jax.stages.Compiled, mesh):
    """The program as it can be called again and again. Simulated CPU devices share a few threads:
    programs in flight together can each hold some of those that the other's collectives wait for. So
    there each call waits for its end."""
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        return lambda *arguments: jax.block_until_ready(program(*arguments))
    return program


def describe(setup: Setup, config: ConfigDict, first_step: int) -> str:
    """What is trained on what, and what of it is not as one might expect."""
    model, mesh = setup.model, setup.mesh
    device = mesh.devices.flat[0].device_kind
    lines = [f"{model.config.architecture}, {models.num_parameters(model):,} parameters, on {mesh.size} "
             f"{device} device{'s' if mesh.size > 1 else ''}"
             + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else "")
             + f": {config.train.steps} steps of {config.train.batch_size} × "
             f"{model.config.context_length} tokens"
             + (f", {first_step} of them done" if first_step else "")]
    return "\n".join([*lines, *exceptions(setup)])


def exceptions(setup: Setup) -> list[str]:
    """A line for each dimension that the mesh does not divide, and for each attention that is not
    computed as asked for."""
    boxed = models.abstract_params(setup.model)
    undivided = sharding.undivided(setup.mesh, boxed)
    fallbacks = dict.fromkeys(
        f"attention with heads of width {layers.head_width} is plain XLA's: {layers.why}"
        for layers in memory.attention_layers(setup.model, setup.mesh) if layers.why)
    return [*undivided, *fallbacks]
