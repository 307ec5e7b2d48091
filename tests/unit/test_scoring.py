"""Tests of the parts of evaluation that need no model: windows, static lengths, data files and
tables.
"""

import json

import numpy as np
import pytest

from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import lm_eval_tasks, local_data, report
from smallgpt_jax.evaluation.scoring import split_into_sequences, static_lengths

EXAMPLES = {
    "hellaswag": 10042,
    "winogrande": 1267,
    "commonsense_qa": 1221,
    "piqa": 1838,
    "copa": 100,
    "arc_easy": 570,
    "lambada_openai": 5153,
    "wikitext": 60,
}


def test_windows_score_each_token_once_with_as_much_context_as_possible():
    """The example is that of lm-evaluation-harness: a BOS token and ten more tokens, with a context
    of four tokens.
    """
    tokens = ["BOS", *range(10)]
    assert split_into_sequences(tokens, 1, 4) == [
        (["BOS", 0, 1, 2, 3], 4),
        ([3, 4, 5, 6, 7], 4),
        ([5, 6, 7, 8, 9], 2),
    ]
    # A question longer than the context loses its beginning.
    assert split_into_sequences(tokens, 9, 4) == [([5, 6, 7, 8, 9], 2)]
    assert split_into_sequences(tokens, 9, 40) == [(tokens, 2)]
    assert split_into_sequences(tokens, 11, 4) == []


def test_static_lengths_are_few_and_fit():
    needed = np.random.default_rng(0).geometric(0.02, 5000).clip(1, 1000)
    lengths = static_lengths(needed, 1024)
    assert len(lengths) <= 6 and lengths == sorted(set(lengths)) and lengths[-1] >= needed.max()
    filled = np.array(lengths)[np.searchsorted(lengths, needed)]
    assert needed.sum() / filled.sum() > 0.7
    even = np.linspace(
        needed.max() / 6, needed.max(), 6
    )  # for comparison: six evenly spaced lengths
    assert filled.sum() < 0.8 * even[np.searchsorted(even, needed)].sum()
    assert static_lengths([3, 20, 20, 64], 64) == [16, 32, 64]
    assert static_lengths([70], 70) == [70] and static_lengths([], 64) == []


def test_results_table_of_a_group():
    """In the row of a group of tasks, the number of examples is empty, because
    lm-evaluation-harness gives none.
    """
    results = {
        "results": {
            "mmlu": {"alias": "mmlu", "acc,none": 0.25, "acc_stderr,none": 0.01},
            "copa": {"alias": "copa", "sample_len": 100, "acc,none": 0.5, "acc_stderr,none": "N/A"},
        },
        "n-shot": {"copa": 0},
    }
    lines = report.results_table(results, "lgpt").splitlines()
    assert lines[2] == "| mmlu |  |  | acc | 0.2500 ± 0.0100 |  |  |"
    assert lines[3] == "| copa | 100 | 0 | acc | 0.5000 | 0.5000 | 0.5200 |"


def test_local_files_have_the_right_number_of_examples(shared_data):
    for name, count in EXAMPLES.items():
        task = local_data.TASKS[name]
        assert (
            len(task.read(*((shared_data / "eval" / file).read_text() for file in task.files)))
            == count
        )


def test_anli_and_full_hellaswag_files():
    row = {"uid": "1", "context": "A.", "hypothesis": "B.", "label": "n", "reason": ""}
    assert local_data.anli(json.dumps(row)) == [{"premise": "A.", "hypothesis": "B.", "label": 1}]
    row = {
        "activity_label": "Baking",
        "ctx_a": "A cake [title] is",
        "ctx_b": "she",
        "label": 2,
        "endings": ["a [step] b.", "c.", "d.", "e."],
    }
    assert local_data.hellaswag(json.dumps(row)) == [
        {"query": "Baking: A cake. is She", "choices": ["a b.", "c.", "d.", "e."], "label": 2}
    ]


def test_data_that_cannot_be_loaded():
    class Offline:
        def load(self, specs):
            raise ConnectionError("no network")

    with pytest.raises(
        UserError, match=r"cannot load the data of 'piqa' \(no network\); .*--data_dir"
    ):
        lm_eval_tasks.load_tasks(["piqa"], Offline(), None)
