"""Tests that run the examples of docs/your-own.md as printed, in a package outside the
repository.
"""

import importlib
import json
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, call, forward, init, load_config
from random_models import check_decoding
from run_helpers import assert_equal, start_from, train_three_steps

from configs.compare.base import differences
from smallgpt_jax import inference, models
from smallgpt_jax.comparison import recipe, run_reader
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.context import Context
from smallgpt_jax.planning.estimate import estimate
from smallgpt_jax.planning.table import format_plan
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import CHECKPOINT_FOLDER
from smallgpt_jax.run.workdir import initialize_workdir
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.trainer import train_and_evaluate

pytestmark = pytest.mark.slow
SIZES = dict(num_layers=2, d_model=16, num_heads=2)


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """Writes the files printed in docs/your-own.md and docs/comparison.md to a folder, and adds the
    folder to `sys.path`.
    """
    folder = tmp_path_factory.mktemp("own")
    pages = [ROOT / "docs" / name for name in ("your-own.md", "comparison.md")]
    page = "\n".join(path.read_text() for path in pages)
    for name, code in re.findall(r"```python\n# (my_models/\w+\.py)\n(.*?)```", page, re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("my_models")]:
        del sys.modules[name]


def own_config(architecture: str, **fields):
    return load_config(
        "gpt",
        model__architecture=architecture,
        **{f"model__{name}": size for name, size in SIZES.items()},
        **fields,
    )


def test_an_architecture_with_its_own_fields(text_file, tmp_path):
    """A model of the example architecture `Twice` can be trained on eight devices, decoded, counted
    and compared.
    """
    config = importlib.import_module("my_models.recipe").get_config("tiny")
    config.data.update(source=str(text_file), validation_fraction=0.2)
    config.model.update(**SIZES, passes=2)
    config.mesh.update(data=2, fsdp=2, tensor=2)
    config.train.update(steps=2, eval_every=2, eval_steps=1, checkpoint_every=2, log_every=1)
    differing = differences(config, load_config("gpt"))
    assert differing["model"].keys() >= {"architecture", "passes", "input_scale"}
    overrides = [
        f"--config.{group}.{field}={value}"
        for group, fields in differing.items()
        for field, value in fields.items()
    ]
    trained = call("main", "--config=gpt:tiny", f"--workdir={tmp_path}", *overrides)
    assert trained.returncode == 0, trained.stderr
    saved = json.loads((tmp_path / "config.json").read_text())["model"]
    assert {field: saved[field] for field in differing["model"]} == differing["model"]

    inference.load(tmp_path)  # compares decoding with the full forward pass
    run = run_reader.read_run("twice", tmp_path)
    # The FLOPs of both passes are counted.
    per_pass = 2 * 12 * 16**2 * 6 + 12 * 64 * 16 * 2
    assert run.flops_per_token == 2 * per_pass + 6 * 16 * config.model.vocab_size
    assert run.curve[-1].step == 2
    comparison = importlib.import_module("my_models.compare").get_config("1M")  # for 8 devices
    assert comparison.compare.names == "gpt,llama,twice"
    twice, llama = (recipe.resolve_run(comparison, name) for name in ("twice", "llama"))
    assert (twice.model.passes, twice.model.mlp, llama.model.mlp) == (2, "dense", "gated")
    # The recipes of a size have different steps; here, the budget decides.
    assert twice.train.steps == llama.train.steps == comparison.train.steps


def test_refuses_wrong_fields():
    with pytest.raises(UserError, match=r"config.model.passes=0: must be at least 1"):
        models.build(**{**own_config("my_models.twice:Twice").model, "passes": 0})
    with pytest.raises(UserError, match=r"config.model.passses=2: .* did you mean 'passes'"):
        models.build(**{**own_config("my_models.twice:Twice").model, "passses": 2})
    with pytest.raises(UserError, match=r"config.model.passes: .* needs a value"):
        models.build(**own_config("my_models.twice:Twice").model)
    flags = ["--config=gpt:tiny", "--config.model.architecture=my_models.twice:Twice"]
    for flag, message in (
        ("--config.model.pases=2", "no config field 'pases'; did you mean --config.model.passes?"),
        ("--config.model.passes=two", "--config.model.passes=two: expected an integer"),
    ):
        result = call("main", *flags, flag, "--workdir=unused")
        assert (result.returncode, result.stderr[: len(message) + 7]) == (2, f"error: {message}")


MEAN, RECURRENCE = "my_models.average:RunningMean", "my_models.recurrent:Recurrence"
LAYERS = {
    "model__mlp": "my_models.layers:Bilinear",
    "model__norm": "my_models.layers:DynamicTanh",
}


