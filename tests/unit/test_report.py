"""The report on findings: answers, verdicts, warnings, escaping, the same in all formats."""

import dataclasses
import html
import itertools
import json
import math
import re
import typing

import decision_helpers
import pytest
from comparison_helpers import INSIDE, SESSION, record, run

from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.analysis.findings import (
    Choice,
    Contest,
    Corpus,
    Curve,
    CurvePoint,
    Decisions,
    EqualFlops,
    Findings,
    FrontPoint,
    HeldOut,
    Laws,
    Measure,
    Mode,
    Multiplier,
    Outcome,
    Pair,
    Range,
    Rates,
    Refusal,
    Segment,
    Setup,
    Spread,
    Standing,
)
from smallgpt_jax.analysis.record import Grid, GridRate
from smallgpt_jax.errors import UserError
from smallgpt_jax.report import choosing, page, words
from smallgpt_jax.report.cautions import cautions
from smallgpt_jax.report.figures import read_logged
from smallgpt_jax.report.rendering import Table

NASTY = "<b>|*a*`[x](http://y)\x1b[31m\nb"  # the name of a model


def standing(model: str, loss: float, probability: float, **fields) -> Standing:
    defaults = {
        "model": model,
        "name": model,
        "loss": loss,
        "interval": Range(loss - 0.01, loss + 0.02),
        "modes": (),
        "probability": probability,
        "seeds": 3,
        "diverged": 0,
        "cost": 1e13,
        "parameters": 45264,
        "active_parameters": 45264,
        "tokens": 9.4e6,
        "steps": 2,
        "learning_rate": 0.003,
        "equal_to": (),
        "known": "trained",
        "potential": loss,
    }
    return Standing(**{**defaults, **fields})


def contest(*standings: Standing, chosen: str | None = None, **fields) -> Contest:
    """Returns a contest whose pairs are not told apart, except from the third model on."""
    pairs = []
    for first, second in itertools.combinations(standings, 2):
        difference = second.loss - first.loss
        is_clear = second in standings[2:]
        verdict = "higher" if is_clear else "cannot tell"
        needed = None if is_clear else Range(4.0, 60.0)
        interval = Range(difference - 0.05, difference + 0.05)
        pairs.append(Pair(second.model, first.model, 3, difference, interval, 0.2, verdict, needed))
    defaults = {
        "standings": standings,
        "pairs": tuple(pairs),
        "chosen": chosen,
        "refusal": None if chosen else "uncertain",
        "blockers": () if chosen else tuple(one.model for one in standings[1:2]),
        "at_stake": 0.03,
    }
    return Contest(**{**defaults, **fields})


THREE = (standing("moe", 2.8704, 0.93), standing("llama", 2.9291, 0.07), standing("gpt", 3.1, 0.0))


def choice(budget: str = "flops", limit: float = 1e13, **fields) -> Choice:
    defaults = {
        "budget": budget,
        "limit": limit,
        "batch": 1,
        "chosen": None,
        "refusal": "uncertain",
        "contest": contest(*THREE),
        "compared_at": limit,
        "factor": None,
        "front": (),
        "devices": (),
    }
    return Choice(**{**defaults, **fields})


def findings(**fields) -> Findings:
    corpus = Corpus("books.txt", 44_100_000, "sentencepiece:1024", 1024, 0.21)
    setup = Setup(
        corpus=corpus,
        models=("moe", "llama", "gpt"),
        sizes=("",),
        seeds=(1, 2, 3),
        parameters=Range(45264, 45264),
        tokens=Range(9.4e6, 9.4e6),
        steps=Range(4592, 4592),
        context_lengths=(256,),
        batch_tokens=Range(2048, 2048),
        runs=9,
        unfinished=0,
        hours=31.2,
        devices=("2 × cpu",),
        software=("jax 0.10.2",),
        dates=("2026-11-23", "2026-11-24"),
        validation_tokens=131072,
    )
    defaults = {
        "setup": setup,
        "reference": "gpt",
        "ranking": contest(*THREE),
        "ranked_size": "",
        "choices": (),
        "equal_flops": (),
        "multipliers": (),
        "laws": None,
        "held_out": None,
        "rates": (),
        "untried": {},
        "measures": (),
        "curves": (),
    }
    return Findings(**{**defaults, **fields})


