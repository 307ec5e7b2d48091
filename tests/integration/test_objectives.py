"""Tests of training objectives other than the next token: drawn examples, and terms with parameters of their own."""

import dataclasses
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import build, call, forward, init, load_config
from run_helpers import SMALL, assert_equal, config_for, losses_in, read_untimed_metrics, state_of

from smallgpt_jax import inference
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.layers import normal
from smallgpt_jax.ops.cross_entropy import cross_entropy
from smallgpt_jax.run import workdir
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.training import objectives
from smallgpt_jax.training.objectives import Examples, Objective, Term
from smallgpt_jax.training.program import build_program
from smallgpt_jax.training.step import eval_step
from smallgpt_jax.training.train import train


class AheadHead(nn.Module):
    """Maps the input of the output head to one with which the same output head predicts a later token."""

    @nn.compact
    def __call__(self, x_BxTxW):
        width = x_BxTxW.shape[-1]
        kernel = self.param("kernel", normal(0.1, "embed", "mlp"), (width, width))
        bias = self.param("bias", nn.initializers.ones, (width,))  # without axis names
        return x_BxTxW @ kernel.astype(x_BxTxW.dtype) + bias.astype(x_BxTxW.dtype)[None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoAhead(Term):
    """The loss of the token after the next one, predicted by an `AheadHead`."""

    width: int

    def init(self, key):
        return AheadHead().init(key, jnp.zeros((1, 1, self.width)))["params"]

    def __call__(self, outputs, variables, examples, weights_BxT):
        x_BxTxW = AheadHead().apply({"params": variables}, outputs.x_BxTxW)
        targets_BxT = jnp.roll(examples.targets_BxT, -1, axis=1)
        return cross_entropy(x_BxTxW, outputs.head_VxW, targets_BxT, weights_BxT.at[:, -1].set(0), 1)


def random_prefixes(batch, key) -> Examples:
    """Draws a bidirectional prefix per row, whose targets are not in the loss mask."""
    rows, time = len(batch.tokens_BxT1), batch.tokens_BxT1.shape[1] - 1
    lengths_B = jax.random.randint(key, (rows,), 0, time)
    mask_BxT = jnp.arange(time)[None] >= lengths_B[:, None]
    if batch.loss_mask_BxT is not None:
        mask_BxT &= batch.loss_mask_BxT
    return Examples(batch._replace(loss_mask_BxT=mask_BxT), lengths_B)


@pytest.fixture(autouse=True)
def own_objectives(monkeypatch):
    """Registers "two_ahead" and "prefix", as a contributor would in the table."""
    monkeypatch.setitem(objectives.OBJECTIVES, "two_ahead", lambda train, model: Objective(
        train.loss_chunks, train.z_loss, terms={"two_ahead": TwoAhead(weight=0.5, width=model.config.output_width)}))
    monkeypatch.setitem(objectives.OBJECTIVES, "prefix", lambda train, model: Objective(
        train.loss_chunks, examples=random_prefixes))


BATCH = Batch(np.random.default_rng(0).integers(0, 257, (16, 33), np.int32))
MESH = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)


def first_steps(devices, **fields):
    """Returns the program, and the state and the metrics of three steps on one batch."""
    config = load_config("gpt", **{**SMALL, "train__batch_size": 16, "optimizer__warmup_steps": 0, **fields})
    program = build_program(config, jax.devices()[:devices])
    state = program.initial_state()
    state = state._replace(params=jax.device_put(init(program.model), program.shardings.params))
    step = program.bind(program.compile_train_step())
    batch = jax.device_put(BATCH, sharding.batch_sharding(program.mesh))
    found = []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    return program, jax.device_get(state), found


@pytest.mark.slow
def test_a_head_trains_equally_on_one_and_eight_devices():
    fields = dict(train__objective="two_ahead", train__microbatches=2)
    one, state, expected = first_steps(1, **fields)
    eight, sharded, found = first_steps(8, **fields, **MESH)
    for metric in ("loss", "two_ahead", "grad_norm"):
        assert [line[metric] for line in found] == pytest.approx([line[metric] for line in expected], rel=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-4), sharded.heads, state.heads)
    assert eight.shardings.heads["two_ahead"]["kernel"].spec == jax.sharding.PartitionSpec("fsdp", "tensor")

    # The first step, computed with NumPy's logits.
    heads, params = jax.device_get(one.initial_state().heads), jax.device_get(init(one.model))
    assert not np.allclose(state.heads["two_ahead"]["kernel"], heads["two_ahead"]["kernel"], atol=1e-4)
    inputs, targets = BATCH.tokens_BxT1[:, :-1], BATCH.tokens_BxT1[:, 1:]
    x = np.float64(one.model.apply({"params": params}, inputs, method="hidden"))

    def mean_loss(x, targets):
        log_p = np.asarray(jax.nn.log_softmax(x @ np.float64(params["head"]).T))
        return -np.take_along_axis(log_p, targets[..., None], 2).sum() / (16 * 32)

    ahead = mean_loss((x @ heads["two_ahead"]["kernel"] + heads["two_ahead"]["bias"])[:, :-1], targets[:, 1:])
    assert expected[0]["two_ahead"] == pytest.approx(ahead, rel=1e-5)
    assert expected[0]["loss"] == pytest.approx(mean_loss(x, targets) + 0.5 * ahead, rel=1e-5)


