"""Tests of training objectives other than the next token: drawn examples, and terms with parameters
of their own.
"""

import dataclasses
import functools
import json
from collections import Counter
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, call, forward, init, load_config, save_run
from data_helpers import random_store
from float64_model import plain_logits
from jax.tree_util import keystr
from run_helpers import (
    SMALL,
    assert_equal,
    config_for,
    program_of,
    start_from,
    train_three_steps,
)
from scipy.special import log_softmax

import smallgpt_jax
from smallgpt_jax import inference, models
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scores import read_scores
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.layers import normal
from smallgpt_jax.objectives.examples import Examples, continuations, row_keys, with_prefixes
from smallgpt_jax.objectives.objective import OBJECTIVES, Objective, Term, make_objective
from smallgpt_jax.ops.cross_entropy import cross_entropy
from smallgpt_jax.run import workdir
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.config import Config, TrainConfig
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.initial_state import init_state, restore_or_initialize
from smallgpt_jax.training.opening import open_pipeline
from smallgpt_jax.training.step import microbatch_loss
from smallgpt_jax.training.validation import eval_step, evaluate


class AheadHead(nn.Module):
    """Maps the input of the output head to one with which the same output head predicts a later
    token.
    """

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
        return cross_entropy(
            x_BxTxW, outputs.head_VxW, targets_BxT, weights_BxT.at[:, -1].set(0), 1
        )


BATCH = Batch(np.random.default_rng(0).integers(0, 257, (16, 33), np.int32))
TUNING = dict(data__format="completion", data__packing="best_fit", data__separate_documents=True)
SEED = 1337
MESH = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
WITH_HEADS = dict(
    **SMALL,
    train__objective="prefix",
    train__future_tokens=1,  # the head mtp
    train__seed=SEED,
    train__batch_size=16,
    optimizer__warmup_steps=0,
)


def with_two_ahead(prefix):
    """Returns the objective "prefix" with the term two_ahead, as a contributor would write it for
    the table.
    """

    def make(train, model):
        terms = {"two_ahead": TwoAhead(weight=0.5, width=model.config.output_width)}
        return dataclasses.replace(prefix(train, model), terms=terms)

    return make


@pytest.fixture(scope="module")
def programs():
    """Returns the config and the program on one device, and those on eight, where a step has two
    microbatches.
    """
    one = load_config("gpt", **WITH_HEADS)
    eight = load_config("gpt", **WITH_HEADS, train__microbatches=2, **MESH)
    # Not the fixture `monkeypatch`, with which other tests would compile the steps again.
    with mock.patch.dict(OBJECTIVES, prefix=with_two_ahead(OBJECTIVES["prefix"])):
        return [(one, build_program(one, jax.devices()[:1])), (eight, build_program(eight))]


