"""Which batch a step gets: packing, shuffling, mixtures, and what a model makes of documents in a row."""

import functools
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, build, forward, init, load_config

from smallgpt_jax import data, sharding, train
from smallgpt_jax.data import batches, packing, prepare
from smallgpt_jax.data.packing import Rows
from smallgpt_jax.errors import UserError
from smallgpt_jax.metrics import METRICS_FILE, Stopwatch, read_lines
from smallgpt_jax.models.context import Context
from smallgpt_jax.program import build_program
from smallgpt_jax.step import eval_step, train_step

MARK = 256  # end-of-text of the tokenizer "bytes"


def made_store(folder, lengths, seed=0, letters=b"abcdefgh"):
    """A store of documents of these lengths, with their texts."""
    rng = np.random.default_rng(seed)
    texts = [bytes(rng.choice(list(letters), length).astype(np.uint8)).decode() for length in lengths]
    folder.parent.mkdir(exist_ok=True)
    source = folder.with_name(folder.name + ".jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare.prepare_store(
        folder, source=str(source), tokenizer="bytes", validation_fraction=0.2, text_field="text",
        invalid_utf8="refuse", invalid_items="refuse", say=lambda _: None)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    lengths = np.random.default_rng(1).integers(1, 90, 400)
    return made_store(tmp_path_factory.mktemp("documents") / "store", lengths)


def alone(packing):
    return batches.Mixture([packing], [1.0])


def concat(split, context, separate=False):
    return alone(packing.Concat(split, context, separate))


def by_content(rows):
    return sorted(map(bytes, np.ascontiguousarray(rows)))


# ---------------------------------------------------------------------- both packings

def numbered(lengths):
    """A split in which every token but the end-of-text, 0, is its own place in the stream."""
    starts = np.cumsum(lengths) - lengths
    stream = np.arange(lengths.sum())
    stream[starts] = 0
    return SimpleNamespace(stream=stream, starts=starts, tokens=len(stream), end_of_text=0)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("context", [5, 16, 64])
@pytest.mark.parametrize("kind", packing.PACKINGS)
def test_the_targets_of_an_epoch(kind, context, separate):
    """Each place of the stream is an input whose target counts once, the last ones of documents included, whose
    target is an end-of-text; `concat` leaves out what does not fill its last window."""
    lengths = np.random.default_rng(0).integers(2, 50, 300)
    split = numbered(lengths)
    packed = packing.PACKINGS[kind](split, context, separate)
    rows = packed.read(np.arange(packed.num_rows))
    inputs, targets = rows.tokens_BxT1[:, :-1], rows.targets_BxT
    if targets is None:
        targets = rows.tokens_BxT1[:, 1:]
    counted = np.ones(inputs.shape, bool) if rows.counts_BxT is None else rows.counts_BxT
    ends = set(split.starts + lengths - 1)
    places = []
    for token, target in zip(inputs[counted], targets[counted]):
        place = token or target - 1  # behind a document's own end-of-text comes its first token
        assert target == (0 if place in ends else place + 1)
        places.append(place)
    used = packed.num_rows * context if kind == "concat" else split.tokens
    assert sorted(places) == list(range(used)) and used > split.tokens - context - 1
    assert counted.mean() == pytest.approx(1 - packed.padding)


# ---------------------------------------------------------------------- concat

