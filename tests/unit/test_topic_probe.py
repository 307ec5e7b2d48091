"""Tests of the texts and the classifier of experiments/topic_probe.py."""

import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments"))

import linear_probe
import topics


def test_the_probe_is_scikit_learns_logistic_regression():
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    labels, others = rng.integers(0, 3, 200), rng.integers(0, 3, 300)
    centers, scale = rng.standard_normal((3, 5)), np.array([1, 10, 0.1, 1, 0])
    train, test = (
        scale * (centers[group] + rng.standard_normal((len(group), 5)))
        for group in (labels, others)
    )
    mean, deviation = train.mean(axis=0), np.where(scale > 0, train.std(axis=0), 1)
    expected = (
        linear_model.LogisticRegression(C=1 / (linear_probe.PENALTY * 200), tol=1e-8, max_iter=1000)
        .fit((train - mean) / deviation, labels)
        .predict((test - mean) / deviation)
    )
    found = linear_probe.predict(train, labels, test)
    assert np.mean(found == expected) > 0.99 and 0.5 < np.mean(found == others) < 1


def test_texts_of_both_splits_are_from_different_files():
    found = topics.pieces(300, {"train": 20, "test": 10})
    assert {split: len(texts) for split, texts in found.items()} == {
        "train": 20 * len(topics.TOPICS),
        "test": 10 * len(topics.TOPICS),
    }
    assert all(150 <= len(text) <= 300 for texts in found.values() for _, text in texts)
    sources = {
        split: {
            topic: "".join(
                path.read_text(encoding="utf-8")
                for path in topics.files_of(topic)
                if topics.split_of(path) == split
            )
            for topic in topics.TOPICS
        }
        for split in topics.SPLITS
    }
    assert all(
        text in sources[split][topic] for split, texts in found.items() for topic, text in texts
    )
