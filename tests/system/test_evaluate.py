"""A test of the command `evaluate`, started as users start it."""

import json

import pytest
from conftest import build, init, run

from smallgpt_jax.data import tokenizers
from smallgpt_jax.run.workdir import ImportedModel, write_imported

pytestmark = pytest.mark.slow


def test_evaluate(tmp_path):
    """The command prints a table of results, and writes the table and the JSON of
    lm-evaluation-harness to files.

    Covers --num_fewshot and --limit. Standard error contains only progress messages.
    """
    workdir = tmp_path / "run"
    model = build("gpt", num_layers=1, context_length=32)
    write_imported(workdir, ImportedModel(model, init(model), tokenizers.Bytes()), {})
    copa = {"choice1": "It broke.", "choice2": "It flew away.", "question": "effect"}
    lines = [
        json.dumps(copa | {"premise": f"Cup {i} fell.", "label": i % 2, "idx": i}) for i in range(7)
    ]
    (tmp_path / "copa_val.jsonl").write_text("\n".join(lines))
    (tmp_path / "wikitext2_valid.txt").write_text(
        "".join(f" \n = Cup {i} = \n \n A cup is a thing . \n" for i in range(7))
    )
    result = run(
        "evaluate",
        f"--workdir={workdir}",
        "--tasks=copa,wikitext",
        f"--data_dir={tmp_path}",
        "--num_fewshot=1",
        "--limit=6",
        "--batch_tokens=64",
    )
    assert result.returncode == 0, result.stderr
    assert not [line for line in result.stderr.splitlines() if "left" not in line], result.stderr
    assert "| copa | 6 | 1 | acc |" in result.stdout and "| 0.5000 | 0.5100 |" in result.stdout
    assert (
        "| wikitext | 6 | 1 | bits_per_byte |" in result.stdout
        and "whole vocabulary" in result.stdout
    )
    (path,) = (workdir / "evaluations").glob("step0-copa_wikitext-1shot-limit6-*.json")
    results = json.loads(path.read_text())
    assert results["results"]["wikitext"]["word_perplexity,none"] > 1
    assert results["n-shot"]["copa"] == 1
    assert path.with_suffix(".md").read_text() in result.stdout