def rates(name: str, own_rate: float, losses: dict[float, float], seed: int = 0, **fields) -> Rates:
    """Returns the findings on a grid, {multiple: loss}."""
    grid_rates = []
    for multiple, loss in losses.items():
        diverged = math.isinf(loss)
        grid_rates.append(GridRate(multiple, None if diverged else loss, diverged))
    grid = Grid(seed, own_rate, tuple(grid_rates))
    return Rates(name, grid, **{"plausible": (), "minimum": None, **fields})


RUNS = [run(model, seed, 3.0) for seed in (1, 2) for model in ("moe", "llama", "gpt")]


def markdown(found: Findings, *runs) -> str:
    return page.markdown(record(*(runs or RUNS)), found)


def row(text: str, first: str) -> list[str]:
    """Returns the cells of the first row of a Markdown table that begins with a cell."""
    (line, *_) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# ------------------------------------------------------------------ answers
def test_the_answer_comes_first():
    chosen = choice(limit=1e12, chosen="moe", refusal=None, contest=contest(*THREE, chosen="moe"))
    text = markdown(findings(choices=(chosen, choice())))
    first_screen, *chapters = text.split("\n## ")
    assert (
        "With 1e13 training FLOPs: **cannot tell**: moe (93%) or llama (7%) may be the best. moe is "
        "at most 0.03 nats above the lowest loss, with a probability of 90%." in first_screen
    )
    assert row(first_screen, "1e12") == ["1e12", "moe (93%)", "2.870 (2.860 to 2.890)", "–", "–"]
    assert row(first_screen, "1e13")[1:] == [
        "cannot tell: moe (93%) or llama (7%)",
        "2.870 (2.860 to 2.890)",
        "0.03",
        "4 to 60",
    ]
    assert "31 hours on 2 × cpu" in first_screen and "reads 21%" in first_screen
    assert len(first_screen) < 3000 and chapters


def test_a_record_of_one_budget_is_answered_by_its_ranking():
    text = markdown(findings(ranking=contest(*THREE, chosen="moe")))
    assert "Lowest loss: **moe**: loss 2.870 (2.860 to 2.890), the lowest with a" in text
    text = markdown(findings(ranking=None))
    assert "no two models are finished whose losses can be compared" in text


def test_what_was_trained_with_more_is_said():
    """conv was not trained for longer, but hybrid was: the answer at equal FLOPs is not the last."""
    best = FrontPoint("hybrid", "hybrid@1M", 3.44e13, 2.5, 45264, 45264, 9.4e6)
    text = markdown(findings(choices=(choice(limit=1e12), choice(front=(best,)))))
    said = "With more, 3.44e13 FLOPs, hybrid@1M has the lowest loss of all runs, 2.500."
    assert said in text
    same = dataclasses.replace(best, cost=1e13)
    assert "With more" not in markdown(findings(choices=(choice(), choice(front=(same,)))))


def test_a_ranking_says_that_its_models_had_different_flops():
    dearer = dataclasses.replace(THREE[1], cost=2e13)
    text = markdown(findings(ranking=contest(THREE[0], dearer, THREE[2])))
    said = "with 1e13 (moe) to 2e13 (llama) FLOPs: at equal FLOPs, the order may be another"
    assert said in text and "as they were trained" not in markdown(findings())


