"""A test of the command `evaluate`, started as users start it."""

import json
import shutil

import pytest
from conftest import run
from run_helpers import SMALL

pytestmark = pytest.mark.slow


def test_evaluate(trained_run, tmp_path):
    """The command prints a table of results, and writes the table and the JSON of
    lm-evaluation-harness to files.

    Covers --num_fewshot and --limit. Standard error contains only progress messages.
    """
    workdir = tmp_path / "run"
    shutil.copytree(trained_run("gpt", **SMALL), workdir)
    copa = {"choice1": "It broke.", "choice2": "It flew away.", "question": "effect"}
    rows = {
        "copa_val": [
            copa | {"premise": f"Cup {i} fell.", "label": i % 2, "idx": i} for i in range(7)
        ],
        "lambada_openai_test": [
            {"text": f"She had lost {i} cups and looked for the cups"} for i in range(7)
        ],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "wikitext2_valid.txt").write_text(
        "".join(f" \n = Cup {i} = \n \n A cup is a thing . \n" for i in range(7))
    )
    result = run(
        "evaluate",
        f"--workdir={workdir}",
        "--tasks=copa,lambada_openai,wikitext",
        f"--data_dir={tmp_path}",
        "--num_fewshot=1",
        "--limit=6",
    )
    assert result.returncode == 0, result.stderr
    assert not [line for line in result.stderr.splitlines() if "left" not in line], result.stderr
    assert "| copa | 6 | 1 | acc |" in result.stdout and "| 0.5000 | 0.5100 |" in result.stdout
    assert (
        "| wikitext | 6 | 1 | bits_per_byte |" in result.stdout
        and "whole vocabulary" in result.stdout
    )
    name = "step40-copa_lambada_openai_wikitext-1shot-limit6"
    results = json.loads((workdir / "evaluations" / f"{name}.json").read_text())
    assert (
        results["results"]["lambada_openai"]["perplexity,none"] > 1
        and results["n-shot"]["copa"] == 1
    )
    assert (workdir / "evaluations" / f"{name}.md").read_text() in result.stdout
