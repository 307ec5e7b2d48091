"""Training, from a config to a finished run: the whole story, top to bottom."""

import functools
import math
import time
from pathlib import Path

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from smallgpt_jax import checkpoint, data, inference, models, sharding
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.data import batches
from smallgpt_jax.errors import UserError
from smallgpt_jax.metrics import (
    METRICS_FILE,
    MetricsWriter,
    Progress,
    Stopwatch,
    duration,
    peak_flops,
    read_lines,
)
from smallgpt_jax.optimizer import learning_rate_schedule, make_optimizer
from smallgpt_jax.step import TrainState, eval_step, init_state, train_step


def train(config: ConfigDict, workdir: str) -> None:
    """Trains the model of `config` in `workdir`, from where the workdir left off.

    Raises UserError, before it writes anything, for what cannot be trained.
    """
    # ------------------------------------------------------------------ What is asked for
    folder = Path(workdir).expanduser()
    run_folder.check(folder, config)
    model = models.build(**config.model)
    mesh = sharding.make_mesh(**config.mesh)
    check(config, mesh)
    boxed_params = models.abstract_params(model)
    optimizer = make_optimizer(boxed_params, **config.optimizer)

    # ------------------------------------------------------------------ Text
    store = data.find_or_make(config.data)
    if store.tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"config.model.vocab_size={model.config.vocab_size}: the tokenizer "
                        f"{config.data.tokenizer!r} has {store.tokenizer.vocab_size:,} entries")
    rows_sharding = sharding.batch_sharding(mesh)
    shape = dict(context_length=model.config.context_length, batch_size=config.train.batch_size,
                 rows=sharding.local_rows(rows_sharding, config.train.batch_size))
    train_batches = batches.train_batches(store.train, seed=config.train.seed, **shape)
    validation_batches = batches.validation_batches(
        store.validation, limit=config.train.eval_steps, **shape)
    run_folder.begin(folder, config, store)

    # ------------------------------------------------------------------ State
    # What fills it: 1. the newest checkpoint; 2. if there is none, the initialisers, from the seed.
    checkpoints = checkpoint.open_checkpoints(
        folder / run_folder.CHECKPOINT_FOLDER, config.train.keep_checkpoints)
    first_step = checkpoints.latest_step() or 0
    is_evaluated = any(line["split"] == "eval" and line["step"] == first_step
                       for line in read_lines(folder / METRICS_FILE))
    print(describe(model, mesh, config, first_step), flush=True)
    if first_step >= config.train.steps and is_evaluated:
        conclude(folder)
        return
    shardings = state_shardings(mesh, boxed_params, optimizer)
    seed = config.train.seed
    if first_step:
        state = checkpoint.restore(
            checkpoints, first_step, abstract_state(model, optimizer, seed, shardings))
    else:
        state = initial_state(model, optimizer, seed, shardings)

    # ------------------------------------------------------------------ Compiled steps
    started = time.monotonic()
    run_step = compile_train_step(model, optimizer, config, mesh, shardings)
    run_eval = compile_eval_step(model, config, mesh, state.params)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)

    # ------------------------------------------------------------------ What it tells
    writer = MetricsWriter(folder, first_step)
    progress, watch = Progress(config.train.steps), Stopwatch()

    def evaluate(step: int, params) -> None:
        with watch.paused():
            sums = [run_eval(params, *(sharding.global_batch(rows_sharding, x) for x in batch))
                    for batch in validation_batches]
            loss, targets = (sum(values) for values in zip(*jax.device_get(sums)))
        nats = float(loss / targets)
        bits_per_byte = nats / math.log(2) / store.validation.bytes_per_token
        writer.write(step, "eval", {"loss": nats, "bits_per_byte": bits_per_byte})
        progress.stay(step, f"validation loss {nats:.4f}, {bits_per_byte:.4f} bits per byte")

    tokens_per_step = config.train.batch_size * model.config.context_length
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    flops_per_token = train_flops_per_token(model)
    told_step, told_seconds = first_step, 0.0

    def tell(step: int, values) -> None:
        nonlocal told_step, told_seconds
        values = {name: float(value) for name, value in jax.device_get(values).items()}
        seconds = watch.seconds()
        speed = (step - told_step) * tokens_per_step / (seconds - told_seconds)
        told_step, told_seconds = step, seconds
        values["tokens_per_second"] = speed
        if peak:
            values["mfu"] = speed * flops_per_token / (peak * mesh.size)
        writer.write(step, "train", values)
        left = (config.train.steps - step) * seconds / (step - first_step)
        progress.update(step, f"loss {values['loss']:.4f}   {speed:,.0f} tokens/s"
                        + (f"   MFU {values['mfu']:.1%}" if peak else "")
                        + f"   {duration(left)} left")

    # ------------------------------------------------------------------ The loop
    def is_due(step: int, every: int) -> bool:
        return step >= config.train.steps or step % every == 0

    if first_step and is_due(first_step, config.train.eval_every) and not is_evaluated:
        evaluate(first_step, state.params)  # the run was stopped after saving, before evaluating
    unread = None  # the metrics of a step are read only when the next one is under way
    for step, tokens in zip(range(first_step + 1, config.train.steps + 1),
                            batches.prefetched(train_batches, first_step)):
        state, values = run_step(state, sharding.global_batch(rows_sharding, tokens))
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