def test_each_pair_has_one_verdict_wherever_it_is_shown():
    text = markdown(findings(choices=(choice(limit=1e12), choice())))
    chapter = text.split("Which differences are real")[1].split("\n## ")[0]
    assert row(chapter, "llama")[2:4] == ["-0.1709 (-0.2209 to -0.1209)", "lower"]
    pairs = [line.split("|")[1:6] for line in chapter.splitlines() if line.count("|") == 8]
    shown = {(cells[0].strip(), cells[1].strip(), cells[4].strip()) for cells in pairs[-2:]}
    assert shown == {("llama", "moe", "cannot tell"), ("gpt", "llama", "higher")}
    # One number of seeds for the pair of the first two, in the answer and beside the verdict.
    assert text.count("4 to 60") == 3 and "4 to 61" not in text


@pytest.mark.parametrize("refusal", typing.get_args(Refusal))
def test_each_refusal_has_its_sentence(refusal):
    answer = choice(refusal=refusal, factor=3.125, compared_at=None, contest=None)
    if refusal in ("uncertain", "dearer", "more training", "not measured"):
        answer = choice(refusal=refusal, contest=contest(*THREE, refusal=refusal))
    sentence = words.refusal(answer)
    text = str(choosing.Answer(answer))
    assert " ".join(sentence.split()) in " ".join(text.split())
    mark = ": " if refusal == "uncertain" else ". "
    assert text.startswith(f"1e13 training FLOPs: cannot tell{mark}")
    expected = {
        "beyond": "3.12 times",
        "nothing within": "0.32 times",
        "not measured": "llama may be the best, but its training FLOPs were not measured",
    }
    assert expected.get(refusal, "") in sentence


def test_an_answer_at_the_nearest_budget():
    answer = choice(limit=1e14, refusal="beyond", factor=3.4, compared_at=2.93e13)
    text = " ".join(str(choosing.Answer(answer)).split())
    assert "At 2.93e13, the nearest budget with runs: moe (93%) or" in text
    text = markdown(findings(choices=(choice(limit=1e12), choice(), answer)))
    assert row(text, "1e14")[1] == "cannot tell: 3.4 times as much as was trained"


def test_probabilities_are_only_of_known_losses():
    """llama may be the best with more training. That is no probability."""
    open_contest = contest(*THREE, refusal="more training", trained=THREE[:1])
    answer = choice(refusal="more training", contest=open_contest)
    text = markdown(findings(choices=(choice(limit=1e12), answer)))
    assert row(text, "1e13")[1] == "cannot tell: moe; or llama with more training"
    shown = " ".join(str(choosing.Answer(answer)).split())
    assert "P(lowest loss)" not in shown and "7%" not in shown
    assert "llama may be the best with the whole budget, but was trained with less" in shown
    assert "Of what was trained within it, moe has the lowest loss." in shown
    first, second, third = THREE
    level = dataclasses.replace(open_contest, trained=(first, third))
    shown = " ".join(str(choosing.Answer(dataclasses.replace(answer, contest=level))).split())
    assert "all of it, moe (93%) or gpt (under 1%) may be the best." in shown
    cheaper = (first, dataclasses.replace(second, known="cheaper"), third)
    several = dataclasses.replace(open_contest, standings=cheaper, blockers=("llama", "gpt"))
    sentence = words.refusal(dataclasses.replace(answer, contest=several))
    # gpt's loss at the budget is known
    assert sentence.startswith("llama may be the best")
    several = dataclasses.replace(open_contest, blockers=("llama", "gpt"))
    sentence = words.refusal(dataclasses.replace(answer, contest=several))
    assert sentence.startswith("llama or gpt may be the best")
    assert "but they were trained with less" in sentence


def test_a_report_on_two_models_that_have_diverged():
    """They have no verdict on each other, and neither is the reference."""
    made = decision_helpers.record(
        decision_helpers.runs("a", [3.0, 3.1, 3.05]),
        decision_helpers.runs("b", [math.inf, 3.0]),
        decision_helpers.runs("c", [math.inf, 3.0]),
        reference="b",
    )
    text = page.markdown(made, analyse(made))
    assert "reference" in row(text, "b") and "reference" not in row(text, "c")


