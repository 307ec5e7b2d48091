"""Records and workdirs of strangers: what is in them reaches neither a terminal nor a browser as
code.
"""

import json
import re
import shutil
import unicodedata

import pytest
from conftest import ROOT, build, call
from run_helpers import SMALL

from smallgpt_jax.conversion import model_card
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import escape_markdown, printable
from smallgpt_jax.storage.json_files import TEXT, Each, read_json

EVIL = "\x1b[31m\x9b2J<img src=x onerror=alert(1)>[click](http://example.com)\u202e\n\r## x|y"


def controls(text: str) -> set[str]:
    return {char for char in text if char != "\n" and unicodedata.category(char)[0] == "C"}


def poisoned(value):
    """Returns a copy of a JSON value with EVIL in all strings, and in the names of its objects."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    if isinstance(value, dict):
        return {name: poisoned(item) for name, item in value.items()}
    return value


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Returns a results.json with EVIL in all strings that its format allows."""
    content = json.loads((ROOT / "docs/results/example.json").read_text())
    for run in content["runs"]:
        run.update({name: poisoned(run[name]) for name in ("name", "workdir", "sessions", "texts")})
        run["config"] = {
            name: value + EVIL if name.startswith("data.") and isinstance(value, str) else value
            for name, value in run["config"].items()
        }
        run["benchmarks"] = {f"task{EVIL}": 0.5 + run["seed"] % 7 / 10}
        run["flops_problem"] = EVIL
    for name in ("title", "budget", "command", "reference"):
        content[name] += EVIL
    content["learning_rates"] = {
        name + EVIL: grid for name, grid in content["learning_rates"].items()
    }
    path = tmp_path_factory.mktemp("record") / "results.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.slow
def test_a_report_shows_a_record_as_text(record, tmp_path):
    result = call("compare", f"--results={record}", f"--output={tmp_path / 'report'}")
    assert result.returncode == 0, result.stderr
    assert "click" in result.stdout and not controls(result.stdout + result.stderr)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "onerror=alert" in page and "<img src=x" not in page
    assert not controls(page) and 'href="http://example.com' not in page
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "onerror=alert" in markdown and not re.search(r"(?<!\\)<img", markdown)
    assert not re.search(r"(?<!\\)\]\(http", markdown)
    assert not controls(markdown) and not re.search(r"^## x", markdown, re.MULTILINE)
    again = call(
        "compare",
        f"--results={tmp_path / 'report' / 'results.json'}",
        f"--output={tmp_path / 'report' / 'report.html' / 'x'}",
    )
    assert not controls(again.stderr)


def test_a_choice_shows_a_record_as_text(record):
    result = call("choose", f"--results={record}", "--flops=1e15")
    assert not controls(result.stdout + result.stderr) and result.returncode in (0, 1)
    assert "click" in result.stdout + result.stderr


@pytest.mark.slow
def test_messages_have_the_lines_of_the_program(record, tmp_path, trained_run):
    """A name of a field, or a file, may contain anything."""
    (tmp_path / "a.json").write_text(json.dumps({f"a\n\n{EVIL}": 1}))
    with pytest.raises(UserError) as error:
        read_json(tmp_path / "a.json", Each(TEXT), "remove it")
    assert "\n" not in str(error.value) and not controls(str(error.value))
    content = json.loads(record.read_text())
    content["runs"][0]["benchmarks"] = {EVIL * 2: "none"}
    (tmp_path / "results.json").write_text(json.dumps(content))
    for command, *flags in (["choose", "--flops=1e15"], ["compare", f"--output={tmp_path / 'o'}"]):
        result = call(command, f"--results={tmp_path / 'results.json'}", *flags)
        assert result.stderr.count("\n") <= 1 and not controls(result.stderr)
    run = tmp_path / "run"
    shutil.copytree(trained_run("gpt", **SMALL), run)
    described = json.loads((run / "config.json").read_text())
    described["model"]["architecture"] = EVIL
    (run / "config.json").write_text(json.dumps(described))
    result = call("generate", f"--workdir={run}")
    assert result.returncode == 1 and not controls(result.stderr)


@pytest.mark.slow
def test_the_readme_of_an_export(trained_run, tmp_path):
    """The names and values of origin.json, and the source in config.json."""
    run = tmp_path / "run"
    shutil.copytree(trained_run("gpt", **SMALL), run)
    described = json.loads((run / "config.json").read_text())
    described["data"]["source"] = f"hf:{EVIL}"
    (run / "config.json").write_text(json.dumps(described))
    (run / "origin.json").write_text(json.dumps({EVIL: EVIL}))
    card = model_card.format_model_card(
        "name", build("gpt", num_layers=1), model_card.training_facts(run, 0)
    )
    assert card.count("onerror=alert") == 3 and not controls(card)
    assert not re.search(r"(?<!\\)(<img|\]\(http://ex)", card)

    ordinary = "encodes `<|endoftext|>` in a text as ordinary text"
    assert "does not follow instructions" in card and ordinary in card
    tuned = model_card.format_model_card(
        "name", build("gpt", num_layers=1), [], is_chat=True, splits_special_tokens=None
    )
    assert "fine-tuned on conversations" in tuned and "tokenizer is not included" in tuned
    assert "does not follow instructions" not in tuned and ordinary not in tuned

    # Local paths name an account and its folders.
    text = "/home/ada/texts/,hf:ada/essays:en, ../b/*.txt,gs://b/c.txt,python_stdlib,~/d.jsonl"
    described["data"].update(source=text, tokenizer="/home/ada/tokenizer.json")
    (run / "config.json").write_text(json.dumps(described))
    (run / "origin.json").write_text(json.dumps({"weights from: text": "/home/ada/old"}))
    facts = dict(model_card.training_facts(run, 0))
    assert facts["text"] == "texts,hf:ada/essays:en,*.txt,gs://b/c.txt,python_stdlib,d.jsonl"
    assert facts["tokenizer"] == "tokenizer.json"
    assert facts["weights from: weights from: text"] == "old"
    described["data"]["mixture"] = "/home/ada/one=0.5,two=0.5"
    described["optimizer"].update(decay_steps=3908, learning_rate=0.0075, final_learning_rate=0.0)
    (run / "config.json").write_text(json.dumps(described))
    facts = dict(model_card.training_facts(run, 0))
    assert facts["text"] == "one=0.5,two=0.5"
    assert "learning rate 0.0075 to 0 at step 3,908 (cosine)" in facts["optimizer"]


def test_text_for_a_terminal_and_for_markdown():
    assert printable("a\x1b[1mb\nc\u202ed ü漢🙂") == "a [1mb c d ü漢🙂"
    assert escape_markdown(r"a < b, [4, 8], p<0.05, x_y*2") == r"a < b, [4, 8], p<0.05, x_y*2"
    assert escape_markdown(r"\<b> [a](c) | </x> [a]: b") == r"\\\<b> [a\](c) \| \</x> [a\]: b"
