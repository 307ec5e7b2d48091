"""Tests of `diagnose` and of models without some of their blocks."""

import json
from unittest import mock

import jax
import numpy as np
import pytest
import run_helpers
from conftest import RENDER, build, call, forward, init, load_config, save_run
from float64_model import plain_attention, plain_layers, plain_logits, plain_mlp, plain_norm
from scipy.special import logsumexp

from smallgpt_jax import models
from smallgpt_jax.comparison import comparing
from smallgpt_jax.diagnosis import diagnosis, observation
from smallgpt_jax.diagnosis.losses import token_losses
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.inference.single_blocks import num_blocks, without_blocks
from smallgpt_jax.models.context import Context
from smallgpt_jax.run import plotting

SMALL = dict(
    vocab_size=40, context_length=12, d_model=16, num_heads=2, num_layers=2, dtype="float32"
)
WINDOWS = np.random.default_rng(0).integers(0, 40, (3, 13)).astype(np.int32)
MODELS = {
    "gpt": dict(num_heads=4, num_kv_heads=2, position="rope", attention_windows=(4, 0)),
    "pgpt": {},
    "lgpt": dict(blocks_per_stage=1),
}


def tiny(architecture: str, **fields):
    model = build(architecture, **SMALL | fields)
    return model, init(model)


def without_output(params, block: int):
    """Returns parameters with which a block adds 0: float64 models have no other way to leave it
    out.
    """

    def cut(path, x):
        names = [key.key for key in path]
        if not {"out", "down"} & set(names):
            return x
        if names[1] == "paths":
            return x.at[block].set(0)  # one block per path
        if names[1].startswith("stage"):
            return x * (names[1] != f"stage_{block}")
        return x * (names[2] != str(block))

    return jax.tree_util.tree_map_with_path(cut, jax.tree.map(jax.numpy.asarray, params))


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.slow
def test_losses_without_a_block(architecture):
    """They are those of float64 formulas in which the block adds 0; decoding gives the same logits
    as the formulas.
    """
    model, params = tiny(architecture, **MODELS[architecture])
    count = num_blocks(model)
    assert count == model.config.num_layers
    for block in (None, count - 1):
        changed = params if block is None else without_output(params, block)
        logits = np.stack([plain_logits(model.config, changed, window[:-1]) for window in WINDOWS])
        expected = (
            logsumexp(logits, axis=-1) - np.take_along_axis(logits, WINDOWS[:, 1:, None], 2)[..., 0]
        )
        np.testing.assert_allclose(
            token_losses(model, {"params": params}, WINDOWS, np.arange(count) != block),
            expected,
            atol=2e-5,
        )
    shorter = without_blocks(model, [str(count - 1)])
    np.testing.assert_allclose(forward(shorter, params, WINDOWS[:, :-1]), logits, atol=2e-5)
    with pytest.raises(UserError, match=f"no block {count}; choose from 0 to {count - 1}"):
        without_blocks(model, ["0", str(count)])
    if architecture != "gpt":  # the others only take longer
        return
    ((_, score),) = Scorer(shorter, params).score([TokenSequence(WINDOWS[0].tolist(), 12)])
    assert score.log_likelihood == pytest.approx(-expected[0].sum(), rel=1e-5)
    session = decoder.DecodeSession(
        decoder.Decoder(shorter, 40), layout.pack(shorter, params), [WINDOWS[0, :5].tolist()]
    )
    for length in (5, 6):
        session.ids = [WINDOWS[0, :length].tolist()]
        _, found = session.sample_with_logits(Sampling(temperature=None))
        np.testing.assert_allclose(found[0], logits[0, length - 1], atol=2e-5)


@pytest.mark.slow
def test_blocks_of_a_prefix_language_model():
    """The model without its last block is that of the blocks before it, with the same prefix."""
    models_of = [
        build("gpt", num_layers=layers, context_length=20, attention_mask="prefix")
        for layers in (3, 2)
    ]
    assert num_blocks(models_of[0]) == 3
    params = init(models_of[0])
    blocks = jax.tree.map(lambda x: x[:2], params["trunk"]["blocks"])
    before = {**params, "trunk": {**params["trunk"], "blocks": blocks}}
    tokens, prefix = np.arange(20)[None] % 7, np.arange(20)[None] < 8

    def logits(model, params):
        return jax.jit(
            lambda params: model.apply({"params": params}, tokens, Context(prefix_BxT=prefix))
        )(params)

    found = logits(without_blocks(models_of[0], ["2"]), params)
    np.testing.assert_allclose(found, logits(models_of[1], before), atol=1e-5)
    assert np.abs(found - forward(models_of[1], before, tokens)).max() > 1e-2


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.slow
def test_streams_without_skips_and_mlps(position):
    model, params = tiny("gpt", norm_position=position)
    config, weights = model.config, jax.tree.map(np.float64, params)
    for parts in diagnosis.COLLAPSE.values():
        found = observation.observe_streams(model, {"params": params}, WINDOWS[0, :-1], parts)
        x = weights["token_embedding"][WINDOWS[0, :-1]] + weights["position_embedding"]
        for block, streams in zip(plain_layers(weights["trunk"]["blocks"]), found):
            for name, f in (
                (
                    "attention",
                    lambda h, b=block: plain_attention(config, b["attention"], h, 2, 12, None),
                ),
                ("mlp", lambda h, b=block: plain_mlp(config, b["mlp"], h)),
            ):
                if name == "mlp" and not parts.mlps:
                    continue
                if position == "pre":
                    x = parts.skips * x + f(plain_norm(config, block[f"{name}_norm"], x))
                else:
                    x = plain_norm(config, block[f"{name}_norm"], parts.skips * x + f(x))
            centred = x - x.mean(axis=0)
            ratio = np.sqrt(
                np.linalg.norm(centred, 1)
                * np.linalg.norm(centred, np.inf)
                / np.linalg.norm(x, 1)
                / np.linalg.norm(x, np.inf)
            )
            assert float(streams["residual"]) == pytest.approx(ratio, rel=1e-4)