def test_modes_and_diverged_seeds_are_said():
    modes = (Mode(1 / 3, 2.2924, 1), Mode(2 / 3, 2.6, 2))
    first = standing("llama", 2.5, 0.6, modes=modes, interval=None)
    second = standing("lgpt", math.inf, 0.0, diverged=2, interval=None, equal_to=("cgpt",))
    text = markdown(findings(ranking=contest(first, second, chosen="llama")))
    assert "**2.500 (2.292 in 33% and 2.600 in 67% of the seeds)**" in row(text, "**llama**")
    assert row(text, "lgpt (the same function: cgpt)")[1] == "diverged (2 of 3 seeds)"


def test_all_choices_of_a_budget_are_in_one_table():
    front = (FrontPoint("moe", "moe@1M", 45264, 2.9, 45264, 45264, 9.4e6),)
    choices = [choice("parameters", limit, front=front) for limit in (45264.0, 213_000.0)]
    alone = choice("parameters", 900.0, chosen="moe", contest=contest(THREE[0], chosen="moe"))
    text = markdown(findings(choices=(alone, *choices)))
    assert "| parameters, at most | model (how sure) |" in text
    assert row(text, "45.3 k") and row(text, "213 k")
    assert row(text, "900")[1] == "moe (the only model)"
    assert "P(lowest loss)" not in str(choosing.Answer(alone))
    answer = str(choosing.Answer(choices[1]))
    assert re.search(r"best for the cost +loss +cost", answer) and "moe@1M" in answer


# ------------------------------------------------------------------ chapters
def test_chapters_are_those_of_the_findings():
    outcome = Outcome("moe", 9.4e6, 2.5, Range(2.4, 2.6), 2.7, 3)
    decisions = Decisions(12, 13)
    text = markdown(
        findings(
            choices=(choice(limit=1e12), choice()),
            multipliers=(
                Multiplier("moe", "gpt", 1e12, 1.43, Range(1.27, 1.61), None),
                Multiplier("moe", "gpt", 1e13, None, None, "not reached"),
            ),
            equal_flops=(EqualFlops("moe", "gpt", (Segment(4e10, 1e13, "moe"),), (), (), (), ()),),
            laws=Laws("size and tokens", "0.47M", 0.08, decisions, Decisions(13, 13)),
            held_out=HeldOut(
                "0.47M",
                "2026-11-23T18:30:00",
                "d3e9aa",
                (outcome,),
                0.2,
                0.0,
                decisions,
                Decisions(13, 13),
            ),
            rates=(rates("moe", 0.008, {0.5: 4.2, 1.0: math.inf}, plausible=(0.5,)),),
            measures=(
                Measure(
                    "speed",
                    "tokens_per_second",
                    {"moe": Spread(1200.0, 1100.0, 1300.0)},
                    (),
                ),
            ),
        )
    )
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == [
        "What limits these answers",
        "Which differences are real?",
        "What does each model reach at equal FLOPs?",
        "Do larger models keep the order?",
        "Is every model at its best learning rate?",
        "How fast do they train?",
        "How were the models trained?",
        "Runs",
    ]
    assert "| moe | 1.43 (1.27 to 1.61) | does not reach this loss |" in text
    assert "| moe | 4e10 to 1e13: moe |" in text
    assert "| moe | 9.4 M | 2.500 (2.400 to 2.600) | 2.700 | +0.200 | no | 3 |" in text
    assert "| moe | 0.008 | 4.200 | diverged | 0.004, the lowest tried | × 0.5 |" in text
    assert "| moe | 1,200 (1,100 to 1,300) |" in text
    assert "(form: size and tokens) miss" in text and "have 12 in the right order" in text


