"""Losses of finished runs on further texts and in longer contexts."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from comparison_helpers import untrained_run
from conftest import forward, init, load_config
from data_helpers import prepare_store

from smallgpt_jax import inference, models
from smallgpt_jax.comparison import comparability, run_reader
from smallgpt_jax.data.corpus import Corpus, open_existing
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import texts
from smallgpt_jax.run.config_file import read_config, write_config
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.validation import EvaluationSums

TIME = 64


def numbers(first: int) -> str:
    return "\n\n".join(str(n) * 40 for n in range(first, first + 1000))


@pytest.mark.slow
def test_texts_in_longer_contexts(text_file, tmp_path, monkeypatch):
    """The measured losses at each context length match a float64 formula on the same tokens.

    A second call of `measure_texts` measures nothing, because the checkpoint is the same.
    """
    folder = untrained_run(
        tmp_path / "run",
        text_file,
        train__steps=2,
        train__eval_steps=2,
        model__position="rope",
        model__num_layers=1,
        model__d_model=16,
        data__packing="best_fit",
    )
    config, other = read_config(folder), tmp_path / "other.txt"
    other.write_text(
        "\n\n".join(" ".join(f"{n * n % 97}" for n in range(m, m + 60)) for m in range(900))
    )
    model = models.LanguageModel(config.model)
    trained = SimpleNamespace(model=model, params=init(model), model_state={})
    monkeypatch.setattr(inference, "load_trained", lambda folder: trained)
    monkeypatch.setattr(
        texts, "shared_program", lambda config: shared_program(config, jax.devices()[:1])
    )
    messages = []
    for _ in range(2):
        texts.measure_texts(folder, {"other": str(other)}, (1, 4), log=messages.append)
    assert len(messages) == 4 and f"other, context {4 * TIME}" in messages[3]
    rows = json.loads((folder / "evaluations" / "texts.json").read_text())
    read = run_reader.read_run("run", folder).texts
    assert [(row.text, row.context_length, row.step) for row in read] == [
        (text, length, 2) for text in ("own", "other") for length in (TIME, 4 * TIME)
    ]

    corpus = texts.open_texts(config, {"other": str(other)})["other"]
    tokens = np.asarray(corpus.stores[0].validation.stream, np.int32)
    sample = texts.TextSample(corpus, config, (1, 4), "other")
    starts = sample._window_numbers * 4 * TIME
    assert (
        len(starts) == len(set(starts)) == 2 * 8 // 4
    )  # 2 evaluation steps of 8 rows, 4 rows per window
    for times, row in ((1, rows[2]), (4, rows[3])):
        windows = np.stack(
            [
                tokens[start : start + times * TIME + 1]
                for first in starts
                for start in range(first, first + 4 * TIME, times * TIME)
            ]
        )
        logits = np.asarray(forward(model, trained.params, windows[:, :-1]), np.float64)
        logits -= logits.max(axis=2, keepdims=True)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
        losses = -np.take_along_axis(log_probabilities, windows[:, 1:, None], axis=2)
        assert row["tokens"] == losses.size and abs(row["loss"] - losses.mean()) < 1e-5
        assert math.isclose(
            row["bits_per_byte"],
            row["loss"] / math.log(2) / corpus.stores[0].validation.bytes_per_token,
        )

    # The run's own text at its own context length is not measured, since training evaluates it.
    texts.measure_texts(folder, {}, (1,), log=messages.append)
    assert len(messages) == 4
    # Results of an earlier checkpoint are ignored.
    config = config.replace(train={"steps": 4})
    write_config(folder, config.to_dict())
    assert run_reader.read_run("run", folder).texts == ()


@pytest.mark.parametrize("times", [1, 2])
def test_batches_are_no_larger_than_microbatches_of_training(
    times, text_file, tmp_path, monkeypatch
):
    """A batch of `measure_loss` has at most as many tokens as a training microbatch, so it fits
    into memory.
    """
    folder = untrained_run(
        tmp_path, text_file, train__batch_size=64, train__microbatches=4, train__eval_steps=2
    )
    config = read_config(folder)
    sample = texts.TextSample(open_existing(config.data), config, (1, 2), "own")
    shapes = []

    def eval_step(params, model_state, batch):
        shapes.append(batch.tokens_BxT1.shape)
        return EvaluationSums(np.float32(1), np.int32(1), np.int32(1), None)

    def program(config):
        mesh = sharding.make_mesh(config.mesh)
        return SimpleNamespace(
            mesh=mesh,
            shardings=SimpleNamespace(
                params=sharding.replicated(mesh), model_state=sharding.replicated(mesh)
            ),
            evaluate=eval_step if config.train.microbatches == 1 else None,
        )

    monkeypatch.setattr(texts, "shared_program", program)
    monkeypatch.setattr(
        inference, "load_trained", lambda folder: SimpleNamespace(params={}, model_state={})
    )
    texts.measure_loss(folder, sample, times)
    microbatch = 64 // 4 * TIME  # tokens
    assert shapes and {(rows * (length - 1), length) for rows, length in shapes} == {
        (microbatch, TIME * times + 1)
    }


def test_a_changed_text_is_measured_again_and_not_compared(text_file, tmp_path, monkeypatch):
    """A text is identified by its content, not by its name, size or modification time."""
    losses = iter(range(1, 9))
    monkeypatch.setattr(
        texts, "measure_loss", lambda *_: {"loss": 1.0, "bits_per_byte": next(losses)}
    )
    one, other = (untrained_run(tmp_path / name, text_file) for name in ("one", "other"))
    text = tmp_path / "text.txt"

    def measured(folder, source=text) -> int:
        texts.measure_texts(folder, {"text": str(source)}, (1,), log=lambda _: None)
        rows = run_reader.read_run("run", folder).texts
        return next(row.bits_per_byte for row in rows if row.text == "text")

    def check() -> None:
        comparability.require_comparable(
            [run_reader.read_run(folder.name, folder) for folder in (one, other)]
        )

    text.write_text(numbers(1000))
    # The fake `measure_loss` returns 1, 2, 3, …. The first call of `measured` measures the run's
    # own text (1), then the text named "text" (2). The second call measures nothing, so it also
    # returns 2.
    assert measured(one) == measured(one) == 2
    again = tmp_path / "again.txt"
    again.write_text(text.read_text())
    assert measured(one, again) == 2
    text.write_text(numbers(2000))
    assert measured(other) == 4
    with pytest.raises(
        UserError, match=r"the texts named 'text' differ \('.*/again.txt' and '.*/text.txt'\)"
    ):
        check()
    assert measured(one) == 5
    check()


def test_a_mixture_is_measured_on_the_same_tokens_at_each_context_length(token_store, tmp_path):
    (tmp_path / "numbers.txt").write_text("\n\n".join(str(n) * 40 for n in range(3000)))
    digits = prepare_store(tmp_path / "numbers", tmp_path / "numbers.txt")
    corpus = Corpus([token_store, digits], [0.25, 0.75])
    config = load_config("gpt", train__eval_steps=4)  # 32 rows of 64 tokens
    sample = texts.TextSample(corpus, config, (1, 2, 4), "own")
    of_one, of_four = (
        corpus.pack("validation", "concat", False, 64 * n).packings[0].num_rows for n in (1, 4)
    )
    # The first store has of_one rows of 64 tokens or of_four rows of 256 tokens. If of_one were 4 *
    # of_four, wrong code that multiplies all row indices by 4 would pass the test.
    assert of_one > 4 * of_four
    seen = [
        np.sort(
            np.concatenate(
                [
                    row[1:]
                    for batch in sample.batches(times, 5)
                    for row in batch.tokens_BxT1[batch.loss_mask_BxT.any(1)]
                ]
            )
        )
        for times in (1, 2, 4)
    ]
    assert len(seen[0]) == 8 * 256 and (seen[0] == seen[1]).all() and (seen[0] == seen[2]).all()
    # Two of the eight windows of 256 tokens are from the first store, and six are from the second.
    share = np.isin(seen[0], token_store.tokenizer.encode(["0123456789"])[0]).mean()
    assert (
        0.7 < share <= 0.75
    )  # below 0.75, because the second store contains line breaks besides digits