@pytest.mark.slow
def test_resumption_is_exact_and_other_commands_ignore_the_head(text_file, tmp_path, capsys):
    """Muon updates the head's matrix, and AdamW its bias."""
    config, folder = config_for(text_file, **SMALL, train__objective="two_ahead", optimizer__name="muon",
                                model__dropout=0.1), tmp_path / "run"

    def heads():
        with ocp.CheckpointManager(folder / "checkpoints") as checkpoints:
            return checkpoints.restore(40, args=ocp.args.Composite(heads=ocp.args.StandardRestore()))["heads"]

    train(config, str(folder))
    before, head, lines = state_of(folder, 40), heads(), read_untimed_metrics(folder)
    assert losses_in(folder, metric="two_ahead")[40] < losses_in(folder, metric="two_ahead")[10]
    shutil.rmtree(folder / "checkpoints" / "40")
    train(config, str(folder))
    assert ", 20 done" in capsys.readouterr().out
    assert_equal(state_of(folder, 40), before)
    assert_equal(heads(), head)
    assert read_untimed_metrics(folder) == lines
    config.train.objective = "causal"
    with pytest.raises(UserError, match=r"train\.objective was 'two_ahead', now 'causal'"):
        train(config, str(folder))

    trained = inference.load_trained(folder)
    assert "two_ahead" not in trained.params
    result = call("generate", f"--workdir={folder}", "--prompt=the ", "--max_new_tokens=4")
    assert result.returncode == 0, result.stderr
    result = call("convert", "--to=hf", f"--workdir={folder}", f"--output={tmp_path / 'out'}")
    assert result.returncode == 0, result.stderr
    from safetensors.numpy import load_file
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "ahead" in name]
    assert losses_in(folder, "eval")[40] < losses_in(folder)[40]  # without the head's loss


@pytest.mark.slow
def test_imported_models_get_initial_heads(tmp_path):
    """The checkpoint of an imported model has no heads."""
    program = build_program(load_config("gpt", **SMALL, train__objective="two_ahead"), jax.devices()[:1])
    params = init(program.model)
    workdir.write_imported(tmp_path / "run", program.model, params, {}, TokenizerSource("bytes").make(), {})
    state = program.restore_or_initialize(Checkpoints(tmp_path / "run" / workdir.CHECKPOINT_FOLDER))
    assert_equal(state.params, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state.heads, program.initial_state().heads)
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state)


@pytest.mark.slow
def test_drawn_examples():
    """The examples of a step do not depend on microbatches and mesh. The loss is that of a prefix language model."""
    program, _, expected = first_steps(1, train__objective="prefix")
    lengths = []
    for step in range(3):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(program.config.train.seed), step), 2**32 - 1)
        lengths.append(np.asarray(random_prefixes(BATCH, key).prefix_lengths_B))
    assert not np.array_equal(*lengths[:2])
    inputs, targets = BATCH.tokens_BxT1[:, :-1], BATCH.tokens_BxT1[:, 1:]
    logits = program.model.apply(
        {"params": init(program.model)}, inputs, Context(prefix_lengths_B=jnp.asarray(lengths[0])))
    losses = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], 2)[..., 0]
    mask = np.arange(32) >= lengths[0][:, None]
    assert expected[0]["loss"] == pytest.approx(losses[mask].mean(), rel=1e-5)
    for devices, fields in ((1, dict(train__microbatches=4)), (8, dict(train__microbatches=2, **MESH))):
        _, _, found = first_steps(devices, train__objective="prefix", **fields)
        assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-4)


def test_validation_uses_the_examples_but_no_terms():
    """Validation of an objective that shifts the targets by one more token, and has a term that cannot be computed."""
    def later(batch, key):
        mask_BxT = batch.loss_mask_BxT & (jnp.arange(batch.loss_mask_BxT.shape[1]) < 15)[None]
        return Examples(batch._replace(
            targets_BxT=jnp.roll(batch.tokens_BxT1, -2, axis=1)[:, :-1], loss_mask_BxT=mask_BxT))

    model = build("gpt", num_layers=1, d_model=16, context_length=16)
    params, tokens = init(model), BATCH.tokens_BxT1[:4, :17]
    batch = Batch(tokens, None, np.tile([[True], [False], [True], [True]], (1, 16)))
    objective = Objective(2, z_loss=1.0, examples=later, terms={"term": Term(weight=1.0)})
    total, targets = eval_step(params, {}, batch, model=model, objective=objective, microbatches=2)
    log_p = np.asarray(jax.nn.log_softmax(forward(model, params, tokens[:, :-1])))[[0, 2, 3], :15]
    assert targets == 3 * 15
    assert float(total) == pytest.approx(
        -np.take_along_axis(log_p, tokens[[0, 2, 3], 2:, None], 2).sum(), rel=1e-5)


def test_unknown_objectives_are_refused():
    with pytest.raises(UserError, match=r"config\.train\.objective='casual': must be one of causal, .*mean 'causal'\?"):
        build_program(load_config("gpt", **SMALL, train__objective="casual"))