def random_heads(program) -> dict:
    """Drawn by NumPy, since compiling `program.initial_state` takes seconds."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: np.float32(0.1 * rng.standard_normal(x.shape)), program.abstract_state.heads
    )


def random_state(program):
    state = start_from(program, init(program.model))
    return state._replace(heads=jax.device_put(random_heads(program), program.shardings.heads))


def first_steps(config, program):
    """Returns the state and the metrics of three steps on one batch."""
    state, step, lines = random_state(program), program.bind(config), []
    batch = jax.device_put(BATCH, sharding.batch_sharding(program.mesh))
    for _ in range(3):
        state, metrics = step(state, batch)
        lines.append({name: float(value) for name, value in metrics.items()})
    return jax.device_get(state), lines


@pytest.mark.slow
def test_heads_train_equally_on_one_and_eight_devices(programs):
    """The examples of a step depend neither on microbatches nor on the mesh. The loss is that of a
    prefix language model, with the terms.
    """
    one, eight = (program for _, program in programs)
    (state, expected), (sharded, found) = (first_steps(*program) for program in programs)
    for metric in ("loss", "two_ahead", "mtp", "grad_norm"):
        assert [line[metric] for line in found] == pytest.approx(
            [line[metric] for line in expected], rel=1e-4
        )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=3e-4), sharded.heads, state.heads
    )
    assert eight.shardings.heads["two_ahead"]["kernel"].spec == jax.sharding.PartitionSpec(
        "fsdp", "tensor"
    )
    assert expected[2]["mtp"] < expected[0]["mtp"]

    prefixes = []
    for step in range(2):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), step), 2**32 - 1)
        prefixes.append(np.asarray(continuations(BATCH, row_keys(key, BATCH)).prefix_BxT))
    assert not np.array_equal(*prefixes)

    # The first step, computed with NumPy's logits.
    heads, params = random_heads(one), jax.device_get(init(one.model))
    is_kept = jax.tree.map(lambda x, y: np.allclose(x, y, atol=1e-4), state.heads, heads)
    assert not any(jax.tree.leaves(is_kept))
    inputs, targets = BATCH.tokens_BxT1[:, :-1], BATCH.tokens_BxT1[:, 1:]
    hidden = jax.jit(functools.partial(one.model.apply, method="hidden"))
    x = np.float64(hidden({"params": params}, inputs, Context(prefix_BxT=prefixes[0])))
    mask = np.arange(1, 33) >= prefixes[0].sum(axis=1, keepdims=True)

    def mean_loss(x, targets, mask_of_targets):
        log_p = log_softmax(x @ np.float64(params["head"]).T, axis=-1)
        losses = -np.take_along_axis(log_p, targets[..., None], 2)[..., 0]
        return losses[mask_of_targets].sum() / mask.sum()

    x_ahead = x @ heads["two_ahead"]["kernel"] + heads["two_ahead"]["bias"]
    ahead = mean_loss(x_ahead[:, :-1], targets[:, 1:], mask[:, :-1])
    assert expected[0]["two_ahead"] == pytest.approx(ahead, rel=1e-5)
    assert expected[0]["loss"] == pytest.approx(
        mean_loss(x, targets, mask) + 0.5 * ahead + 0.3 * expected[0]["mtp"], rel=1e-5
    )


@pytest.mark.slow
def test_resumption_is_exact_and_other_commands_ignore_the_heads(programs, text_file, tmp_path):
    fields, program = programs[1]
    config, folder = Config.of(fields).replace(data={"source": str(text_file)}), tmp_path / "run"
    folder.mkdir()
    workdir.initialize_workdir(folder, config, load_or_prepare(config.data))
    initial = random_state(program)
    _, states = train_three_steps(
        program, config, BATCH, folder / workdir.CHECKPOINT_FOLDER, initial
    )
    trained = inference.load_trained(folder)
    assert_equal(jax.device_get(trained.params), states[2].params)
    workdir.check_workdir(folder, config)
    causal = config.replace(train={"objective": "causal"}, model={"attention_mask": "causal"})
    with pytest.raises(UserError, match=r"train\.objective was 'prefix', now 'causal'"):
        workdir.check_workdir(folder, causal)
    result = call("convert", "--to=hf", f"--workdir={folder}", f"--output={tmp_path / 'out'}")
    assert (
        result.returncode == 1
        and "attention_mask='prefix': no PyTorch code for the export; it" in result.stderr
    )


def test_muon_updates_the_matrices_of_heads_and_adamw_their_vectors():
    """Muon keeps one moment of each matrix, AdamW two of each vector."""
    fields = dict(train__future_tokens=2, train__future_head="ftp", optimizer__name="muon")
    state = build_program(load_config("gpt", **{**SMALL, **MESH, **fields})).abstract_state
    paths = [keystr(path) for path, _ in jax.tree.leaves_with_path(state.opt_state)]
    moments = Counter(path.partition("ftp']")[2] for path in paths if "ftp']" in path)
    assert moments == {path: 1 if "kernel" in path else 2 for path in moments}
    # The moments of queries, keys and values are separate.
    heads = {keystr(path) for path, _ in jax.tree.leaves_with_path(state.heads["ftp"])}
    assert {path.partition(".")[0] for path in moments} == heads


@pytest.mark.slow
def test_imported_models_get_initial_heads(programs, tmp_path):
    """The checkpoint of an imported model has no heads."""
    _, program = programs[0]
    params = init(program.model)
    tokenizer = TokenizerSource("bytes").make()
    imported = workdir.ImportedModel(program.model, params, tokenizer)
    workdir.write_imported(tmp_path / "run", imported, {})
    checkpoints = Checkpoints(tmp_path / "run" / workdir.CHECKPOINT_FOLDER)
    state = restore_or_initialize(program, checkpoints, SEED)
    assert_equal(state.params, params)
    heads = jax.jit(lambda: init_state(program, SEED).heads)()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state.heads, heads)
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state)


def test_validation_uses_the_examples_but_no_terms():
    """Validation of an objective that shifts the targets by one more token, and has a term that
    cannot be computed.
    """

    def later(batch, keys_B):
        mask_BxT = batch.loss_mask_BxT & (jnp.arange(batch.loss_mask_BxT.shape[1]) < 15)[None]
        return Examples(
            batch._replace(
                targets_BxT=jnp.roll(batch.tokens_BxT1, -2, axis=1)[:, :-1], loss_mask_BxT=mask_BxT
            )
        )

    model = build("gpt", num_layers=1, d_model=16, context_length=16)
    params, tokens = init(model), BATCH.tokens_BxT1[:4, :17]
    batch = Batch(tokens, None, np.tile([[True], [False], [True], [True]], (1, 16)))
    objective = Objective(2, z_loss=1.0, examples=later, terms={"term": Term(weight=1.0)})
    program = program_of(model, objective, microbatches=2)
    sums = jax.jit(functools.partial(eval_step, program))(params, {}, batch)
    log_p = np.asarray(jax.nn.log_softmax(forward(model, params, tokens[:, :-1])))[[0, 2, 3], :15]
    assert sums.counted == 3 * 15
    assert float(sums.loss) == pytest.approx(
        -np.take_along_axis(log_p, tokens[[0, 2, 3], 2:, None], 2).sum(), rel=1e-5
    )


@pytest.mark.slow
def test_with_prefixes_of_length_zero_the_loss_is_causal_bit_for_bit():
    model = build("gpt", num_layers=1, d_model=16, context_length=16)
    batch = Batch(BATCH.tokens_BxT1[:4, :17])

    @jax.jit
    def loss_and_gradients(params, examples):
        loss = microbatch_loss(program_of(model), jax.random.key(0), examples.num_targets)
        return jax.value_and_grad(lambda params: loss(params, {}, 0, examples)[0])(params)

    causal, prefixed, other = (
        loss_and_gradients(init(model), examples)
        for examples in (
            Examples(batch),
            with_prefixes(batch, np.zeros((4, 1), int)),
            with_prefixes(batch, np.full((4, 1), 5)),
        )
    )
    assert_equal(jax.device_get(prefixed), jax.device_get(causal))
    assert other[0] != causal[0]


def test_the_loss_of_masked_tokens():
    """The sum over the selected tokens. Attention sees later tokens, within its window."""
    model = build(
        "gpt",
        num_layers=2,
        d_model=16,
        context_length=16,
        attention_mask="bidirectional",
        attention_windows=(0, 4),
    )
    params, batch = init(model), Batch(BATCH.tokens_BxT1[:4, :17])
    objective = make_objective(TrainConfig(objective="masked", loss_chunks=1), model)
    sums = jax.jit(functools.partial(eval_step, program_of(model, objective)))(params, {}, batch)
    examples = jax.jit(lambda key: objective.examples(batch, row_keys(key, batch)))(
        jax.random.key(0)
    )
    logits = np.array(
        [plain_logits(model.config, params, row) for row in np.asarray(examples.inputs_BxT)]
    )
    log_p = np.take_along_axis(log_softmax(logits, axis=2), batch.tokens_BxT1[:, :-1, None], 2)[
        ..., 0
    ]
    is_selected = np.asarray(examples.selected_BxT)
    assert (sums.counted, sums.targets) == (is_selected.sum(), 64)
    assert float(sums.loss) == pytest.approx(-log_p[is_selected].sum(), rel=1e-5)


@pytest.mark.slow
def test_the_validation_loss_does_not_depend_on_the_batch_size(tmp_path):
    """Each row is drawn as if it were alone; the last batch of 64, in microbatches, is filled."""
    random_store(tmp_path / "store", [70] * 400)

    def evaluation(batch_size):
        config = load_config(
            "gpt",
            **SMALL,
            model__vocab_size=260,
            data__mixture=f"{tmp_path}/store=1",
            train__objective="masked",
            train__batch_size=batch_size,
            train__microbatches=max(1, batch_size // 16),
            train__eval_steps=0,
        )
        program = build_program(config, jax.devices()[:1])
        pipeline, params = open_pipeline(config, program), init(program.model)
        step = functools.partial(program.evaluate, params, {})
        return evaluate(step, map(pipeline.to_devices, pipeline.validation_batches))

    one, other = evaluation(1), evaluation(64)
    assert one.targets % (64 * 32) and one.targets > 64 * 32
    assert other.targets == one.targets
    assert other.loss == pytest.approx(one.loss, rel=1e-6)


@pytest.mark.slow
def test_the_loss_of_answers_after_prompts_is_that_of_evaluate():
    """Two examples in a row. `evaluate` scores them one by one, with the prompt as the prefix."""
    program = build_program(
        load_config("gpt", **{**SMALL, **TUNING, "train__objective": "prefix"}), jax.devices()[:1]
    )
    params, lengths, answer = init(program.model), (7, 20), 3
    texts = [BATCH.tokens_BxT1[row, : length + 1] for row, length in enumerate(lengths)]
    tokens, targets, counted = (
        np.zeros((1, 33), np.int32),
        np.zeros((1, 32), np.int32),
        np.zeros((1, 32), bool),
    )
    segments = np.repeat([1, 2, 0], [*lengths, 5])[None]
    for start, text in zip((0, 7), texts):
        end = start + len(text) - 1
        tokens[0, start:end], targets[0, start:end], counted[0, end - answer : end] = (
            text[:-1],
            text[1:],
            True,
        )
    evaluate_batch = jax.jit(
        functools.partial(eval_step, program_of(program.model, program.objective))
    )
    sums = evaluate_batch(params, {}, Batch(tokens, segments, counted, targets))
    scorer = Scorer(program.model, params, devices=jax.devices()[:1])
    scores = dict(scorer.score([TokenSequence(text.tolist(), answer) for text in texts]))
    assert sums.counted == 2 * answer
    assert float(sums.loss) == pytest.approx(
        -sum(score.log_likelihood for score in scores.values()), rel=1e-5
    )
    causal = Objective().examples(Batch(tokens, segments, counted, targets), None)
    assert causal.prefix_BxT is None  # without prefixes, the loss is another one
    other = jax.jit(functools.partial(eval_step, program_of(program.model)))(
        params, {}, causal.batch
    )
    assert abs(float(other.loss) - float(sums.loss)) > 1e-3


@pytest.mark.slow
def test_a_comparison_reads_what_evaluate_writes_about_the_whole_model(text_file, tmp_path):
    config = Config.of(
        config_for(text_file, **SMALL, model__vocab_size=260, train__objective="prefix")
    )
    folder = save_run(tmp_path / "run", config, init(models.LanguageModel(config.model)))
    rows = [
        {"prompt": f"question {number}", "completion": answer}
        for number, answer in enumerate((" a", " b", " b"))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for flags in (["--limit=1", "--label= a", "--label= b"], []):
        result = call(
            "evaluate",
            f"--workdir={folder}",
            f"--examples={tmp_path / 'a.jsonl'}",
            "--metrics=accuracy",
            *flags,
        )
        assert result.returncode == 0, result.stderr
    read = read_scores(folder / "evaluations", config.train.steps)
    accuracy = read[f"{tmp_path.name}/a.jsonl accuracy (3 examples)"]
    assert f"| accuracy | 3 | {accuracy:.4f} ±" in result.stdout
    # The function returns and writes the same.
    file = smallgpt_jax.ExampleFile(tmp_path / "a.jsonl", metrics=["accuracy"])
    found, table, path = smallgpt_jax.evaluate(folder, file)
    assert result.stdout == f"{table}\n{path}\n" and json.loads(path.read_text()) == found
    assert found["results"]["accuracy"]["mean"] == accuracy
    with pytest.raises(UserError, match="--metrics=acuracy: must be one of accuracy, exact_match"):
        smallgpt_jax.evaluate(folder, smallgpt_jax.ExampleFile("a.jsonl", metrics=["acuracy"]))


def masked_run(folder, text_file):
    config = Config.of(
        config_for(
            text_file,
            **SMALL,
            model__vocab_size=260,
            model__position="alibi",
            model__attention_windows=(5, 0),
            model__logit_softcap=2.0,
            train__objective="masked",
        )
    )
    model = models.LanguageModel(config.model)
    return model, save_run(folder, config, init(model))


@pytest.mark.slow
def test_a_masked_model_is_exported_as_an_encoder(text_file, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, folder = masked_run(tmp_path / "run", text_file)
    result = call("convert", "--to=hf", f"--workdir={folder}", f"--output={tmp_path / 'out'}")
    assert result.returncode == 0 and "SmallGPTForMaskedLM" in result.stdout, result.stderr
    encoder = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    ).eval()
    tokens = np.random.default_rng(0).integers(0, 260, (2, 32))
    expected = np.asarray(forward(model, init(model), tokens))
    with torch.no_grad():
        assert np.abs(encoder(torch.tensor(tokens)).logits.numpy() - expected).max() < 1e-5
        padded = torch.tensor(np.pad(tokens[:, :20], ((0, 0), (12, 0))))
        is_text = torch.arange(32)[None].repeat(2, 1) >= 12
        labels = torch.where(torch.arange(32)[None] == 15, padded, -100)
        found = encoder(padded, attention_mask=is_text.long(), labels=labels)
        expected = encoder(torch.tensor(tokens[:, :20])).logits.numpy()
    assert np.abs(found.logits[:, 12:].numpy() - expected).max() < 1e-5
    log_p = log_softmax(expected[:, 3], axis=1)[[0, 1], tokens[:, 3]]
    assert float(found.loss) == pytest.approx(-log_p.mean(), rel=1e-5)
    assert encoder.config.mask_token_id == 259

    result = call(
        "convert", "--from=hf", f"--input={tmp_path / 'out'}", f"--workdir={tmp_path / 'back'}"
    )
    assert result.returncode == 0, result.stderr
    for run in (folder, tmp_path / "back"):
        result = call("generate", f"--workdir={run}")
        assert (
            result.returncode == 1 and "predicts masked tokens, not the next one" in result.stderr
        )
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(train__objective="casual"),
            r"train\.objective='casual': must be one of causal, .*mean 'causal'\?",
        ),
        (
            dict(model__attention_mask="bidirectional"),
            "='bidirectional': does not belong to config.train.objective",
        ),
        (
            dict(train__objective="masked", model__mixers=("delta",)),
            "mixers=.delta.: does not see later tokens",
        ),
        (
            dict(train__objective="prefix", model__mixers=("attention", "mamba")),
            "use attention in all blocks, or another",
        ),
        (
            dict(train__objective="masked", train__mask_rate=1.0),
            "mask_rate=1.0: must be above 0 and below 1",
        ),
        (
            dict(
                train__objective="prefix", data__source="synthetic:copy", data__tokenizer="symbols"
            ),
            "with a probe",
        ),
        (
            dict(TUNING, train__objective="masked"),
            "must be 'causal' or 'prefix' with config.data.format='completion'",
        ),
        (
            dict(TUNING, train__objective="prefix", data__format="messages"),
            "objective='prefix': must be 'causal' with",
        ),
        (
            dict(TUNING, train__objective="prefix", data__separate_documents=False),
            "separate_documents=False: must be True",
        ),
        (dict(train__future_tokens=1, optimizer__base_width=8), "have no rules for its heads"),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(UserError, match=message):
        build_program(load_config("gpt", **{**SMALL, **fields}), jax.devices()[:1])


def test_the_mask_token_must_not_be_a_token_of_the_text(text_file):
    config = Config.of(
        config_for(text_file, **SMALL, train__objective="masked", model__vocab_size=257)
    )
    program = build_program(config)
    with pytest.raises(
        UserError, match=r"vocab_size=257: .* the tokenizer uses all 257; increase it by 1 or more"
    ):
        open_pipeline(config, program)
