"""Tests of batches: packing, shuffling, mixtures."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import random_store

from smallgpt_jax.data import batches, packing
from smallgpt_jax.data.corpus import open_mixture
from smallgpt_jax.errors import UserError

END_OF_TEXT = 256  # id of the end-of-text token of the tokenizer "bytes"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    lengths = np.random.default_rng(1).integers(1, 90, 400)
    return random_store(tmp_path_factory.mktemp("documents") / "store", lengths)


def single(packing):
    return batches.Mixture([packing], [1.0])


def concat(split, context, separate=False):
    return single(packing.Concat(split, context, separate))


def sorted_rows(rows):
    return sorted(map(bytes, np.ascontiguousarray(rows)))


# ---------------------------------------------------------------------- both packings


def numbered(lengths):
    """Returns a split of documents with these lengths.

    The id of a token is its position in the stream. But each document starts with an end-of-text
    token, which has id 0.
    """
    starts = np.cumsum(lengths) - lengths
    stream = np.arange(lengths.sum())
    stream[starts] = 0
    return SimpleNamespace(
        stream=stream,
        starts=starts,
        tokens=len(stream),
        begin_of_text=0,
        has_answers=False,
        lengths=np.diff(starts, append=len(stream)),
        counted=None,
        check_ids=lambda ids: None,
    )


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("context", [5, 16, 64])
@pytest.mark.parametrize("kind", packing.PACKINGS)
def test_targets_of_an_epoch(kind, context, separate):
    """Each token of the stream is an input once per epoch, and the loss mask includes its target.

    The mask also includes targets that are end-of-text tokens. The packing `concat` drops the last
    tokens of the stream if they do not fill a row.
    """
    lengths = np.random.default_rng(0).integers(2, 50, 300)
    split = numbered(lengths)
    packed = packing.PACKINGS[kind](split, context, separate)
    rows = packed.read_rows(np.arange(packed.num_rows))
    inputs, targets = rows.tokens_BxT1[:, :-1], rows.targets_BxT
    if targets is None:
        targets = rows.tokens_BxT1[:, 1:]
    in_mask = np.ones(inputs.shape, bool) if rows.loss_mask_BxT is None else rows.loss_mask_BxT
    ends = set(split.starts + lengths - 1)
    positions = []
    for token, target in zip(inputs[in_mask], targets[in_mask]):
        # The id of a token is its position. End-of-text has id 0, so its position is computed from
        # the next token.
        position = token or target - 1
        assert target == (0 if position in ends else position + 1)
        positions.append(position)
    used = packed.num_rows * context if kind == "concat" else split.tokens
    assert sorted(positions) == list(range(used)) and used > split.tokens - context - 1
    assert in_mask.mean() == pytest.approx(1 - packed.padding)


# ---------------------------------------------------------------------- concat


def test_each_token_is_a_target_once_per_epoch(documents):
    split, context = documents.train, 32
    windows = (split.tokens - 1) // context
    order = batches.train_batches(concat(split, context), batch_size=7, seed=3)
    epoch = np.concatenate([order[step].tokens_BxT1 for step in range(windows // 7 + 1)])[:windows]
    assert epoch.shape == (windows, context + 1) and epoch.dtype == np.int32
    expected = np.array(split.stream[: windows * context + 1], np.int32)
    assert sorted_rows(epoch[:, 1:]) == sorted_rows(expected[1:].reshape(windows, context))
    assert sorted_rows(epoch[:, :-1]) == sorted_rows(expected[:-1].reshape(windows, context))


def test_segment_ids_of_concat(documents):
    rows = packing.Concat(documents.train, 64, True).read_rows(np.arange(40))
    assert rows.loss_mask_BxT is None
    for tokens, segments in zip(rows.tokens_BxT1, rows.segment_ids_BxT):
        expected, number = [], 1
        for i, token in enumerate(tokens[:-1]):
            number += token == END_OF_TEXT and i > 0
            expected.append(number)
        assert segments.tolist() == expected
    assert (
        packing.Concat(documents.train, 64, False).read_rows(np.arange(3)).segment_ids_BxT is None
    )


def test_share_of_cut_documents(tmp_path):
    split = random_store(
        tmp_path / "store", [9] * 60
    ).train  # 60 documents of ten tokens, end-of-text included
    whole = sum(start // 25 == (start + 9) // 25 for start in range(0, split.tokens, 10))
    assert packing.Concat(split, 25, False).cut_documents == pytest.approx(
        1 - whole / split.documents
    )
    assert packing.Concat(split, 10, False).cut_documents == 0
    assert packing.BestFit(split, 25, False).cut_documents == 0
    assert packing.BestFit(split, 9, False).cut_documents == 1
    assert packing.BestFit(split, 25, False).padding == pytest.approx(0.2, abs=0.01)


# ---------------------------------------------------------------------- best_fit


@pytest.mark.parametrize("room", [7, 40, 100])
def test_best_fit_decreasing(room):
    """The rows have the same free space as in a plain implementation of best-fit decreasing.

    The plain implementation places one piece of a document at a time.
    """
    for seed in range(30):
        lengths = np.random.default_rng(seed).integers(1, 60, seed * 3 + 1)
        pieces = sorted(
            [room] * int(sum(lengths // room)) + [n for n in lengths % room if n], reverse=True
        )
        left = []
        for piece in pieces:
            fitting = [(space, row) for row, space in enumerate(left) if space >= piece]
            if fitting:
                left[min(fitting)[1]] -= piece
            else:
                left.append(room - piece)
        packed = packing.pack_best_fit(np.cumsum(lengths) - lengths, lengths, room)
        filled = np.add.reduceat(packed.lengths, packed.first_piece[:-1])
        assert sorted(room - filled) == sorted(left)


@pytest.mark.parametrize("context", [20, 64, 128])
def test_best_fit_contains_every_token_and_every_target(documents, context):
    split = documents.train
    packed = packing.BestFit(split, context, True)
    tokens, segments, loss_mask, targets, *_ = packed.read_rows(np.arange(packed.num_rows))
    stream, starts = np.asarray(split.stream), [*split.starts, split.tokens]
    texts = [stream[a:b].tolist() for a, b in itertools.pairwise(starts)]

    found, pairs = [], []
    for row, row_segments, row_mask, row_targets in zip(tokens, segments, loss_mask, targets):
        assert not row_mask[row_segments == 0].any()
        assert (np.diff((row_segments == 0).astype(int)) >= 0).all()  # padding comes last
        assert (np.diff(row_segments[row_segments > 0]) >= 0).all()
        found += [row[:-1][row_segments == n].tolist() for n in range(1, row_segments.max() + 1)]
        pairs += [(int(row[i]), int(row_targets[i])) for i in np.flatnonzero(row_mask)]
    pieces = [text[i : i + context] for text in texts for i in range(0, len(text), context)]
    assert sorted(found) == sorted(pieces)  # only documents longer than a row are cut
    # The target of a token is the next token of its document. The target of a document's last token
    # is end-of-text.
    assert sorted(pairs) == sorted(
        pair for text in texts for pair in zip(text, [*text[1:], END_OF_TEXT])
    )
    assert packed.padding == pytest.approx(1 - split.tokens / segments.size)
    assert packed.padding < 0.02


def test_best_fit_loss_mask_does_not_depend_on_separation(documents):
    apart, joined = (
        packing.BestFit(documents.train, 64, separate).read_rows(np.arange(50))
        for separate in (True, False)
    )
    assert joined.segment_ids_BxT is None
    np.testing.assert_array_equal(apart.loss_mask_BxT, joined.loss_mask_BxT)
    np.testing.assert_array_equal(apart.tokens_BxT1, joined.tokens_BxT1)
    np.testing.assert_array_equal(apart.targets_BxT, joined.targets_BxT)


# ---------------------------------------------------------------------- order


def test_batch_depends_on_seed_and_step_only(documents):
    some = batches.train_batches(concat(documents.train, 32), 8, seed=3)
    in_order = [some[step].tokens_BxT1 for step in range(51)]
    again = batches.train_batches(concat(documents.train, 32), 8, seed=3)
    assert all(np.array_equal(again[step].tokens_BxT1, in_order[step]) for step in (50, 0, 17))
    for first, workers in ((0, 0), (13, 2), (50, 1), (49, 0)):
        ahead = batches.read_ahead(again, first, workers)
        assert all(
            np.array_equal(next(ahead).tokens_BxT1, in_order[step]) for step in range(first, 51)
        )
    for processes in (2, 4):
        rows = np.split(np.arange(8), processes)
        parts = [
            batches.train_batches(concat(documents.train, 32), 8, 3, part)[17].tokens_BxT1
            for part in rows
        ]
        assert np.array_equal(np.concatenate(parts), in_order[17])
    other = batches.train_batches(concat(documents.train, 32), 8, seed=4)
    assert not np.array_equal(other[17].tokens_BxT1, in_order[17])


def test_order_is_stable_across_versions(documents):
    """A seed gives the same order of rows as in earlier versions of this project."""
    numbers = batches.row_numbers(concat(documents.train, 32), 8, seed=3)
    assert " ".join(map(str, numbers[0])) == "104 380 217 363 318 66 174 251"


def test_each_epoch_has_its_own_order(documents):
    packed = packing.Concat(documents.train, 256, False)
    epochs = batches.train_batches(single(packed), packed.num_rows, seed=0)
    assert not np.array_equal(epochs[0].tokens_BxT1, epochs[1].tokens_BxT1)
    assert sorted_rows(epochs[0].tokens_BxT1) == sorted_rows(epochs[1].tokens_BxT1)


@pytest.mark.parametrize("kind", packing.PACKINGS)
def test_validation_has_each_row_once(documents, kind):
    packed = packing.PACKINGS[kind](documents.validation, 64, True)
    all_rows = packed.read_rows(np.arange(packed.num_rows))
    whole = list(batches.validation_batches(single(packed), 8, limit=0))
    found = np.concatenate([rows.tokens_BxT1[rows.loss_mask_BxT.any(axis=1)] for rows in whole])
    assert sorted_rows(found) == sorted_rows(all_rows.tokens_BxT1)
    targets = (
        all_rows.tokens_BxT1[:, 1:].size
        if all_rows.loss_mask_BxT is None
        else all_rows.loss_mask_BxT.sum()
    )
    assert sum(rows.loss_mask_BxT.sum() for rows in whole) == targets
    assert all(rows.tokens_BxT1.shape == (8, 65) for rows in whole)
    some = list(batches.validation_batches(single(packed), 8, limit=2))
    assert len(some) == 2 and np.array_equal(some[1].tokens_BxT1, whole[1].tokens_BxT1)


def test_few_validation_batches_are_read_ahead(documents, monkeypatch):
    """All of them would not fit into memory."""
    read = []
    packed = packing.Concat(documents.validation, 8, False)
    rows = type(packed).read_rows
    monkeypatch.setattr(
        type(packed), "read_rows", lambda self, rows_B: read.append(rows_B) or rows(self, rows_B)
    )
    found = iter(batches.validation_batches(single(packed), 1, limit=100))
    for _ in range(50):
        next(found)
    time.sleep(0.2)
    assert 50 <= len(read) < 75


def test_refuses_too_little_text(documents):
    with pytest.raises(UserError, match="one batch takes 100000 rows"):
        batches.train_batches(concat(documents.train, 32), 100_000, seed=0)
    with pytest.raises(UserError, match="validation split has"):
        batches.validation_batches(concat(documents.validation, 10_000_000), 8, limit=0)


# ---------------------------------------------------------------------- mixtures


@pytest.fixture(scope="module")
def two_stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    for name, letters, count in (("small", b"abcd", 100), ("large", b"wxyz", 500)):
        random_store(folder / name, [70] * count, letters)
    return f"{folder}/small=1,{folder}/large=3"


def test_number_of_validation_batches_of_a_mixture(two_stores):
    folders = [item.split("=")[0] for item in two_stores.split(",")]
    corpus = open_mixture(
        ",".join(f"{folder}=1" for folder in [folders[0], folders[1], folders[0]])
    )
    texts = corpus.pack("train", "concat", False, 32)
    (batch,) = batches.validation_batches(texts, 8, limit=1)
    assert batch.loss_mask_BxT.all()


def test_rows_of_a_mixture_follow_its_weights(two_stores):
    corpus = open_mixture(two_stores)
    assert corpus.weights == (0.25, 0.75)
    texts = corpus.pack("train", "concat", True, 32)
    order = batches.train_batches(texts, 16, seed=5)
    is_small = np.array([(order[i].tokens_BxT1 < ord("m")).any(axis=1) for i in range(60)])
    assert abs(is_small.cumsum() - np.arange(1, 16 * 60 + 1) / 4).max() <= 1  # after every row
    np.testing.assert_allclose(is_small.sum(axis=1), 4, atol=1)  # of 16 rows per batch
    assert is_small.mean() == pytest.approx(0.25, abs=0.005)
    assert all(
        np.array_equal(order[7][i], batches.train_batches(texts, 16, seed=5)[7][i]) for i in (0, 1)
    )
    # Each store has its own epochs: no row of a store is repeated before all rows of this store
    # have been read.
    small = texts.packings[0]
    numbers = np.concatenate([batches.row_numbers(texts, 16, 5)[i] for i in range(100)])
    numbers = numbers[numbers < small.num_rows][: 2 * small.num_rows]
    for epoch in np.split(numbers, 2):
        assert sorted(epoch) == list(range(small.num_rows))
    validation = corpus.pack("validation", "concat", True, 32)
    found = list(batches.validation_batches(validation, 8, limit=4))
    share = np.mean([(rows.tokens_BxT1 < ord("m")).any(axis=1).mean() for rows in found])
    assert share == pytest.approx(0.25, abs=0.05)
    with pytest.raises(UserError, match="one batch takes 2500 rows"):
        batches.train_batches(texts, 10_000, seed=5)
