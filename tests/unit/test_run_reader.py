"""Reading workdirs as runs: training time, benchmarks, names."""

import json

from smallgpt_jax.comparison import run_reader
from smallgpt_jax.evaluation.scores import read_scores
from smallgpt_jax.run.config_file import write_config


def test_seconds_are_interpolated_and_extrapolated():
    lines = [
        {"step": 3, "split": "train", "tokens_per_second": 30.0},  # 10 tokens per step: 1 s
        {"step": 3, "split": "eval"},
        {"step": 6, "split": "train", "tokens_per_second": 15.0},
    ]
    logged = run_reader.training_seconds(lines, 10)
    assert logged == ([0, 3, 6], [0.0, 1.0, 3.0])
    assert [logged.at(step) for step in (3, 4.5, 6, 9)] == [1.0, 2.0, 3.0, 5.0]
    assert run_reader.training_seconds([], 10).at(3) is None


def test_benchmarks_of_the_last_step_and_the_whole_model(tmp_path):
    """`benchmarks` returns results of the given step only.

    It ignores results of a part of the model, of another dtype than the model's own, or of some
    examples of a task. Two results of the same task are separate entries if they differ in the
    number of shots or in the task's number of examples.
    """

    def write(
        name: str, score: float, shots: int = 0, examples: int = 100, scored: int | None = None
    ) -> None:
        scored = scored or examples
        content = {
            "results": {"copa": {"acc,none": score, "sample_len": scored}},
            "n-shot": {"copa": shots},
            "n-samples": {"copa": {"original": examples, "effective": scored}},
        }
        (tmp_path / name).write_text(json.dumps(content))

    for name, score in (
        ("step20-copa.json", 0.7),
        ("step10-copa.json", 0.1),
        ("step200-copa.json", 0.2),
        ("step20-paths0-copa.json", 0.3),
        ("step20-bfloat16-copa.json", 0.4),
        ("step20-without3-copa.json", 0.5),
    ):
        write(name, score)
    write("step20-copa-limit10.json", 0.9, scored=10)
    write("step20-copa-limit1000.json", 0.7, scored=100)
    write("step20-copa-5shot.json", 0.8, shots=5)
    write("step20-paper.json", 0.6, examples=1570)
    assert read_scores(tmp_path, 20) == {
        "copa acc (0-shot, 100 examples)": 0.7,
        "copa acc (5-shot, 100 examples)": 0.8,
        "copa acc (0-shot, 1,570 examples)": 0.6,
    }


def test_accuracies_of_whole_files_of_examples(tmp_path):
    def write(name: str, accuracy: float, **fields) -> None:
        content = {
            "examples": "/data/task/test.jsonl",
            "count": 1500,
            "is_whole": True,
            "results": {"accuracy": {"mean": accuracy, "standard_error": 0.1}},
        }
        (tmp_path / name).write_text(json.dumps({**content, **fields}))

    write("examples-step20-test-accuracy.json", 0.75)
    write("examples-step20-a-limit10.json", 0.1, is_whole=False)
    write("examples-step20-b.json", 0.1, is_whole=1)  # damaged
    write("examples-step200-test-accuracy.json", 0.1)
    assert read_scores(tmp_path, 20) == {"task/test.jsonl accuracy (1,500 examples)": 0.75}


def test_runs_of_one_model_have_one_name(tmp_path):
    """Tuned runs have the tokenizers of their own workdirs."""
    for name, rate in (("a-seed1", 0.1), ("a-seed2", 0.1), ("a-seed3", 0.2), ("b", 0.1)):
        (tmp_path / name).mkdir()
        write_config(
            tmp_path / name,
            {
                "model": {},
                "mesh": {},
                "data": {"tokenizer": f"runs/{name}/tokenizer"},
                "optimizer": {"learning_rate": rate},
                "train": {"seed": ord(name[-1])},
            },
        )
    named = run_reader.name_workdirs(sorted(tmp_path.iterdir()))
    assert [name for name, _ in named] == ["a", "a", "a (2)", "b"]