def conclude(folder: Path) -> None:
    """The last words of a run: a text of its own, and how good it is."""
    print("\nA text of its own:\n")
    for piece in inference.load(folder).stream(max_new_tokens=150, temperature=0.7):
        print(piece, end="", flush=True)
    last = [line for line in read_lines(folder / METRICS_FILE) if line["split"] == "eval"][-1]
    print(f"\n\nStep {last['step']}: validation loss {last['loss']:.4f}, {last['bits_per_byte']:.4f} "
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


def state_shardings(mesh, boxed_params, optimizer) -> TrainState:
    params = sharding.param_shardings(mesh, boxed_params)
    opt_state = sharding.optimizer_shardings(
        mesh, optimizer, nn.unbox(boxed_params), params)
    return TrainState(sharding.replicated(mesh), params, opt_state)


def abstract_state(model, optimizer, seed: int, shardings: TrainState) -> TrainState:
    """The shapes of a state, and where each part is to lie."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                        jax.eval_shape(lambda: init_state(model, optimizer, seed)), shardings)


def initial_state(model, optimizer, seed: int, shardings: TrainState) -> TrainState:
    """The state before the first update, made where it is to lie."""
    return jax.jit(lambda: init_state(model, optimizer, seed), out_shardings=shardings)()


def compile_train_step(model, optimizer, config: ConfigDict, mesh, shardings: TrainState):
    """(state, tokens) → (state, metrics), compiled; it takes over the memory of its state."""
    schedule = learning_rate_schedule(**{
        field: config.optimizer[field] for field in
        ("learning_rate", "warmup_steps", "decay_steps", "final_learning_rate")})
    step = functools.partial(
        train_step, model=model, optimizer=optimizer, schedule=schedule, seed=config.train.seed,
        microbatches=config.train.microbatches, loss_chunks=config.train.loss_chunks)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh)))
    state = abstract_state(model, optimizer, config.train.seed, shardings)
    return compiled(jitted, mesh, state, tokens_shape(config, mesh))


def compile_eval_step(model, config: ConfigDict, mesh, params):
    """(params, tokens, which rows count) → (summed loss, number of targets), compiled."""
    evaluation = functools.partial(eval_step, model=model, loss_chunks=config.train.loss_chunks)
    counts = jax.ShapeDtypeStruct(
        (config.train.batch_size,), bool, sharding=sharding.batch_sharding(mesh))
    jitted = jax.jit(evaluation, out_shardings=sharding.replicated(mesh))
    return compiled(jitted, mesh, params, tokens_shape(config, mesh), counts)


def tokens_shape(config: ConfigDict, mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((config.train.batch_size, config.model.context_length + 1), "int32",
                                sharding=sharding.batch_sharding(mesh))


def compiled(jitted, mesh, *arguments):
    """`jitted` for arguments of these shapes, which may lie anywhere on the mesh."""
    with sharding.context(mesh):
        program = jitted.lower(*arguments).compile()
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        return one_at_a_time(program)
    return program


def one_at_a_time(program):
    """Waits for each call to end. Simulated CPU devices share a few threads: programs in flight
    together can each hold some of those that the other's collectives wait for."""
    return lambda *arguments: jax.block_until_ready(program(*arguments))


def describe(model, mesh, config: ConfigDict, first_step: int) -> str:
    device = mesh.devices.flat[0].device_kind
    return (f"{model.config.architecture}, {models.num_parameters(model):,} parameters, on {mesh.size} "
            f"{device} device{'s' if mesh.size > 1 else ''}: {config.train.steps} steps of "
            f"{config.train.batch_size} × {model.config.context_length} tokens"
            + (f", {first_step} of them done" if first_step else ""))
