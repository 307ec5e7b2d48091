"""Tests of probes: their examples against slow oracles, their options, their order, and the
measures of answers.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from smallgpt_jax.data import batches, tokenizer_folder, tokenizers
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.corpus import load_or_prepare, open_or_prepare
from smallgpt_jax.data.probes import PROBES, RandomNumbers
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.ops.cross_entropy import most_probable
from smallgpt_jax.training.validation import EvaluationSums, count_right, evaluate

CONTEXT = 80


def config_of(name: str, **fields) -> DataConfig:
    config = DataConfig(source=f"synthetic:{name}", tokenizer="symbols", store="", **fields)
    config.validate()
    return config


def corpus_of(name: str, length: int = 5, **fields):
    return load_or_prepare(
        config_of(
            name,
            **{f"probe_{field}": value for field, value in {"length": length, **fields}.items()},
        )
    )


def mixture(corpus, split="train"):
    return corpus.pack(split, "concat", False, CONTEXT)


def examples_of(name: str, length: int = 5, count: int = 60, **fields):
    """Yields (inputs, {position: answer}) of examples, spelled in symbols. Checks what all probes
    have in common.
    """
    corpus = corpus_of(name, length, **fields)
    tokens, segments, mask, targets, *_ = mixture(corpus).read_rows(np.arange(count))
    assert segments is None and tokens.shape == (count, CONTEXT + 1) and (tokens[:, 0] == 0).all()
    inputs = corpus.probe.num_inputs(length)
    assert (
        (tokens[:, 1:inputs] > 0).all() and not mask[:, inputs:].any() and not targets[~mask].any()
    )
    assert max(tokens.max(), targets.max()) < corpus.tokenizer.vocab_size
    assert mixture(corpus).padding == pytest.approx(1 - inputs / CONTEXT)
    for row, row_mask, row_targets in zip(tokens, mask, targets):
        spelled = corpus.tokenizer.decode(row[:inputs]).split()
        assert corpus.tokenizer.encode([" ".join(spelled)])[0].tolist() == row[1:inputs].tolist()
        yield (
            spelled,
            {
                i: corpus.tokenizer.decode([row_targets[i]])
                for i in np.flatnonzero(row_mask).tolist()
            },
        )


# Input i is preceded by the end-of-text token, so the spelled symbol at place i - 1 is input i.


def test_recall_against_a_dictionary():
    seen = set()
    for symbols, answers in examples_of("recall", symbols=16):
        pairs = dict(zip(symbols[:10:2], symbols[1:10:2]))
        assert (
            len(pairs) == 5
            and {key[0] for key in pairs} == {"k"}
            and {v[0] for v in pairs.values()} == {"v"}
        )
        queries = symbols[10::2]
        assert list(answers) == [11, 13, 15, 17, 19]
        assert [answers[i] for i in answers] == [pairs[query] for query in queries]
        assert symbols[11::2] == [
            pairs[query] for query in queries[:-1]
        ]  # earlier answers are inputs
        seen |= {*pairs, *pairs.values()}
    assert len(seen) == 16


def test_copy():
    for symbols, answers in examples_of("copy", symbols=4):
        assert symbols[5] == "|" and set(symbols[:5]) <= set("0123")
        assert answers == {6 + i: symbol for i, symbol in enumerate(symbols[:5])}


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_inverse_permutation(scratch):
    for symbols, answers in examples_of("inverse", scratch=scratch):
        permutation = [int(symbol) for symbol in symbols[:5]]
        assert symbols[5:] == ["_"] * 5 * scratch and sorted(permutation) == [1, 2, 3, 4, 5]
        assert list(answers) == list(
            range(5 * scratch + 1, 5 * scratch + 6)
        )  # the last five inputs
        assert [permutation[int(answer) - 1] for answer in answers.values()] == [1, 2, 3, 4, 5]


def test_best_strategy_without_scratch_tokens():
    """The largest number of permutations for which a causal strategy has all answers right, as in
    docs/data.md.

    At item i, the strategy knows the first i items. If value i is not among them, it must choose a
    later place for it, and is right if the value comes there.
    """

    @functools.cache
    def count(i: int, n: int, chosen: frozenset, seen: frozenset) -> int:
        if i == n:
            return 1
        # The value at a chosen place is fixed, if the strategy is to be right.
        values = [None] if i in chosen else [value for value in range(i, n) if value not in seen]
        return sum(answer(i, n, chosen, seen | {value} - {None}) for value in values)

    def answer(i: int, n: int, chosen: frozenset, seen: frozenset) -> int:
        if i in seen:
            return count(i + 1, n, chosen, seen)
        return max(
            (
                count(i + 1, n, chosen | {place}, seen)
                for place in range(i + 1, n)
                if place not in chosen
            ),
            default=0,
        )

    assert [count(0, n, frozenset(), frozenset()) for n in (1, 2, 3, 8)] == [1, 2, 4, 1144]
    assert "1,144 of the 40,320 permutations, 2.8%," in " ".join(
        (ROOT / "docs" / "data.md").read_text().split()
    )


def test_conjunctions_against_all_conjunctions():
    """Exactly the second half of the values is counted, and one of the 27 conjunctions explains all
    values.
    """
    shares = []
    for symbols, answers in examples_of("boolean", length=6, symbols=3):
        points = [symbols[i : i + 5] for i in range(0, 30, 5)]
        values = [point[4] if len(point) == 5 else answers[29] for point in points]
        assert all(point[3] == "=" for point in points)
        assert answers == {5 * i + 4: values[i] for i in (3, 4, 5)}
        explained = [
            all(
                (all(literal in ("any", bit) for literal, bit in zip(literals, point)))
                == (value == "1")
                for point, value in zip(points, values)
            )
            for literals in itertools.product(("0", "1", "any"), repeat=3)
        ]
        assert any(explained)
        shares += [value == "1" for value in values]
    assert 0.5 < np.mean(shares) < 0.8


def test_life_against_conways_rules():
    sizes = []
    for symbols, answers in examples_of("life", length=4):
        board, after = symbols[:16], []
        assert symbols[16] == "|" and list(answers) == list(range(17, 33))
        for row, column in itertools.product(range(4), repeat=2):
            alive = 0
            for down, right in (
                (-1, -1),
                (-1, 0),
                (-1, 1),
                (0, -1),
                (0, 1),
                (1, -1),
                (1, 0),
                (1, 1),
            ):
                alive += board[(row + down) % 4 * 4 + (column + right) % 4] == "#"
            lives = alive in (2, 3) if board[4 * row + column] == "#" else alive == 3
            after.append("#" if lives else ".")
        assert list(answers.values()) == after
        sizes.append(board.count("#"))
    assert min(sizes) <= 2 and max(sizes) >= 14


@pytest.mark.parametrize("base", [2, 10])
def test_addition_against_integers(base):
    for symbols, answers in examples_of("addition", symbols=base):
        one, other, total = (
            sum(int(digit) * base**place for place, digit in enumerate(digits))
            for digits in (symbols[:5], symbols[6:11], answers.values())
        )
        assert symbols[5] == "+" and symbols[11] == "=" and list(answers) == list(range(12, 18))
        assert one + other == total


def test_parity():
    for bits, answers in examples_of("parity", length=9):
        assert answers == {i: str(bits[:i].count("1") % 2) for i in range(1, 10)}


def test_s5_against_permutation_matrices():
    for symbols, answers in examples_of("s5"):
        state = np.eye(5, dtype=int)
        for i, symbol in enumerate(symbols, start=1):
            matrix = np.zeros((5, 5), int)
            for item, image in enumerate(symbol):
                matrix[int(image) - 1, item] = 1
            state = matrix @ state
            assert answers[i] == "".join(str(1 + column.argmax()) for column in state.T)


# ---------------------------------------------------------------------- rows


def test_random_numbers():
    """SplitMix64 with seed 1234567, as published with its reference implementation."""
    numbers = RandomNumbers(np.arange(1), 1)
    numbers._states_B = np.array([1234567], np.uint64)
    assert numbers._bits(3).tolist() == [
        [6457827717110365317, 3203168211198807973, 9817491932198370423]
    ]
    assert numbers._bits(2).tolist() == [[4593380528125082431, 16408922859458223821]]
    many = RandomNumbers(np.arange(5000), 1)
    assert np.bincount(many.integers(5, 4).ravel()) == pytest.approx(np.full(5, 4000), rel=0.06)
    assert np.mean(many.fractions(4)) == pytest.approx(0.5, abs=0.01)
    assert np.mean(many.permutations(5) == np.arange(5)) == pytest.approx(0.2, abs=0.01)


def test_examples_are_stable_across_versions():
    """A row number gives the same example as in earlier versions of this project."""
    symbols, _ = next(examples_of("recall", length=3, symbols=16))
    assert " ".join(symbols) == "k7 v0 k0 v6 k4 v7 k0 v6 k4 v7 k7"


@pytest.mark.parametrize("name", PROBES)
def test_a_row_depends_only_on_its_number(name):
    fields = {"min_length": 3, "length": 5} if name != "life" else {"min_length": 3, "length": 4}
    rows = mixture(corpus_of(name, **fields))
    numbers = np.array([7, 2**30 - 1, 0, 7, 12345])
    together = rows.read_rows(numbers)
    for place, number in enumerate(numbers):
        alone = rows.read_rows(np.array([number]))
        assert all(
            np.array_equal(one[0], many[place])
            for one, many in zip(alone, together)
            if one is not None
        )
    assert together.tokens_BxT1.dtype == together.targets_BxT.dtype == np.int32
    lengths = np.bincount((rows.read_rows(np.arange(300)).tokens_BxT1 > 0).sum(axis=1))
    assert sum(lengths > 300 / fields["length"] / 3) == fields["length"] + 1 - fields["min_length"]


def test_batches_depend_on_seed_and_step_only():
    train = mixture(corpus_of("copy"))
    whole = batches.train_batches(train, 8, seed=3)
    tokens = [whole[step].tokens_BxT1 for step in range(40)]
    assert (
        len({row.tobytes() for batch in tokens for row in batch}) == 320
    )  # no example is repeated
    ahead = batches.read_ahead(
        batches.train_batches(mixture(corpus_of("copy")), 8, seed=3), 25, 2
    )  # resumed
    assert all(np.array_equal(next(ahead).tokens_BxT1, tokens[step]) for step in range(25, 40))
    parts = [
        batches.train_batches(train, 8, 3, rows)[17] for rows in np.split(np.arange(8), 2)
    ]  # two processes
    assert np.array_equal(np.concatenate([part.tokens_BxT1 for part in parts]), tokens[17])
    other = batches.train_batches(train, 8, seed=4)
    validation = list(
        batches.validation_batches(mixture(corpus_of("copy"), "validation"), 8, limit=40)
    )
    assert not {row.tobytes() for batch in tokens for row in batch} & {
        row.tobytes()
        for step in range(40)
        for batch in (other[step], validation[step])
        for row in batch.tokens_BxT1
    }


def test_validation_examples_have_one_length():
    corpus = corpus_of("parity", length=9, min_length=1, test_lengths=(20, 4))
    for length, rows in {
        9: mixture(corpus, "validation").packings[0],
        **corpus.test_rows(CONTEXT),
    }.items():
        assert (rows.read_rows(np.arange(50)).loss_mask_BxT.sum(axis=1) == length).all()
    assert list(corpus.test_rows(CONTEXT)) == [20, 4]


def test_descriptions_tell_probes_apart():
    descriptions = [
        corpus_of(name, **fields).description
        for name, fields in (
            ("copy", {}),
            ("copy", {"length": 6}),
            ("copy", {"min_length": 2}),
            ("copy", {"symbols": 9}),
            ("parity", {}),
        )
    ]
    assert len({str(description["fingerprints"]) for description in descriptions}) == 5
    assert corpus_of("copy").description == descriptions[0]


# ---------------------------------------------------------------------- options and tokenizer


@pytest.mark.parametrize(
    "name, fields, message",
    [
        (
            "recal",
            {},
            "config.data.source='synthetic:recal': no probe 'recal'; choose from recall, copy, "
            "inverse, boolean, life, addition, parity, s5; did you mean 'recall'?",
        ),
        ("", {}, "config.data.source='synthetic:': no probe ''; choose from recall, "),
        (
            "copy",
            {"tokenizer": "gpt2"},
            "config.data.tokenizer='gpt2': cannot write the examples of synthetic:copy; set "
            "it to 'symbols'",
        ),
        (
            "copy",
            {"store": "data/x"},
            "config.data.store='data/x': cannot be combined with synthetic:copy; set it to ''",
        ),
        (
            "copy",
            {"packing": "best_fit"},
            "config.data.packing='best_fit': cannot be combined with synthetic:copy",
        ),
        (
            "copy",
            {"separate_documents": True},
            "config.data.separate_documents=True: cannot be combined",
        ),
        ("life", {"probe_length": 2}, "config.data.probe_length=2: must be at least 3"),
        (
            "copy",
            {"probe_min_length": 9},
            "config.data.probe_min_length=9: must be 0, or at least 1 and at most "
            "config.data.probe_length=8",
        ),
        (
            "copy",
            {"probe_test_lengths": (9, 8)},
            "config.data.probe_test_lengths=(9, 8): must be different integers of at "
            "least 1, other than config.data.probe_length",
        ),
        (
            "copy",
            {"probe_test_lengths": ("9",)},
            "config.data.probe_test_lengths=('9',): must be different integers",
        ),
        (
            "parity",
            {"probe_symbols": 3},
            "config.data.probe_symbols=3: synthetic:parity does not have this field; set it to 0",
        ),
        ("copy", {"probe_symbols": 1}, "config.data.probe_symbols=1: must be 0, or at least 2"),
        (
            "copy",
            {"probe_scratch": 1},
            "config.data.probe_scratch=1: synthetic:copy has no scratch tokens; set it to 0",
        ),
        ("inverse", {"probe_scratch": -1}, "config.data.probe_scratch=-1: must be at least 0"),
        (
            "recall",
            {"probe_symbols": 30, "probe_test_lengths": (16,)},
            "config.data.probe_symbols=30: 16 pairs need 32 symbols, half of them keys; increase "
            "it, or decrease config.data.probe_length",
        ),
        (
            "copy",
            {"probe_length": 40},
            "config.data.probe_length: an example of 40 symbols has 81 tokens, more than "
            "config.model.context_length=80; use a longer context or shorter examples",
        ),
        (
            "copy",
            {"probe_test_lengths": (64,)},
            "config.data.probe_test_lengths: an example of 64 symbols has 129 tokens",
        ),
    ],
)
def test_invalid_options(name, fields, message):
    with pytest.raises(UserError) as error:
        config = DataConfig(
            **{"source": f"synthetic:{name}", "tokenizer": "symbols", "store": "", **fields}
        )
        config.validate()
        corpus = load_or_prepare(config)
        corpus.pack("train", "concat", False, CONTEXT)
        corpus.test_rows(CONTEXT)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_probes_are_no_text():
    with pytest.raises(
        UserError, match="'synthetic:copy' is a probe, which has no text and cannot be combined"
    ):
        _ = Source("books/,synthetic:copy").members
    with pytest.raises(UserError, match="no probe 'copy,books/'"):
        load_or_prepare(config_of("copy,books/"))
    with pytest.raises(UserError, match="a probe has no token store"):
        open_or_prepare(config_of("copy"))
    with pytest.raises(UserError, match="tokenizer='symbols': writes only probes"):
        TokenizerSource("symbols").make()


def test_symbols_are_saved(tmp_path):
    tokenizer = corpus_of("recall").tokenizer
    tokenizer_folder.save(tokenizer, tmp_path)
    loaded = tokenizer_folder.load(tmp_path)
    assert tokenizers.fingerprint(loaded) == tokenizers.fingerprint(tokenizer)
    assert loaded.vocab_size == 65 and loaded.decode([0, 1, 33, 0]) == "k0 v0"
    assert loaded.encode([" k0  v31\n", ""])[0].tolist() == [1, 64]
    with pytest.raises(
        UserError, match=r"'v32': not a symbol of this probe; use k0 k1 .* …, separated by spaces"
    ):
        loaded.encode(["k0 v32"])


# ---------------------------------------------------------------------- measures


def test_measures_on_literal_arrays():
    """Rows: all three answers right; one of two wrong; wrong only outside of the mask; no answers
    (a row that fills a batch).
    """
    targets = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]])
    predictions = np.array([[1, 2, 3], [4, 0, 0], [0, 8, 9], [1, 1, 1]])
    mask = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)
    assert list(map(int, count_right(predictions, targets, mask))) == [6, 2, 3]

    def eval_step(batch):
        count = jnp.int32(mask.sum())
        return EvaluationSums(
            jnp.float32(14.0), count, count, count_right(predictions, targets, mask)
        )

    found = evaluate(eval_step, [0, 1])
    assert found == (
        2.0,
        14,
        {"exact_match": pytest.approx(2 / 3), "accuracy": pytest.approx(6 / 7)},
    )
    assert evaluate(eval_step, [0], lambda: True) is None


def test_the_mean_is_that_of_all_targets_in_the_loss():
    """Batches of other sizes; of the second, an objective has drawn half of the targets. All
    together have more targets than an int32 can count.
    """
    sums = [
        EvaluationSums(jnp.float32(4), jnp.int32(2), jnp.int32(2), None),
        EvaluationSums(jnp.float32(2e9), jnp.int32(2**30), jnp.int32(2**31 - 1), None),
        EvaluationSums(jnp.float32(2e9), jnp.int32(2**30), jnp.int32(2**31 - 1), None),
    ]
    counted = 2**31 + 2
    assert evaluate(sums.__getitem__, range(3)) == (
        pytest.approx(4e9 / counted, rel=1e-6),
        2**32,
        {},
    )
    assert evaluate(sums.__getitem__, [0]) == (2.0, 2, {})


@pytest.mark.parametrize("chunks", [1, 3])
def test_most_probable_tokens(chunks):
    rng = np.random.default_rng(0)
    x, head = (
        rng.normal(size=(2, 6, 8)).astype(np.float32),
        rng.normal(size=(11, 8)).astype(np.float32),
    )
    found = most_probable(jnp.asarray(x), jnp.asarray(head), chunks)
    np.testing.assert_array_equal(
        found, (x.astype(np.float64) @ head.T.astype(np.float64)).argmax(-1)
    )