@pytest.mark.slow
def test_an_untrained_deep_model_without_skips_collapses_by_half_per_block():
    """Initial attention is nearly uniform. The causal matrix with rows 1/t has the eigenvalues 1,
    1/2, 1/3, …, so the part that is not of rank one halves in each block, once only the second
    eigenvector is left of it.
    """
    found = diagnosis.measure_collapse(build("gpt", **SMALL), 0, 12, WINDOWS[:1])
    for name in ("without_skips", "attention_alone"):
        residual = np.array(found[name]["residual"])
        assert residual[-1] < 1e-2 and found[name]["token_similarity"][-1] > 0.9999
        np.testing.assert_allclose((residual[-1] / residual[6]) ** (1 / 5), 0.5, atol=0.05)
    assert found["whole"]["residual"][-1] > 0.5


@pytest.mark.slow
def test_chosen_experts_have_the_loads_of_training():
    model, params = tiny(
        "gpt", num_layers=1, mlp="moe", num_experts=4, experts_per_token=2, mlp_ratio=1.0
    )
    variables = {
        "params": params,
        "state": {"trunk": {"blocks": {"mlp": {"router": {"bias": np.zeros((1, 4))}}}}},
    }
    _, sown = jax.jit(lambda v, x: model.apply(v, x, mutable=["loads"]))(
        variables, WINDOWS[:1, :-1]
    )
    (loads,) = jax.tree.leaves(sown)
    chosen = observation.chosen_experts(model, variables, WINDOWS[0, :-1])
    assert [np.bincount(x.ravel(), minlength=4).tolist() for x in chosen] == loads.tolist()


@pytest.mark.slow
def test_the_command(text_file, tmp_path, monkeypatch):
    """Training's program is the same after a diagnosis."""

    def training_program() -> str:
        """Returns the loss in training, which a new function traces again."""
        model = build("gpt", **SMALL | {"num_layers": 1})

        def loss(params):
            return model.apply({"params": params}, WINDOWS[:, :-1], Context(train=True)).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(models.abstract_params(model)))

    before = training_program()
    config = load_config("pgpt", **run_helpers.SMALL, data__source=str(text_file))
    workdir = save_run(tmp_path / "run", config, init(models.build(**config.model)))
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat while some dog ran. " * 5)
    with mock.patch.object(plotting, "render", RENDER):
        done = call("diagnose", f"--workdir={workdir}", f"--text={text}", "--windows=3", "--deep=0")
    assert done.returncode == 0, done.stderr
    folder = workdir / "diagnosis"
    assert {path.name for path in folder.iterdir()} == {
        "diagnose.json",
        "depth.png",
        "losses.png",
        "attention.png",
    }
    content = json.loads((folder / "diagnose.json").read_text())
    assert content["windows"] == {str(text): 3} and content["paths"] == 2
    losses = content["trained"]["losses"]
    assert len(losses["by_position"]) == 32 and np.mean(losses["by_position"]) == pytest.approx(
        losses["loss"]
    )
    assert losses["after_blocks"][-1]["loss"] == pytest.approx(losses["loss"], rel=1e-6)
    assert len(losses["without_path"]) == 2
    assert losses["without_best_block_per_window"] <= min(
        x["loss"] for x in losses["without_block"]
    )
    assert f"loss {losses['loss']:.4f}" in done.stdout
    assert training_program() == before
    monkeypatch.setattr(comparing, "WINDOWS", 3)  # of the programs above
    # In place of the diagnosis of another text, which no comparison reports.
    comparing.diagnose_run(workdir)
    written = (folder / "diagnose.json").stat().st_mtime_ns
    observed = json.loads((folder / "diagnose.json").read_text())
    assert observed["windows"].keys() == {"validation"} and observed["step"] == 40
    comparing.diagnose_run(workdir)
    assert (folder / "diagnose.json").stat().st_mtime_ns == written
    compared = call("compare", f"--workdirs={workdir}", f"--output={tmp_path / 'report'}")
    assert compared.returncode == 0, compared.stderr
    assert (
        json.loads((tmp_path / "report/results.json").read_text())["runs"][0]["inside"]["loss"]
        == (observed["trained"]["losses"]["loss"])
    )
    assert "## What happens inside?" in (tmp_path / "report/report.md").read_text()
    assert (tmp_path / "report/inside.png").exists()
