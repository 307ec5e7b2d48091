"""Trains the runs of a comparison that share a compiled step at the same time, in one program.

    python experiments/together.py --config=configs/compare/transition.py --output=runs/transition \
        --programs=9
    python -m smallgpt_jax.compare --config=configs/compare/transition.py --output=runs/transition

A GPU is idle for most of the step of a small model. Here, one program updates the models of several
seeds, orders and learning rates (vmap over the train step), and several programs run at a time, one
per name of the comparison. The second command reads the workdirs like its own; the losses differ by
rounding (on a CPU, by 1e-6 after 32 steps). Since no run has the device to itself, no speed is
logged. A run that diverges stops those that are trained with it. Finished runs are skipped. Grids
of learning rates, held-out sizes and seeds as needed are refused, because there the losses of some
runs decide which others follow.

On an H100 (2026-11-28, jax 0.11.2), nine programs at a time, under NVIDIA's MPS, trained 231 runs of
0.2M to 1.3M parameters in 462 s, 8.3e15 FLOPs, with the environment

    JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"

XLA's compiler aborted on several runs of Gated DeltaNet (hybrid, delta): "RET_CHECK failure …
transpose". With `compare`, one run per program, eleven of them at a time trained in 220 s.
"""

import contextlib
import functools
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict

sys.path.insert(0, str(Path(__file__).parents[1]))  # without an installation

from smallgpt_jax import cli
from smallgpt_jax.comparison.comparing import TrainedComparison
from smallgpt_jax.comparison.queue import describe, with_available_trunk
from smallgpt_jax.comparison.recipe import run_names
from smallgpt_jax.comparison.runs import PlannedRun
from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.optim.learning_rate import learning_rate_schedule
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training import messages
from smallgpt_jax.training.initial_state import restore_or_initialize
from smallgpt_jax.training.program import Program
from smallgpt_jax.training.step import Hyperparameters, train_step
from smallgpt_jax.training.trainer import Trainer, open_trainer

_CONFIG = cli.define_config()
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the comparison.", required=True)
_PROGRAMS = flags.DEFINE_integer(
    "programs", 1, "How many programs train at a time, each the runs of one name.", lower_bound=1
)
_CHUNK = 32  # steps that are dispatched at once


def main() -> None:
    if _PROGRAMS.value > 1:
        train_in_programs(run_names(_CONFIG.value))
    else:
        train_missing(_CONFIG.value, Path(_OUTPUT.value))


def train_missing(config: ConfigDict, output: Path) -> None:
    """Trains the runs of a comparison that are missing in `output`."""
    outcomes = TrainedComparison(config, output, (), "").outcomes
    comparison = outcomes.comparison
    if comparison.multiples or comparison.held_out or comparison.rounds:
        raise UserError("--config: has a grid, a held-out size or seeds as needed; use compare")
    missing = [run for run in comparison.runs({}) if outcomes.loss(run) is None]
    for run in missing:
        if run.folder.exists():
            raise UserError(f"{run.folder}: is unfinished; train on with compare, or remove it")
    for runs in groups(missing):
        print(f"\n{len(runs)} runs together: {'; '.join(map(describe, runs))}", flush=True)
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            train_together(
                [
                    stack.enter_context(
                        open_trainer(with_available_trunk(run), run.folder, outcomes.text)
                    )
                    for run in runs
                ]
            )
        print(f"{time.monotonic() - started:.0f} s", flush=True)


def train_in_programs(names: Sequence[str]) -> None:
    """Runs this command once per name of the comparison. The output goes to OUTPUT/NAME.log."""
    folder = Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)

    def train(name: str) -> int:
        # The reference stays, because budgets are those of its recipe.
        only = f"--config.compare.names={name}"
        command = [sys.executable, *sys.argv, "--programs=1", only]
        with open(folder / f"{safe_name(name)}.log", "w") as log:
            return subprocess.run(command, stdout=log, stderr=log).returncode

    failed = []
    with ThreadPoolExecutor(_PROGRAMS.value) as pool:
        for name, status in zip(names, pool.map(train, names)):
            if status:
                failed.append(name)
            print(f"{name}: {f'failed with status {status}' if status else 'trained'}", flush=True)
    if failed:
        raise UserError(f"{folder}: {', '.join(failed)} failed; the .log files say why")