@pytest.mark.parametrize(
    "architecture, fields",
    [
        ("my_models.parallel_block:Parallel", {"model__mlp": "gated", "model__remat": "full"}),
        ("my_models.parallel_block:Parallel", {"model__mixers": (MEAN,)}),
        ("gpt", {"model__mixers": (MEAN,), "model__scan_layers": False, **LAYERS}),
        ("my_models.recurrent:Recurrent", {"model__mixers": (RECURRENCE,), "model__taps": 3}),
    ],
)
def test_own_blocks_and_mixers(architecture, fields):
    """Decoding matches the full forward pass, and documents in the same row do not affect each
    other.
    """
    model = models.build(**own_config(architecture, **fields).model)
    params = init(model)
    assert jax.tree.leaves(params["trunk"]["blocks"])[0].shape[0] == 2
    tokens = np.random.default_rng(0).integers(0, 257, (2, 64), np.int32)
    check_decoding(model, params, {}, tokens, forward(model, params, tokens))
    context = Context(segment_ids_BxT=np.repeat([[1, 2]], 32, axis=1).repeat(2, axis=0))
    # In the two batches, only the first document of each row differs. The outputs of the second
    # have equal bits.
    first, second = (
        jax.jit(model.apply)(
            {"params": params}, np.where(np.arange(64) < 32, other, tokens), context
        )
        for other in (tokens, (tokens + 100) % 257)
    )
    assert np.array_equal(first[:, 32:], second[:, 32:]) and not np.allclose(
        first[:, :32], second[:, :32]
    )


def test_a_recurrent_mixer(tmp_path):
    """The training step of the example `Recurrent` is compiled for two devices, planned, and compared
    with gpt.
    """
    config = own_config(
        "my_models.recurrent:Recurrent",
        model__mixers=(RECURRENCE,),
        model__position="none",
        data__separate_documents=True,
        mesh__tensor=2,
    )
    program = build_program(config, jax.devices()[:2])
    mixer = models.abstract_params(program.model)["trunk"]["blocks"]["mixer"]
    assert (mixer["memory"].axes, mixer["taps"].axes) == (
        ("layers", "mlp"),
        ("layers", "tap", "mlp"),
    )
    layers, width = SIZES["num_layers"], SIZES["d_model"]
    flops = 6 * (
        layers * 11 * width**2 + width * config.model.vocab_size
    )  # input, gate, output; 8·D² in the MLP
    result = estimate(program)
    assert result.flops_per_token == flops
    assert f"{flops:,.0f} FLOPs per token" in format_plan(program, result)
    comparison = importlib.import_module("configs.compare.base").comparison(
        load_config("gpt", train__steps=1000),
        {"gpt": {}, "own": {"model": config.model.to_dict()}},
        budget="flops",
    )
    steps = {
        run.name: run.config.train.steps
        for run in recipe.make_comparison(comparison, tmp_path).runs({})
    }
    gpt = 6 * (4 * 12 * 64**2 + 64 * 512) + 4 * 12 * 64 * 64
    assert steps == {"gpt": 1000, "own": round(1000 * gpt / flops)}


def test_own_losses_metrics_and_state(text_file, tmp_path):
    """The training step uses the loss, the metric and the state that the example `Calm` defines.
    The state is saved, restored, and read by other commands.

    Covers scanned layers without microbatches on one device, and unscanned layers with two
    microbatches on two devices.
    """
    rows = Batch(np.random.default_rng(0).integers(0, 257, (4, 65), np.int32))
    plain, found = (
        build_program(own_config("gpt", train__batch_size=4), jax.devices()[:1]).compiled_eval_step,
        [],
    )
    for scan, microbatches, devices in ((True, 1, 1), (False, 2, 2)):
        config = own_config(
            "my_models.calm:Calm",
            model__scan_layers=scan,
            model__remat="full",
            train__microbatches=microbatches,
            train__batch_size=4,
        )
        program = build_program(config, jax.devices()[:devices])
        # With small kernels, the loss that `Calm` adds is smaller than the rounding error of the
        # total loss.
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: 2 * x if path[-1].key == "kernel" else x, init(program.model)
        )
        state = start_from(program, params)
        same = {**state.params, "trunk": {"blocks": state.params["trunk"]["blocks"]["block"]}}
        nats, targets, *_ = plain(
            jax.device_get(same),
            {},
            rows._replace(
                loss_mask_BxT=np.ones((4, 64), bool), row_numbers_B=np.arange(4, dtype=np.uint32)
            ),
        )
        step = program.bind(config)
        state, metrics = step(state, rows)
        energies = np.asarray(state.model_state["trunk"]["blocks"]["energy"])
        assert energies.shape == (2,) and np.all(energies > 0)
        # Each layer has one mean square per microbatch. A layer's state `energy` is their sum. The
        # metric `mean_square` is the mean over layers and microbatches. `Calm` adds 1e-3 · layers ·
        # mean_square to the loss.
        assert float(metrics["mean_square"]) == pytest.approx(
            float(np.mean(energies)) / microbatches, rel=1e-5
        )
        np.testing.assert_allclose(
            metrics["mean_squares"]["trunk/blocks"], energies / microbatches, rtol=1e-5
        )
        own_loss = float(metrics["loss"]) - float(nats) / int(targets)
        assert own_loss == pytest.approx(1e-3 * 2 * float(metrics["mean_square"]), rel=0.01)
        found.append(float(metrics["loss"]))
        state, _ = step(state, rows)
        assert np.all(np.asarray(state.model_state["trunk"]["blocks"]["energy"]) > energies)
    assert found[0] == pytest.approx(found[1], rel=1e-6)

    config.data.source = str(text_file)
    initialize_workdir(tmp_path, Config.of(config), load_or_prepare(Config.of(config).data))
    state = start_from(program, params)
    _, states = train_three_steps(program, config, rows, tmp_path / CHECKPOINT_FOLDER, state)
    loaded = inference.load_trained(tmp_path)
    assert jax.tree.leaves(loaded.model_state)
    saved = states[2].params, states[2].model_state
    assert_equal(jax.device_get((loaded.params, loaded.model_state)), saved)
    inference.load(tmp_path)  # compares decoding with the full forward pass


