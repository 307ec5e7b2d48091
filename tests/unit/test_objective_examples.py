"""Tests of the examples of prefix and masked language models, on batches of literal or random
tokens.
"""

import functools

import jax
import numpy as np

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.objectives.examples import answers, continuations, masked_tokens

TOKENS = np.random.default_rng(0).integers(0, 90, (256, 41), np.int32)
SEGMENTS = np.repeat([1, 2, 3, 0], [1, 20, 12, 7])[None].repeat(256, axis=0)  # 0 is padding
BATCH = Batch(TOKENS, SEGMENTS, SEGMENTS > 0)


@jax.jit
def draw_prefixes(batch, seed):
    return continuations(batch, jax.random.key(seed))


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


def test_masked_tokens_are_to_be_predicted():
    """Of the selected tokens, 80% become the mask token, and 10% a random token (arXiv 1810.04805,
    section 3.1).
    """
    draw = jax.jit(functools.partial(masked_tokens, rate=0.3, vocab_size=100))
    examples = draw(BATCH, jax.random.key(0))
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
    assert abs(is_masked.mean() - 0.801) < 0.02 and abs(is_same.mean() - 0.101) < 0.02
    assert len(set(inputs[is_selected & (inputs != tokens)])) > 90  # of 100 random tokens
    assert (
        int(examples.num_targets) == in_loss.sum()
        and int(examples.all_targets) == SEGMENTS.astype(bool).sum()
    )
    assert not np.array_equal(inputs, draw(BATCH, jax.random.key(1)).inputs_BxT)


def test_the_prompt_of_each_text_is_its_prefix():
    """Two conversations, of which the first has a second answer, and padding. 1 marks the targets
    of answers.
    """
    counted = np.array([[0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0]], bool)
    segments = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    examples = jax.jit(answers)(Batch(TOKENS[:1, :13], segments, counted), jax.random.key(0))
    assert np.asarray(examples.prefix_BxT)[0, :10].tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert np.array_equal(examples.loss_mask_BxT, counted) and int(examples.num_targets) == 4