def groups(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Returns the runs that can share a program, longest first: shorter ones may start from them."""
    found = defaultdict(list)
    for run in runs:
        train = run.config.train
        found[run.config.compiled_part(), train.steps, train.eval_every].append(run)
    return sorted(found.values(), key=lambda group: -group[0].horizon)


def train_together(trainers: Sequence[Trainer]) -> None:
    program, config = trainers[0].program, trainers[0].config.train
    state, first_step = initial_states(trainers)
    compilations = program.start_compilation()  # of evaluation, and for the memory of one run
    for trainer in trainers:
        trainer.logger = trainer.make_logger(first_step)
        trainer.clock.start_training()

    reported = {*range(config.eval_every, config.steps, config.eval_every), config.steps}
    reported |= {step for trainer in trainers for step in trainer.config.train.kept_steps}
    chunks = list(split(first_step, sorted(step for step in reported if step > first_step)))
    inputs_of_chunks = grain.MapDataset.source(chunks).map(Reader(trainers).read)
    advance, losses = advance_of(program, len(trainers)), []
    started = time.monotonic()
    with sharding.use_mesh(program.mesh):
        for steps, inputs in zip(chunks, read_ahead(inputs_of_chunks, 0, workers=2)):
            state, losses_KxS = advance(state, *inputs, len(steps))
            losses.append(losses_KxS[: len(steps)])
            if len(losses) > 1:
                losses[-2].block_until_ready()  # at most two chunks are on the device
            for trainer in trainers:
                trainer.clock.progress += 1  # for the watchdog
            if steps.stop in reported:
                report(trainers, steps.stop, state, np.concatenate(losses))
                losses = []
                speed = (steps.stop - first_step) / (time.monotonic() - started)
                print(f"step {steps.stop}: {speed:.0f} steps/s", flush=True)

    for compilation in compilations:
        compilation.result()
    memory = program.compiled_train_step.memory_analysis()
    for trainer, own_state in zip(trainers, unstack(state)):
        facts = messages.session_facts(program, trainer.pipeline, memory, first_step)
        append_session(trainer.spool.workdir, {**facts, "stack": len(trainers)})
        trainer.finish(own_state, config.steps)


def initial_states(trainers: Sequence[Trainer]) -> tuple[TrainState, int]:
    """Returns the stacked states of the runs, and their step."""
    states = [
        restore_or_initialize(t.program, t.checkpoints, t.config.train.seed) for t in trainers
    ]
    first_step, *others = sorted({int(state.step) for state in states})
    if others:
        raise UserError(f"runs that start from the steps {first_step} and {others[0]}; use compare")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), first_step


def unstack(state: TrainState) -> list[TrainState]:
    return [jax.tree.map(lambda leaf: leaf[i], state) for i in range(len(state.step))]


def split(first_step: int, ends: Sequence[int]) -> Iterator[range]:
    """Yields ranges of at most _CHUNK steps, of which each of `ends` ends one."""
    step = first_step
    for end in ends:
        while step < end:
            steps = range(step, min(step + _CHUNK, end))
            yield steps
            step = steps.stop


class Reader:
    """The inputs of chunks of steps, for all runs."""

    def __init__(self, trainers: Sequence[Trainer]):
        self.batches = [trainer.pipeline.train_batches for trainer in trainers]
        self.rates_SxN = np.stack([learning_rates(trainer) for trainer in trainers])
        self.seeds_S = np.uint32([trainer.config.train.seed for trainer in trainers])
        self.decays_S = np.float32([trainer.config.optimizer.weight_decay for trainer in trainers])

    def read(self, steps: range) -> tuple[np.ndarray, Hyperparameters]:
        """Returns tokens and hyperparameters, padded to _CHUNK steps."""
        batches = [[batches[step] for batches in self.batches] for step in steps]
        if any(field is not None for field in batches[0][0][1:]):
            raise ValueError("only texts without masks are supported")
        tokens_KxSxBxT1 = np.int32([[one.tokens_BxT1 for one in of_step] for of_step in batches])
        rates_KxS = self.rates_SxN.T[steps.start : steps.stop]
        shape = (_CHUNK, len(self.batches))
        return _padded(tokens_KxSxBxT1), Hyperparameters(
            np.broadcast_to(self.seeds_S, shape),
            _padded(rates_KxS),
            np.broadcast_to(self.decays_S, shape),
        )


def _padded(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, np.zeros((_CHUNK - len(array), *array.shape[1:]), array.dtype)])


def learning_rates(trainer: Trainer) -> np.ndarray:
    schedule = learning_rate_schedule(trainer.config.optimizer)
    return np.float32(jax.vmap(schedule)(jnp.arange(trainer.config.train.steps)))


@functools.cache
def advance_of(program: Program, num_runs: int) -> Callable:
    """Returns a function that runs the steps of a chunk."""

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state, tokens_KxSxBxT1, hyperparameters, num_steps):
        def update(i, carry):
            state, losses_KxS = carry
            state, metrics = jax.vmap(functools.partial(train_step, program))(
                state, Batch(tokens_KxSxBxT1[i]), jax.tree.map(lambda x: x[i], hyperparameters)
            )
            losses_S = jnp.where(metrics["is_finite"], metrics["loss"], jnp.nan)
            return state, losses_KxS.at[i].set(losses_S)

        return jax.lax.fori_loop(0, num_steps, update, (state, jnp.zeros((_CHUNK, num_runs))))

    return advance


def report(
    trainers: Sequence[Trainer], step: int, state: TrainState, losses_NxS: np.ndarray
) -> None:
    """Logs the losses of the steps since the last report; saves and evaluates where it is due."""
    for trainer, own_state, losses_N in zip(trainers, unstack(state), losses_NxS.T):
        if not np.isfinite(losses_N).all():
            raise UserError(f"{trainer.spool.workdir}: diverged before step {step}")
        losses = {"loss": float(losses_N[-1]), "loss_mean": float(losses_N.mean())}
        trainer.logger.writer.write(step, "train", losses)
        config = trainer.config.train
        if step in config.kept_steps or step == config.steps:
            trainer.checkpoints.save(step, own_state)
        if config.evaluates(step):
            trainer.log_validation_loss(step, own_state)


if __name__ == "__main__":
    cli.run(main)