def test_cautions_name_what_limits_the_answers():
    found = findings(
        untried={"gpt@1M": 20.0},
        rates=(
            rates("moe", 0.01, {0.5: 3.1, 1.0: 3.0}, seed=1),
            # as in a merged record, where only moe has this seed
            rates("gpt", 0.01, {0.5: 3.1, 1.0: 3.0}, seed=1),
        ),
    )
    diverged = run("pgpt@1M", 2, 3.0, diverged=True, steps_done=12, horizon=0.5)
    unfinished = dataclasses.replace(RUNS[0], is_finished=False, steps_done=1)
    other = dataclasses.replace(RUNS[1], uncounted=0.5, curve=RUNS[1].curve[:1])
    few = dataclasses.replace(found.setup, validation_tokens=16_383)
    found = dataclasses.replace(found, setup=few)
    counts = {"files": 3, "passages": 90, "validation_files": []}
    passages = {**other.text.description, "plain_text": {"split_by_file": False, **counts}}
    unfinished = dataclasses.replace(
        unfinished, text=dataclasses.replace(unfinished.text, description=passages)
    )
    text = " ".join(cautions(found, record(unfinished, other, diverged)))
    for expected in (
        "pgpt@1M × 0.5, seed 2, diverged at step 12",
        "Unfinished: moe, seed 1, at step 1 of 2.",
        "The best learning rate is the highest that was tried",
        "The seed that chose the learning rate is also in the mean, which is therefore too low: moe.",
        "is the best one for 1 of 3 sizes of models (20 tokens per parameter), so even more",
        "No run has more than 2 tokens per parameter",
        "Other arithmetic (norms, softmax, recurrences) comes on top: 0% in moe to 50% in llama",
        "Only one learning rate was tried for llama, pgpt; at",
        "means over only 16,383 validation tokens",
        "The validation tokens are passages of files that are also trained on",
    ):
        assert expected in text
    tried = findings(rates=(rates("gpt", 0.01, {0.5: 3.1, 1.0: 3.0}),))
    text = " ".join(cautions(tried, record(*RUNS)))
    assert "Only one learning rate was tried for moe, llama; at" in text
    for word in ("Unfinished", "machines", "validation tokens"):
        assert word not in text
    rates_tried = [run("a", 1, 3.0), run("b", 1, 3.0, config={"optimizer__learning_rate": 0.1})]
    assert "Only one learning" not in " ".join(cautions(findings(), record(*rates_tried)))
    assert cautions(findings(), record()) == ["The comparison has no runs."]


def test_runs_of_several_machines_are_counted():
    """Processors of one name are told apart by family and model."""
    zen3, zen4 = ({"cpu family": "25", "model": model} for model in ("1", "17"))
    sessions = [dataclasses.replace(SESSION, processor=processor) for processor in (zen3, zen4)]
    runs = [dataclasses.replace(one, sessions=(sessions[one.seed - 1],)) for one in RUNS[:4]]
    (text,) = [line for line in cautions(findings(), record(*runs)) if "machines" in line]
    counts = "1 × cpu, cpu family 25, model 1 (3 runs); 1 × cpu, cpu family 25, model 17 (1 run)."
    assert counts in text and "a single seed of each tells nothing" in text


def test_columns_of_numbers_are_aligned_to_the_right():
    rows = (("a", "1.2 (1.1 to 1.3)", "no runs", "1e9 to 1e10: a"), ("b", "–", "0.4", "–"))
    table = Table(("model", "loss", "multiplier", "better"), rows)
    assert table.alignments == ("text", "number", "number", "text")


def test_configs_that_differ_are_listed_by_model():
    wide = run("moe", 1, 3.0, config={"model__d_model": 32})
    text = markdown(findings(), wide, *RUNS[1:3])
    assert "| moe | model.d_model=32 |" in text


