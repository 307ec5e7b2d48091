"""Configs of tiny runs, and what tests read from a workdir."""

import flax.linen as nn
import jax
import numpy as np
import orbax.checkpoint as ocp
from conftest import load_config

from smallgpt_jax import models
from smallgpt_jax.devices import sharding
from smallgpt_jax.models.context import EVALUATION
from smallgpt_jax.objectives.objective import Objective
from smallgpt_jax.run import metrics
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.config import Config
from smallgpt_jax.training.initial_state import restore_or_initialize
from smallgpt_jax.training.program import Program

SMALL = dict(
    model__d_model=16,
    model__num_heads=2,
    model__num_layers=2,
    model__context_length=32,
    train__loss_chunks=1,
)

# Muon with dropout, on three axes of a mesh. log_every does not divide checkpoint_every, so
# checkpoints contain losses that are not logged yet.
RESUMED = dict(
    **SMALL,
    optimizer__name="muon",
    model__dropout=0.1,
    mesh__data=2,
    mesh__fsdp=2,
    mesh__tensor=2,
    train__log_every=15,
)


def flags_of(fields: dict) -> list[str]:
    """Returns the flags that set fields: model__num_layers=2 is --config.model.num_layers=2."""
    return [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]


def config_for(text_file, architecture="gpt", **fields):
    """Returns the config of a tiny run on `text_file`, on all eight devices."""
    return load_config(architecture, **{"data__source": str(text_file), **fields})


def state_of(workdir, step):
    """Returns the parameters and the optimizer state saved at a step."""
    with ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
        tree = checkpoints.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(), opt_state=ocp.args.StandardRestore()
            ),
        )
    return jax.tree.map(np.asarray, (tree["params"], tree["opt_state"]))


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


def assert_bitwise_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other))
    )


def read_untimed_metrics(workdir) -> list[dict]:
    """Returns the lines of metrics.jsonl without times and speeds."""
    return [
        {
            name: value
            for name, value in line.items()
            if name not in ("time", "tokens_per_second") and not name.endswith("_seconds")
        }
        for line in metrics.read_lines(workdir / "metrics.jsonl")
    ]


def program_of(model, objective=None, optimizer=None, **train) -> Program:
    """Returns a program of these parts, for its pure functions; `train` are fields of that group."""
    config = Config.of(load_config("gpt")).replace(train={"microbatches": 1, **train})
    return Program(config, None, model, objective or Objective(), optimizer, None, None, None)


def draw_weights(mixer, x_BxTxD) -> dict:
    """Returns weights of a mixer of states, large enough to reach what is not linear. NumPy draws
    them, since compiling `mixer.init` takes seconds.
    """
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), x_BxTxD, EVALUATION)["params"]

    def draw(path, x):
        name = path[-1].key
        if name == "A_log":
            return np.log(rng.uniform(1, 16, x.shape)).astype(np.float32)
        center = {"dt_bias": -3.0, "scale": 1.0, "D": 1.0}.get(name, 0.0)
        return np.float32(center + 0.4 * rng.standard_normal(x.shape))

    return jax.tree_util.tree_map_with_path(draw, nn.unbox(shapes))


def start_from(program, params):
    """Returns a state before the first step, in which all but the parameters is zero: what the
    model's state and those of the usual optimizers start from. Compiling `program.initial_state`
    takes as long as compiling a training step.
    """
    zeros = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), program.abstract_state
    )
    # From NumPy's arrays, since JAX compiles the slices that it puts on several devices.
    return zeros._replace(params=jax.device_put(jax.device_get(params), program.shardings.params))


def train_three_steps(program, config, batch, folder, initial) -> tuple[list, list]:
    """Returns the metrics of three steps on one batch, and the states after 0 to 3 steps. With a
    folder, the state is saved there after two steps; restored, it continues bit for bit.
    """
    state = jax.device_put(jax.device_get(initial), program.shardings)
    step = program.bind(config)
    batch = jax.device_put(batch, sharding.batch_sharding(program.mesh))
    logged, states = [], [jax.device_get(state)]
    for number in range(1, 4):
        state, metrics = step(state, batch)
        logged.append(jax.device_get(metrics))
        states.append(jax.device_get(state))
        if folder and number == 2:
            checkpoints = Checkpoints(folder, keep=1)
            checkpoints.save(2, state)
            checkpoints.wait_until_finished()
    if folder:
        restored, _ = step(restore_or_initialize(program, checkpoints, config.train.seed), batch)
        checkpoints.close()
        assert_bitwise_equal(jax.device_get(restored), states[-1])
    return logged, states


def flip_a_bit(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def losses_in(workdir, split="train", metric="loss"):
    return {
        line["step"]: line[metric]
        for line in metrics.read_lines(workdir / "metrics.jsonl")
        if line["split"] == split
    }


class Twice(nn.Module):
    """A trunk of blocks that are applied twice."""

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        blocks = models.stack_blocks(
            models.layer_configs(self.config, self.config.num_layers), context
        )
        return blocks(blocks(x_BxTxD))
