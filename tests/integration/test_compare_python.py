"""Comparisons and choices as functions of the package."""

import json

from comparison_helpers import run, saved

import smallgpt_jax


def test_compare_and_choose_return_values(tmp_path):
    runs = []
    for seed in (1, 2, 3):
        runs.append(run("gpt", seed, 3.0 + seed / 100))
        runs.append(run("llama", seed, 2.5 + seed / 100, config={"model__norm": "rms"}))
    path = saved(tmp_path / "here" / "results.json", *runs)
    report = smallgpt_jax.merge_results([str(path)], tmp_path / "report")
    assert report.findings.ranking.chosen == "llama"
    assert [one.name for one in report.record.runs[:2]] == ["gpt", "llama"]
    assert "llama: loss 2.5" in str(report)
    written = json.loads((tmp_path / "report" / "results.json").read_text())
    assert written["ranking"]["chosen"] == "llama" and len(written["runs"]) == 6

    answer = smallgpt_jax.choose(tmp_path / "report" / "results.json", "parameters", 100)
    assert answer.choice.chosen == "llama" and "llama: loss 2.5" in str(answer)
    assert answer.run == "llama" and answer.config["train.steps"] == 2