# ------------------------------------------------------------------ formats
def nasty() -> Findings:
    standings = (standing(NASTY, 2.9, 0.99), standing("gpt", 3.0, 0.01))
    return findings(ranking=contest(*standings, chosen=NASTY), choices=(choice(),))


def test_everything_is_escaped():
    runs = [run(NASTY, 1, 2.9), run("gpt", 1, 3.0)]
    content = record(*runs, title="<script>x</script>", command="a\n```\n<b>")
    text = page.markdown(content, nasty())
    assert "\x1b" not in text and not re.search(r"(?<!\\)<b>", text.replace("    a ``` <b>", ""))
    assert r"\<b>\|*a*`[x\](http://y) [31m b" in text
    assert text.startswith(r"# \<script>x\</script>")
    shown = page.summary(content, nasty())
    assert "\x1b" not in shown and "[x](http://y) [31m b" in shown


@pytest.mark.draws
def test_the_files_of_a_report(tmp_path):
    curve = Curve("gpt", tuple(CurvePoint(t, t, Spread(3.0, 2.9, 3.1)) for t in (1.0, 2.0)))
    budgets = (1e12, 1e13)
    order = EqualFlops("moe", "gpt", (), budgets, (-0.1, 0.0), (-0.2, -0.1), (0.0, 0.1))
    found = dataclasses.replace(
        nasty(),
        curves=(curve,),
        equal_flops=(order,),
        rates=(rates("gpt", 0.01, {0.5: 3.2, 1.0: 3.0, 2.0: 3.1}, minimum=1.0),),
        choices=(choice(), choice("decode_ms", 5.0)),
    )
    runs = [run(NASTY, 1, 2.9, inside=INSIDE), run("gpt", 1, 3.0), run("moe", 1, 3.0)]
    page.write(tmp_path, record(*runs), found)
    figures = {path.stem for path in tmp_path.glob("*.png")}
    assert figures == {
        "answer",
        "loss-tokens",
        "loss-flops",
        "learning-rates",
        "inside",
    }
    text = (tmp_path / "report.html").read_text()
    assert text.count("<figure>") == 4  # the others belong to chapters that this page lacks
    assert "<b>|" not in text and html.escape(NASTY[:10]) in text
    assert text.index('class="answer"') < text.index("<figure>") < text.index("<h2>")
    cells = re.findall(r"<td [^>]*", text)
    assert cells and all(
        "data-head=" in cell for cell in cells
    )  # on phones, each cell shows its column's head
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["ranking"]["chosen"] == NASTY and len(content["runs"]) == 3


def test_logged_curves(tmp_path):
    path = tmp_path / "logged.csv"
    path.write_text("model,step,val_loss\ngpt,1,5.0\ngpt,2,4.0\n")
    assert read_logged(path) == {"gpt": [(524288, 5.0), (1048576, 4.0)]}
    for text in ("model,step\n", "model,step,val_loss\n", "model,step,val_loss\ngpt,x,1\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"^--logged=.*model,step,val_loss"):
            read_logged(path)


@pytest.mark.parametrize(
    "formatted, expected",
    [
        (words.exponent(2.93e13), "2.93e13"),
        (words.exponent(1e9), "1e9"),
        (words.amount(45264), "45.3 k"),
        (words.amount(999_700), "1 M"),
        (words.amount(None), "–"),
        (words.percent(0.999), "over 99%"),
        (words.percent(0.001), "under 1%"),
        (words.seeds_needed(Range(3.2, 2000.0)), "4 to over 1,000"),
        (words.seeds_needed(Range(2000.0, 3000.0)), "over 1,000"),
        (words.seeds_needed(None), "–"),
        (words.loss(math.inf), "diverged"),
        (words.plural(1, "run"), "1 run"),
        (words.enumeration(["a", "b", "c"], "or"), "a, b or c"),
        (words.limit(2.5e6, "memory"), "2.5 MB"),
    ],
)
def test_numbers_in_words(formatted, expected):
    assert formatted == expected