class Counting(nn.Module):
    """Sums its inputs in its state, where it may be changed."""

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        total = self.variable("state", "total", jnp.zeros, (), jnp.float32)
        if self.is_mutable_collection("state"):
            total.value += jnp.sum(x_BxTxD)
        return x_BxTxD


def test_a_state_that_only_some_calls_change_is_that_of_all_rows():
    """On two devices as on one, with two microbatches; nothing is sown, and there is no dropout."""
    rows = Batch(np.random.default_rng(0).integers(0, 257, (8, 65), np.int32))
    totals = []
    for devices in (1, 2):
        config = own_config(f"{__name__}:Counting", train__microbatches=2, train__batch_size=8)
        program = build_program(config, jax.devices()[:devices])
        state, _ = program.bind(config)(start_from(program, init(program.model)), rows)
        totals.append(
            [
                np.asarray(shard.data)
                for shard in jax.tree.leaves(state.model_state)[0].addressable_shards
            ]
        )
    np.testing.assert_allclose(totals[1], totals[0] * 2, rtol=1e-5)


def test_a_schedule_an_optimizer_and_an_objective(text_file, tmp_path, monkeypatch):
    """The logged rates follow the schedule's formula, and the terms of the objective are logged.
    The run is read, resumed and counted; workdirs of others do not import its module.
    """
    config = own_config(
        "gpt",
        data__source=str(text_file),
        optimizer__schedule="my_models.training:sawtooth",
        optimizer__name="my_models.training:sign",
        optimizer__learning_rate=0.01,
        optimizer__warmup_steps=0,
        optimizer__decay_steps=20,
        train__objective="my_models.training:calm",
        train__steps=2,
        train__log_every=1,
        train__checkpoint_every=2,
        train__eval_every=4,
    )
    train_and_evaluate(config, str(tmp_path))
    config.train.steps = 4
    train_and_evaluate(config, str(tmp_path))
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["split"] == "train"]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.01, 0.005, 0.01, 0.005])
    assert all(line["calm"] > 0 for line in lines)

    assert run_reader.read_run("calm", tmp_path).flops_per_token
    monkeypatch.delitem(sys.modules, "my_models.training")
    inference.load(tmp_path)
    for read in (run_reader.read_run, lambda _, folder: load_config("run", str(folder))):
        with pytest.raises(
            UserError, match=r"config.optimizer.name='my_models.training:sign' is not built in"
        ):
            read("calm", tmp_path)
    assert "my_models.training" not in sys.modules
    assert run_reader.read_run("calm", tmp_path, trust_custom_code=True).flops_per_token


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("optimizer__schedule", "my_models.training:saw", "has no 'saw'; expected package.module"),
        ("train__objective", "my_modls.training:calm", "no module 'my_modls'"),
        ("train__objective", "my_models.training:sawtooth", "with 2 arguments (train, model)"),
        ("optimizer__name", "my_models.training:sawtooth", "with 2 arguments (params, config)"),
        ("model__mlp", "my_models.layers:DynamicTanh", "3 arguments (self, x, context)"),
        ("model__norm", "my_models.training:sign", "must be a Linen module with a field config"),
    ],
)
def test_refuses_names_that_do_not_fit(field, value, message):
    with pytest.raises(
        UserError,
        match=rf"config.{field.replace('__', '.')}='{value}': .*{re.escape(message)}",
    ):
        build_program(own_config("gpt", **{field: value}))
