"""Tests of the examples of prefix and masked language models, on batches of literal or random
tokens.
"""

import functools

import jax
import numpy as np

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.objectives.examples import answers, continuations, masked_tokens, row_keys

TOKENS = np.random.default_rng(0).integers(0, 90, (256, 41), np.int32)
SEGMENTS = np.repeat([1, 2, 3, 0], [1, 20, 12, 7])[None].repeat(256, axis=0)  # 0 is padding
BATCH = Batch(TOKENS, SEGMENTS, SEGMENTS > 0)


@jax.jit
def draw_prefixes(batch, seed):
    return continuations(batch, row_keys(jax.random.key(seed), batch))


@functools.partial(jax.jit, static_argnames="rate")
def draw_masked(batch, seed, rate):
    return masked_tokens(batch, row_keys(jax.random.key(seed), batch), rate=rate, mask_token=99)


def test_each_text_has_a_random_prefix():
    """The loss of a text begins with the target of its prefix's last position."""
    examples = draw_prefixes(BATCH, 0)
    in_prefix, in_loss = np.asarray(examples.prefix_BxT), np.asarray(examples.loss_mask_BxT)
    assert not in_loss[:, -7:].any()
    for start, end in ((0, 1), (1, 21), (21, 33)):
        lengths = in_prefix[:, start:end].sum(axis=1)
        places = np.arange(end - start)
        assert np.array_equal(in_prefix[:, start:end], places < lengths[:, None])
        assert np.array_equal(in_loss[:, start:end], places >= lengths[:, None] - 1)
        assert set(lengths) == set(range(end - start))  # 256 draws of at most 20 lengths
        assert abs(lengths.mean() - (end - start - 1) / 2) < 1
    assert np.array_equal(examples.inputs_BxT, TOKENS[:, :-1]) and np.array_equal(
        examples.targets_BxT, TOKENS[:, 1:]
    )
    assert np.array_equal(in_prefix, draw_prefixes(BATCH, 0).prefix_BxT)
    assert not np.array_equal(in_prefix, draw_prefixes(BATCH, 1).prefix_BxT)


def test_a_row_without_separate_documents_has_one_prefix():
    examples = draw_prefixes(Batch(TOKENS), 0)
    lengths = np.asarray(examples.prefix_BxT).sum(axis=1)
    assert np.array_equal(examples.prefix_BxT, np.arange(40)[None] < lengths[:, None])
    assert lengths.min() < 5 and 35 < lengths.max() < 40
    assert int(examples.num_targets) == np.sum(40 - np.maximum(lengths - 1, 0))
    padded = draw_prefixes(Batch(TOKENS, None, np.arange(40) < np.full((256, 1), 5)), 0)
    assert set(np.asarray(padded.prefix_BxT).sum(axis=1)) == set(range(5))  # of a text of 5


def test_masked_tokens_are_to_be_predicted():
    """Of the selected tokens, 80% become the mask token, and 10% a random token of the tokenizer
    (arXiv 1810.04805, section 3.1), which has 92 ids; the embedding has 100 rows.
    """
    batch = BATCH._replace(vocab_size_B=np.full(256, 92, np.int32))
    examples = draw_masked(batch, 0, 0.3)
    tokens, inputs, in_loss = (
        TOKENS[:, :-1],
        np.asarray(examples.inputs_BxT),
        np.asarray(examples.loss_mask_BxT),
    )
    assert np.array_equal(examples.targets_BxT, tokens)
    assert abs(in_loss[:, :33].mean() - 0.3) < 0.02 and not in_loss[:, 33:].any()
    is_selected = np.asarray(examples.selected_BxT)
    assert np.array_equal(inputs[~is_selected], tokens[~is_selected])
    is_masked, is_same = (inputs == 99)[is_selected], (inputs == tokens)[is_selected]
    assert abs(is_masked.mean() - 0.8) < 0.02 and abs(is_same.mean() - 0.101) < 0.02
    replaced = set(inputs[is_selected & (inputs != tokens)])
    assert replaced <= {*range(92), 99} and len(replaced) > 80
    assert (
        int(examples.num_targets) == in_loss.sum()
        and int(examples.all_targets) == SEGMENTS.astype(bool).sum()
    )
    assert not np.array_equal(inputs, draw_masked(batch, 1, 0.3).inputs_BxT)


def test_each_row_has_a_masked_token_that_counts():
    """As in BERT's code; at a rate of 1 per thousand, most rows of 33 tokens would have none."""
    examples = draw_masked(BATCH, 0, 0.001)
    counts = np.asarray(examples.loss_mask_BxT).sum(axis=1)
    assert counts.min() == 1 and counts.mean() < 1.1
    assert np.ptp(np.argmax(examples.loss_mask_BxT, axis=1)) > 25  # anywhere
    uncounted = draw_masked(BATCH._replace(loss_mask_BxT=np.zeros((256, 40), bool)), 0, 0.001)
    assert not np.any(uncounted.loss_mask_BxT)


def test_in_validation_a_row_has_the_same_examples_in_any_batch():
    """The batch has the rows 0, 3, 6, … of a split; the other one has some of them, reordered."""
    numbers, rows = np.arange(0, 768, 3, np.uint32), np.array([200, 3, 17])
    batch = BATCH._replace(row_numbers_B=numbers)
    some = jax.tree.map(lambda x: x[rows], batch)
    for draw in (draw_prefixes, functools.partial(draw_masked, rate=0.3)):
        examples, of_some = draw(batch, 0), draw(some, 0)
        assert np.array_equal(of_some.inputs_BxT, np.asarray(examples.inputs_BxT)[rows])
        assert np.array_equal(of_some.loss_mask_BxT, np.asarray(examples.loss_mask_BxT)[rows])
        assert not np.array_equal(of_some.loss_mask_BxT[0], of_some.loss_mask_BxT[1])


def test_the_prompt_of_each_text_is_its_prefix():
    """Two conversations, of which the first has a second answer, and padding. 1 marks the targets
    of answers.
    """
    counted = np.array([[0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0]], bool)
    segments = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    examples = jax.jit(answers)(Batch(TOKENS[:1, :13], segments, counted), None)
    assert np.asarray(examples.prefix_BxT)[0, :10].tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert np.array_equal(examples.loss_mask_BxT, counted) and int(examples.num_targets) == 4