def test_each_token_is_a_target_once_an_epoch(documents):
    split, context = documents.train, 32
    windows = (split.tokens - 1) // context
    order = batches.train_batches(concat(split, context), batch_size=7, seed=3)
    epoch = np.concatenate([order[step].tokens_BxT1 for step in range(windows // 7 + 1)])[:windows]
    assert epoch.shape == (windows, context + 1) and epoch.dtype == np.int32
    expected = np.array(split.stream[:windows * context + 1], np.int32)
    assert by_content(epoch[:, 1:]) == by_content(expected[1:].reshape(windows, context))
    assert by_content(epoch[:, :-1]) == by_content(expected[:-1].reshape(windows, context))


def test_segments_begin_with_documents(documents):
    rows = packing.Concat(documents.train, 64, True).read(np.arange(40))
    assert rows.counts_BxT is None
    for tokens, segments in zip(rows.tokens_BxT1, rows.segments_BxT):
        expected, number = [], 1
        for i, token in enumerate(tokens[:-1]):
            number += token == MARK and i > 0
            expected.append(number)
        assert segments.tolist() == expected
    assert packing.Concat(documents.train, 64, False).read(np.arange(3)).segments_BxT is None


def test_the_share_of_cut_documents(tmp_path):
    split = made_store(tmp_path / "store", [9] * 60).train  # ten tokens each, end-of-text included
    whole = sum(start // 25 == (start + 9) // 25 for start in range(0, split.tokens, 10))
    assert packing.Concat(split, 25, False).cut_documents == pytest.approx(1 - whole / split.documents)
    assert packing.Concat(split, 10, False).cut_documents == 0
    assert packing.BestFit(split, 25, False).cut_documents == 0
    assert packing.BestFit(split, 9, False).cut_documents == 1
    assert packing.BestFit(split, 25, False).padding == pytest.approx(0.2, abs=0.01)


# ---------------------------------------------------------------------- best_fit

@pytest.mark.parametrize("room", [7, 40, 100])
def test_best_fit_is_best_fit_decreasing(room):
    """Against the plain algorithm, one piece at a time."""
    for seed in range(30):
        lengths = np.random.default_rng(seed).integers(1, 60, seed * 3 + 1)
        pieces = sorted([room] * int(sum(lengths // room)) + [n for n in lengths % room if n], reverse=True)
        left = []
        for piece in pieces:
            fitting = [(space, row) for row, space in enumerate(left) if space >= piece]
            if fitting:
                left[min(fitting)[1]] -= piece
            else:
                left.append(room - piece)
        plan = packing.plan(np.cumsum(lengths) - lengths, lengths.sum(), room)
        filled = np.add.reduceat(plan.lengths, plan.first_piece[:-1])
        assert sorted(room - filled) == sorted(left)


@pytest.mark.parametrize("context", [20, 64, 128])
def test_best_fit_keeps_every_token_and_every_target(documents, context):
    split = documents.train
    packed = packing.BestFit(split, context, True)
    tokens, segments, counts, targets = packed.read(np.arange(packed.num_rows))
    stream, starts = np.asarray(split.stream), [*split.starts, split.tokens]
    texts = [stream[a:b].tolist() for a, b in itertools.pairwise(starts)]

    found, pairs = [], []
    for row, row_segments, row_counts, row_targets in zip(tokens, segments, counts, targets):
        assert not row_counts[row_segments == 0].any()
        assert (np.diff((row_segments == 0).astype(int)) >= 0).all()  # padding comes last
        assert (np.diff(row_segments[row_segments > 0]) >= 0).all()
        found += [row[:-1][row_segments == n].tolist() for n in range(1, row_segments.max() + 1)]
        pairs += [(int(row[i]), int(row_targets[i])) for i in np.flatnonzero(row_counts)]
    pieces = [text[i:i + context] for text in texts for i in range(0, len(text), context)]
    assert sorted(found) == sorted(pieces)  # only what is longer than a row is cut
    # Targets: the next token of the document, or an end-of-text behind its last one.
    assert sorted(pairs) == sorted(pair for text in texts for pair in zip(text, [*text[1:], MARK]))
    assert packed.padding == pytest.approx(1 - split.tokens / segments.size)
    assert packed.padding < 0.02


def test_best_fit_without_separation_counts_the_same(documents):
    apart, joined = (packing.BestFit(documents.train, 64, separate).read(np.arange(50))
                     for separate in (True, False))
    assert joined.segments_BxT is None
    np.testing.assert_array_equal(apart.counts_BxT, joined.counts_BxT)
    np.testing.assert_array_equal(apart.tokens_BxT1, joined.tokens_BxT1)
    np.testing.assert_array_equal(apart.targets_BxT, joined.targets_BxT)


# ---------------------------------------------------------------------- order

def test_a_batch_depends_on_seed_and_step_only(documents):
    some = batches.train_batches(concat(documents.train, 32), 8, seed=3)
    in_order = [some[step].tokens_BxT1 for step in range(51)]
    again = batches.train_batches(concat(documents.train, 32), 8, seed=3)
    assert all(np.array_equal(again[step].tokens_BxT1, in_order[step]) for step in (50, 0, 17))
    for first, workers in ((0, 0), (13, 2), (50, 1), (49, 0)):
        ahead = batches.read_ahead(again, first, workers)
        assert all(np.array_equal(next(ahead).tokens_BxT1, in_order[step]) for step in range(first, 51))
    for processes in (2, 4):
        rows = np.split(np.arange(8), processes)
        parts = [batches.train_batches(concat(documents.train, 32), 8, 3, part)[17].tokens_BxT1
                 for part in rows]
        assert np.array_equal(np.concatenate(parts), in_order[17])
    other = batches.train_batches(concat(documents.train, 32), 8, seed=4)
    assert not np.array_equal(other[17].tokens_BxT1, in_order[17])


HASHES = """
import hashlib, sys
import jax
from smallgpt_jax import distributed
from smallgpt_jax.data import batches
from smallgpt_jax.program import build_program
from configs import gpt
from jax.experimental import multihost_utils
source, number, count, port, workers, first = sys.argv[1], *map(int, sys.argv[2:])
if count > 1:
    distributed.join(f"127.0.0.1:{port}", count, number, 60)
config = gpt.get_config("tiny")
config.data.update(source=source, packing="best_fit", separate_documents=True)
text = build_program(config).open_pipeline()
for step, rows in zip(range(first, 51), batches.read_ahead(text.train_batches, first, workers)):
    whole = [multihost_utils.process_allgather(x, tiled=True) for x in text.to_devices(rows)]
    print(step, hashlib.sha256(b"".join(x.tobytes() for x in whole)).hexdigest(), flush=True)
"""


@pytest.mark.slow
def test_global_batches_are_the_same_for_any_number_of_processes(text_file):
    """Steps 0 to 50 of a run, as its devices get them: 1, 2 and 4 processes, with and without threads
    that read ahead, from the beginning and from somewhere else."""
    import socket

    def hashes(processes, workers, first):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
                       "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}"}
        running = [subprocess.Popen(
            [sys.executable, "-c", HASHES, *map(str, (text_file, i, processes, port, workers, first))],
            env=environment, stdout=subprocess.PIPE, text=True) for i in range(processes)]
        out = [process.communicate(timeout=300)[0] for process in running]
        assert all(process.returncode == 0 for process in running)
        return out[0].splitlines()[first - 51:]  # the first process may have made the store

    whole = hashes(1, 0, 0)
    assert len(whole) == len({line.split()[1] for line in whole}) == 51
    for processes, workers, first in ((1, 2, 0), (2, 2, 0), (4, 0, 0), (2, 0, 23)):
        assert hashes(processes, workers, first) == whole[first:], (processes, workers, first)


def test_epochs_are_shuffled_differently(documents):
    packed = packing.Concat(documents.train, 256, False)
    epochs = batches.train_batches(alone(packed), packed.num_rows, seed=0)
    assert not np.array_equal(epochs[0].tokens_BxT1, epochs[1].tokens_BxT1)
    assert by_content(epochs[0].tokens_BxT1) == by_content(epochs[1].tokens_BxT1)


@pytest.mark.parametrize("kind", packing.PACKINGS)
def test_validation_counts_each_row_once(documents, kind):
    packed = packing.PACKINGS[kind](documents.validation, 64, True)
    every = packed.read(np.arange(packed.num_rows))
    whole = list(batches.validation_batches(alone(packed), 8, limit=0))
    found = np.concatenate([rows.tokens_BxT1[rows.counts_BxT.any(axis=1)] for rows in whole])
    assert by_content(found) == by_content(every.tokens_BxT1)
    targets = every.tokens_BxT1[:, 1:].size if every.counts_BxT is None else every.counts_BxT.sum()
    assert sum(rows.counts_BxT.sum() for rows in whole) == targets
    assert all(rows.tokens_BxT1.shape == (8, 65) for rows in whole)
    some = list(batches.validation_batches(alone(packed), 8, limit=2))
    assert len(some) == 2 and np.array_equal(some[1].tokens_BxT1, whole[1].tokens_BxT1)


def test_too_little_text(documents):
    with pytest.raises(UserError, match="one batch takes 100000 rows"):
        batches.train_batches(concat(documents.train, 32), 100_000, seed=0)
    with pytest.raises(UserError, match="validation text"):
        batches.validation_batches(concat(documents.validation, 10_000_000), 8, limit=0)


# ---------------------------------------------------------------------- mixtures

@pytest.fixture(scope="module")
def two_stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    for name, letters, count in (("small", b"abcd", 100), ("large", b"wxyz", 500)):
        made_store(folder / name, [70] * count, letters=letters)
    return f"{folder}/small=1,{folder}/large=3"


def test_validation_batches_of_a_mixture_are_as_many_as_they_should_be(two_stores):
    folders = [item.split("=")[0] for item in two_stores.split(",")]
    corpus = data.mixture(",".join(f"{folder}=1" for folder in [folders[0], folders[1], folders[0]]))
    texts = batches.Mixture(corpus.packed("train", "concat", False, 32), corpus.weights)
    assert len(batches.validation_batches(texts, 8, limit=1)) == 1
    assert batches.validation_batches(texts, 8, limit=1)[0].counts_BxT.all()


def test_a_mixture_takes_rows_as_the_weights_say(two_stores):
    corpus = data.mixture(two_stores)
    assert corpus.weights == (0.25, 0.75)
    texts = batches.Mixture(corpus.packed("train", "concat", True, 32), corpus.weights)
    order = batches.train_batches(texts, 16, seed=5)
    is_small = np.array([(order[i].tokens_BxT1 < ord("m")).any(axis=1) for i in range(60)])
    assert abs(is_small.cumsum() - np.arange(1, 16 * 60 + 1) / 4).max() <= 1  # at any moment
    np.testing.assert_allclose(is_small.sum(axis=1), 4, atol=1)  # of 16
    assert is_small.mean() == pytest.approx(0.25, abs=0.005)
    assert all(np.array_equal(order[7][i], batches.train_batches(texts, 16, seed=5)[7][i]) for i in (0, 1))
    # Each store goes through its own epochs.
    small = texts.packings[0]
    numbers = np.concatenate([batches.row_numbers(texts, 16, 5)[i] for i in range(100)])
    numbers = numbers[numbers < small.num_rows][:2 * small.num_rows]
    for epoch in np.split(numbers, 2):
        assert sorted(epoch) == list(range(small.num_rows))
    validation = batches.Mixture(corpus.packed("validation", "concat", True, 32), corpus.weights)
    found = list(batches.validation_batches(validation, 8, limit=4))
    share = np.mean([(rows.tokens_BxT1 < ord("m")).any(axis=1).mean() for rows in found])
    assert share == pytest.approx(0.25, abs=0.05)
    with pytest.raises(UserError, match="one batch takes 2500 rows"):
        batches.train_batches(texts, 10_000, seed=5)


def test_training_on_a_mixture(two_stores, tmp_path, capsys, monkeypatch):
    config = load_config("gpt", data__mixture=two_stores, data__packing="best_fit", train__steps=20)
    clock = itertools.count(1)
    monkeypatch.setattr(Stopwatch, "seconds", lambda self: float(next(clock)))
    train.train(config, str(tmp_path))
    small, large = (texts.padding for texts in data.mixture(two_stores).packed("train", "best_fit", False, 64))
    padding = 0.25 * small + 0.75 * large
    assert padding > 0.002
    lines = [line for line in read_lines(tmp_path / METRICS_FILE) if line["split"] == "train"]
    # Ten steps of eight rows in a second.
    assert lines[-1]["tokens_per_second"] == pytest.approx(10 * 8 * 64 * (1 - padding))
    assert read_lines(tmp_path / "sessions.jsonl", keys={"padding"})[0]["padding"] == pytest.approx(padding)
    out = capsys.readouterr().out
    assert "small, best_fit: " in out and "large, best_fit: " in out and "of the documents are cut" in out
    kept = json.loads((tmp_path / "store.json").read_text())["mixture"]
    assert [store["weight"] for store in kept] == [0.25, 0.75]
    with config.unlocked():
        config.data.mixture = two_stores.replace("=3", "=2")
    with pytest.raises(UserError, match=r"store 1: weight: from 0\.25 to 0\.33"):
        train.train(config, str(tmp_path))


# ---------------------------------------------------------------------- borders, through the model

def models_with_borders():
    for name in ARCHITECTURES:
        yield pytest.param(name, {}, id=name)
    for name, position in (("gpt", "rope"), ("lgpt", "alibi"), ("gpt", "none")):
        yield pytest.param(name, {"position": position}, id=f"{name}-{position}")
    splash = {"attention": "splash", "context_length": 128}
    yield pytest.param("cgpt", {"conv_kernel": 5, "position": "rope", **splash}, id="cgpt-splash")
    yield pytest.param("pgpt", {"num_paths": 2, **splash}, id="pgpt-splash")


@pytest.mark.parametrize("name, fields", list(models_with_borders()))
def test_documents_of_a_row_are_computed_as_if_alone(name, fields):
    """What a row of three documents and padding gives is what each of them gives in a row of its own."""
    model = build(name, **fields)
    params, time = init(model), model.config.context_length
    lengths = [time // 4, time // 2 - 3, time // 8]
    segments = np.repeat([1, 2, 3, 0], [*lengths, time - sum(lengths)])[None].astype(np.int32)
    tokens = jax.random.randint(jax.random.key(0), (1, time), 0, 257)

    @jax.jit
    def logits(tokens, segments):
        return model.apply({"params": params}, tokens, Context(segment_ids_BxT=segments))

    together = logits(tokens, segments)
    start = 0
    for length in lengths:
        own = jnp.zeros_like(tokens).at[:, :length].set(tokens[:, start:start + length])
        alone = logits(own, jnp.ones_like(segments))
        np.testing.assert_allclose(together[:, start:start + length], alone[:, :length], atol=2e-5, rtol=1e-4)
        start += length
    plain = jax.jit(lambda tokens: model.apply({"params": params}, tokens))(tokens)
    assert np.abs(together[:, lengths[0]:] - plain[:, lengths[0]:]).max() > 0.01


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_passes_a_border(name):
    """The gradient of a document's logits by the embeddings of the one before it is zero, exactly."""
    model = build(name)
    params = init(model)
    tokens = jnp.arange(64)[None]  # each token once: its embedding is that of a place
    border = 30
    segments = jnp.where(jnp.arange(64)[None] < border, 1, 2)

    def later(table, segments):
        variables = {"params": {**params, "token_embedding": table}}
        return jnp.sum(jnp.sin(model.apply(variables, tokens, Context(segment_ids_BxT=segments))[:, border:]))

    gradient = jax.jit(jax.grad(later))
    apart = gradient(params["token_embedding"], segments)
    assert not apart[:border].any() and apart[border:64].any(axis=1).all()
    together = gradient(params["token_embedding"], jnp.ones_like(segments))
    assert together[:border].any(axis=1).all()


def test_separated_documents_on_a_mesh_with_paths():
    """The losses of one device and of eight, with splash attention inside pgpt's paths."""
    found = []
    for devices, mesh in ((1, {}), (8, {"path": 2, "data": 2, "tensor": 2})):
        config = load_config("pgpt", model__context_length=128, model__attention="splash",
                             data__packing="best_fit", data__separate_documents=True,
                             **{f"mesh__{axis}": length for axis, length in mesh.items()})
        program = build_program(config, jax.devices()[:devices])
        state = program.initial_state()
        step = program.runnable(program.compile_train_step())
        rng = np.random.default_rng(0)
        segments = np.sort(rng.integers(1, 4, (8, 128)), axis=1).astype(np.int32)
        rows = Rows(rng.integers(0, 257, (8, 129), np.int32), segments, rng.random((8, 128)) < 0.8,
                    rng.integers(0, 257, (8, 128), np.int32))
        rows = jax.device_put(rows, sharding.batch_sharding(program.mesh))
        for _ in range(3):
            state, metrics = step(state, rows)
        found.append(float(metrics["loss"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_only_what_counts_is_learned_from(microbatches):
    """The loss is the mean over the targets that count, whatever part of the batch they are in."""
    config = load_config("gpt", train__microbatches=microbatches, train__batch_size=4)
    program = build_program(config, jax.devices()[:1])
    state = program.initial_state()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 257, (4, 65), np.int32)
    counts = rng.random((4, 64)) < [[0.9], [0.1], [0.5], [0.0]]
    total, targets = eval_step(
        state.params, {}, Rows(tokens, None, counts), model=program.model, microbatches=microbatches, loss_chunks=1)
    _, metrics = train_step(
        state, Rows(tokens, None, counts), model=program.model, optimizer=program.optimizer,
        schedule=lambda count: 0.1, microbatches=microbatches, loss_chunks=1, seed=0)
    assert int(targets) == counts.sum()
    assert float(metrics["loss"]) == pytest.approx(float(total) / counts.sum(), rel=1e-5)


def test_targets_that_are_not_the_next_token():
    """The end of a document, where the rest of a cut one follows in its row: the loss is of the targets that the
    batch names, by the plain formula."""
    model = build("gpt", num_layers=1, context_length=16)
    params, rng = init(model), np.random.default_rng(0)
    tokens = rng.integers(0, 257, (3, 17), np.int32)
    targets, counts = rng.integers(0, 257, (3, 16), np.int32), rng.random((3, 16)) < 0.7
    log_probabilities = jax.nn.log_softmax(forward(model, params, tokens[:, :-1]))
    losses = -np.take_along_axis(log_probabilities, targets[..., None], axis=2)[..., 0]
    evaluate = jax.jit(functools.partial(eval_step, model=model, microbatches=1, loss_chunks=2))
    total, number = evaluate(params, {}, Rows(tokens, None, counts, targets))
    assert float(total) == pytest.approx(float(losses[counts].sum()), rel=1e-5) and int(number) == counts.sum()


def test_the_order_stays_the_same_in_later_versions(documents):
    """It is part of what a seed promises."""
    numbers = batches.row_numbers(concat(documents.train, 32), 8, seed=3)
    assert " ".join(map(str, numbers[0])) == "104 380 217 363 318 66 174 251"
