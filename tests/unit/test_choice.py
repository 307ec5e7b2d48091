"""Tests of the choice of a model, on constructed records: winner, tie, extrapolation, missing
measure, experts.
"""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, call
from scipy import stats

from smallgpt_jax.comparison import candidates, choice, contest, costs
from smallgpt_jax.errors import UserError


def make_run(
    name: str,
    seed: int,
    loss: float,
    parameters: int = 1_000_000,
    tokens: int = 20_000_000,
    **fields,
):
    point = {
        "step": 100,
        "tokens": tokens,
        "flops": 6.0 * parameters * tokens,
        "seconds": tokens / 1e5,
        "loss": loss,
    }
    return {
        "name": name,
        "workdir": f"runs/{name}-seed{seed}",
        "seed": seed,
        "is_finished": True,
        "diverged": False,
        "config": {"model.d_model": 64, "train.steps": 100, "optimizer.decay_steps": 100},
        "parameters": parameters,
        "active_parameters": parameters,
        "components": {"token embedding": 1000},
        "curve": [{**point, "step": 0, "tokens": 0, "flops": 0.0, "loss": 9.0}, point],
        "memory_bytes": 16 * parameters,
        "weight_bytes": 4 * parameters,
        "inference": inference(2.0),
        **fields,
    }


def inference(
    ms: float, ms_of_32: float = 10.0, cache_bytes: int = 1000, device: str = "cpu"
) -> dict:
    """Returns measurements of decoding steps with a full cache."""
    return {
        "device": device,
        "cache_bytes": cache_bytes,
        "decoding": [
            {"batch": batch, "cache": cache, "step_ms": {"median": value}}
            for batch, full in ((1, ms), (32, ms_of_32))
            for cache, value in (("empty", full / 2), ("full", full))
        ],
    }


def make_runs(
    losses: dict[str, float], noise: float = 0.005, seeds: int = 3, seed: int = 0, **fields
) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        make_run(name, i, loss + noise * rng.standard_normal(), **fields)
        for name, loss in losses.items()
        for i in range(seeds)
    ]


@pytest.fixture
def ask(tmp_path):
    def answer(
        runs: list[dict], budget: str, limit: float, batch: int = 1, **results
    ) -> choice.Answer:
        path = tmp_path / "results.json"
        path.write_text(json.dumps({"title": "t", "format": 1, **results, "runs": runs}))
        return choice.choose(path, budget, limit, batch)

    return answer


def test_a_clear_winner(ask):
    runs = make_runs({"a": 3.10, "b": 3.0, "c": 3.2}) + make_runs(
        {"small": 3.5}, parameters=500_000, seed=1
    )
    answer = ask(
        runs,
        "parameters",
        1e6,
        command="python -m smallgpt_jax.compare --config='my c.py' --output=x",
    )
    assert answer.chosen == "b" and "probability of 1.00" in answer.reason
    assert [row.name for row in answer.contenders] == ["b", "a", "c", "small"]
    assert answer.contenders[0].low < answer.contenders[0].loss < answer.contenders[0].high
    assert [(row.name, row.cost) for row in answer.front] == [("small", 5e5), ("b", 1e6)]
    assert answer.notes == ("Losses after unequal training, 6e+13 to 1.2e+14 FLOPs.",)
    assert answer.config["model.d_model"] == 64
    assert answer.command.endswith("compare '--config=my c.py' --output=x --config.compare.names=b")
    text = choice.format_answer(answer)
    assert "Choose b: its loss is the lowest" in text and "Pareto front" in text
    lines = text.replace(answer.command, "COMMAND").splitlines()  # it has this Python's path
    assert len(lines) <= 24 and max(map(len, lines)) <= 120
    assert ask(runs, "parameters", 6e5).reason == "it is the only model within the budget"


@pytest.mark.parametrize("names", ["ab", "abcdef"])
def test_a_tie_is_called_a_tie(names):
    """Of equally good models with three seeds, one is chosen in about 5% of the draws."""

    def is_tie(seed: int) -> bool:
        runs = make_runs(dict.fromkeys(names, 3.0), seed=seed)
        found, _ = candidates.read_candidates(runs, costs.BUDGETS["flops"])
        return choice.decide(contest.compete(found, costs.BUDGETS["flops"], 1.2e14))[0] is None

    assert np.mean([is_tie(seed) for seed in range(200)]) >= 0.9


def test_a_tie_names_the_models_and_what_would_decide(ask):
    runs = make_runs({"a": 3.0, "b": 3.0, "c": 3.3}, noise=0.02)
    answer = ask(
        runs,
        "bytes",
        4e6,
        command="python -m smallgpt_jax.compare --config=c.py --config.compare.seeds=3",
    )
    losses = {
        name: np.array([run["curve"][-1]["loss"] for run in runs if run["name"] == name])
        for name in "abc"
    }
    first, second = sorted("ab", key=lambda name: losses[name].mean())
    assert (
        answer.chosen is None
        and answer.possible == (first, second)
        and answer.command.endswith(f"names={first}")
    )
    assert answer.reason == (
        f"{first} has the lowest loss with a probability of {answer.probability:.2f}, {second} "
        f"with {1 - answer.probability:.2f}; to choose, 0.975 is needed"
    )
    difference = losses[second] - losses[first]  # Student's t with two degrees of freedom
    error = difference.std(ddof=1) / 3**0.5
    quantile = stats.t.ppf(0.9, 2, loc=-difference.mean(), scale=error)
    assert answer.at_stake == pytest.approx(quantile, abs=0.2 * error)
    assert answer.seeds_needed > 3
    text = choice.format_answer(answer)
    assert (
        f"With a probability of 0.9, {first} is at most {answer.at_stake:.2g} nats above the "
        "lowest loss." in text
    )
    assert f"About {answer.seeds_needed} seeds would tell {first} and {second} apart" in text
    few = ask(
        [
            make_run(name, seed, loss)
            for name, losses in (("a", (3.0, 3.01, 3.02)), ("b", (3.02, 3.01, 3.05)))
            for seed, loss in enumerate(losses)
        ],
        "bytes",
        4e6,
        command="python -m smallgpt_jax.compare --config=c.py --config.compare.seeds=3",
    )
    assert 3 < few.seeds_needed <= 20
    assert few.seeds_command.endswith(
        f"compare --config=c.py --config.compare.seeds={few.seeds_needed}"
    )


def test_more_seeds_than_were_trained_are_needed():
    """By its own spread, a difference may be found with as many seeds as there are, which did not
    decide.
    """
    one, other = (
        candidates.Candidate(name, (), 1.0, dict(enumerate(losses)), 1, 1, 1.0)
        for name, losses in (("a", (3.0, 3.0)), ("b", (3.02, 3.0205)))
    )
    assert choice.seeds_needed(one, other) == 3
    assert choice.seeds_needed(one, dataclasses.replace(other, losses={0: 3.1})) is None


def test_models_of_equal_losses(ask):
    """lgpt and cgpt with kernel 1 are the same function. Copies of a model are no evidence for it
    or against it.
    """
    noise = {"a": (0.03, -0.03, 0.0), "b": (-0.04, 0.02, 0.02)}
    runs = [
        make_run(name, seed, loss + own)
        for name, loss in (("a", 3.0), ("b", 3.06))
        for seed, own in enumerate(noise[name])
    ]
    copies = [{**run, "name": name, "parameters": 900_000} for name in "cdefgh" for run in runs[:3]]
    alone, beside = (ask(found, "parameters", 1e6) for found in (runs, runs + copies))
    assert alone.chosen is None and beside.chosen is None
    assert sum(row.probability for row in beside.contenders if row.name != "b") == pytest.approx(
        alone.contenders[0].probability
    )
    assert beside.reason.startswith(
        "c (equal to d, e, f, g, h and a) has the lowest loss with a probability of 0."
    )

    winners = make_runs({"a": 3.0, "b": 3.3})
    answer = ask(
        winners + [{**run, "name": "c", "parameters": 900_000} for run in winners[:3]],
        "parameters",
        1e6,
    )
    assert answer.chosen == "c" and answer.reason.endswith(", as that of a, which costs no less")
    (only,) = ask(winners[:3], "parameters", 1e6).contenders
    assert only.low < only.loss < only.high
    (single,) = ask(winners[:1], "parameters", 1e6).contenders
    assert single.low is None and single.high is None


@pytest.mark.parametrize(
    "budget, limit, reason",
    [
        ("flops", 1.2e16, "beyond the validated range, 1.2e+14 to 1.2e+14, by a factor of 100"),
        ("parameters", 3e6, "beyond the validated range, 1e+06 to 1e+06, by a factor of 3"),
        (
            "parameters",
            1e5,
            "no model is within the budget; the cheapest takes 1e+06 parameters, 10 times as much",
        ),
        ("seconds", 2000, "by a factor of 10"),
    ],
)
def test_budgets_that_were_not_measured(ask, budget, limit, reason):
    answer = ask(make_runs({"a": 3.0, "b": 3.1}), budget, limit)
    assert answer.chosen is None and reason in answer.reason and answer.front


def test_beyond_the_range_the_nearest_budget_is_answered(ask):
    answer = ask(make_runs({"a": 3.0, "b": 3.1}), "flops", 1.2e16)
    assert answer.reason == (
        "the budget is beyond the validated range, 1.2e+14 to 1.2e+14, by a factor of 100. At "
        "1.2e+14, the nearest budget with an answer, choose a: its loss is the lowest with a "
        "probability of 1.00"
    )
    assert "at most 1.2e+14 " in choice.format_answer(answer)
    with_small = make_runs({"a": 3.0, "b": 3.1}) + make_runs({"c": 3.5}, tokens=2_000_000, seed=1)
    assert ask(with_small, "flops", 1.2e16).contenders[0].name == "a"  # c was not trained near


def test_a_training_budget_between_the_trained_ones(ask):
    """Runs with a tenth of the budget do not say which model is the best with all of it."""
    runs = make_runs({"a": 3.0, "b": 3.1}) + make_runs(
        {"c": 3.3, "d": 3.2}, tokens=2_000_000, seed=1
    )
    answer = ask(runs, "flops", 6e13)
    assert answer.reason == (
        "no run was trained near the budget; the nearest budget below it is 1.2e+13, by a factor "
        "of 5. At 1.2e+13, the nearest budget with an answer, choose d: its loss is the lowest "
        "with a probability of 1.00"
    )
    assert answer.compared_at == pytest.approx(1.2e13) and answer.chosen is None
    at_larger = ask(runs, "flops", 1.2e14)
    assert at_larger.chosen == "a" and at_larger.notes == ("Not trained near this budget: c, d.",)
    only_a = ask(runs[:3] + runs[6:], "flops", 1.2e14)
    assert (
        only_a.chosen is None and only_a.reason == "of 3 models, only a was trained near the budget"
    )


def test_horizons_are_budgets_of_training(ask):
    """A shorter horizon has its own cost of training, but costs as much as the longest run once it
    is trained.
    """
    runs = make_runs({"a": 3.0, "b": 3.1}) + make_runs(
        {"a": 3.3, "b": 3.2}, tokens=2_000_000, horizon=0.1, seed=1
    )
    at_shorter = ask(runs, "flops", 1.2e13)
    assert (
        at_shorter.chosen == "b"
        and at_shorter.run == "b × 0.1"
        and ask(runs, "flops", 1.2e14).chosen == "a"
    )
    assert {row.name for row in ask(runs, "parameters", 1e6).contenders} == {"a", "b"}
    command = "python -m smallgpt_jax.compare --config=c --output=o"
    assert ask(runs, "flops", 1.2e13, command=command).command.endswith("--config.compare.names=b")


def test_a_missing_measure(ask):
    """The answer says what to run: the command of the comparison, if it is known."""
    runs = (
        make_runs({"a": 3.0})
        + make_runs({"b": 2.9}, inference=None, seed=1)
        + make_runs({"c": 3.4}, seed=2)
    )
    answer = ask(runs, "decode_ms", 2)
    assert answer.chosen is None
    assert answer.reason == (
        "b may be the best, but its ms per decoding step at batch size 1 with a full cache were "
        "not measured; to measure: rerun compare with config.compare.decoding=true"
    )
    command = "python -m smallgpt_jax.compare --config=c.py --output=x"
    assert ask(runs, "memory", 5e6, command=command).reason.endswith(
        "compare --config=c.py --output=x --config.compare.decoding=true"
    )
    assert ask(
        make_runs({"a": 3.0, "b": 3.1}, weight_bytes=None), "bytes", 4e6, command=command
    ).reason.endswith("to measure: " + costs.rerun(command))
    runs = (
        make_runs({"a": 3.0})
        + make_runs({"b": 3.3}, inference=None, seed=1)
        + make_runs({"c": 3.4}, seed=2)
    )
    assert ask(runs, "decode_ms", 2).chosen == "a"  # b cannot be the best
    runs = make_runs({"a": 3.0, "b": 3.1}, memory_bytes=None)
    assert ask(runs, "training_memory", 1e9).reason.startswith(
        "no run has measured bytes of memory per device"
    )
    assert (
        "spread of their losses is unknown"
        in ask(make_runs({"a": 3.0, "b": 3.1}, seeds=1), "bytes", 4e6).reason
    )


def test_latency_and_memory_depend_on_the_batch_size(ask):
    """Model a is better and has the larger cache; it is as fast as b with one text, and slower with
    32.
    """
    runs = make_runs({"a": 3.0}, inference=inference(2.0, 20.0, 100_000)) + make_runs(
        {"b": 3.1}, inference=inference(2.0, 10.0, 10_000), seed=1
    )
    assert ask(runs, "decode_ms", 2).chosen == ask(runs, "decode_ms", 20, batch=32).chosen == "a"
    at_32 = ask(runs, "decode_ms", 12, batch=32)
    assert (
        at_32.chosen == "b"
        and at_32.label == "ms per decoding step at batch size 32 with a full cache"
    )
    assert [(row.name, row.cost) for row in ask(runs, "memory", 5e6).front] == [
        ("b", 4.01e6),
        ("a", 4.1e6),
    ]
    assert ask(runs, "memory", 4.2e6).chosen == "a" and ask(runs, "memory", 4.05e6).chosen == "b"
    assert ask(runs, "memory", 6e6, batch=32).chosen == "b"  # a takes 4 MB + 32 · 0.1 MB
    assert not at_32.notes
    runs[0]["inference"]["device"] = "other"
    assert "Measured on different devices: other, cpu." in ask(runs, "decode_ms", 2).notes


def test_a_slow_measurement_of_one_seed_does_not_count(ask):
    runs = make_runs({"a": 3.0, "b": 3.1})
    runs[1]["inference"] = inference(50.0)
    assert ask(runs, "decode_ms", 2).chosen == "a"


@pytest.mark.parametrize(
    "budget, limit, step", [("flops", 1e12, "1.2e+12 training FLOPs"), ("seconds", 1, "2 seconds")]
)
def test_refuses_a_budget_below_one_step(budget, limit, step, ask):
    message = f"--{budget}={limit:g}: below one training step, which takes {step}"
    with pytest.raises(UserError, match=re.escape(message)):
        ask(make_runs({"a": 3.0, "b": 3.1}), budget, limit)


def test_experts_count_with_all_their_parameters(ask):
    """A limit on parameters or bytes counts all experts; the FLOPs are those of the active ones."""
    runs = make_runs({"dense": 3.1}) + make_runs(
        {"experts": 3.0}, seed=1, parameters=4_000_000, active_parameters=1_000_000
    )
    for run in runs[3:]:
        run["curve"][-1]["flops"] /= 4
    assert ask(runs, "parameters", 1e6).chosen == ask(runs, "bytes", 4e6).chosen == "dense"
    assert ask(runs, "parameters", 4e6).chosen == ask(runs, "flops", 1.2e14).chosen == "experts"
    text = choice.format_answer(ask(runs, "parameters", 4e6))
    assert "4,000,000 (1,000,000 active)" in text


def test_unfinished_and_diverged_runs_do_not_count(ask):
    runs = (
        make_runs({"a": 3.0})
        + make_runs({"b": 3.1}, seed=1)
        + make_runs({"c": 2.0}, diverged=True)
        + make_runs({"d": 2.0}, is_finished=False)
        + [make_run("e", 0, float("nan"))]
    )
    answer = ask(runs, "flops", 1.2e14)
    assert answer.chosen == "a" and "7 of 13 runs are unfinished or have diverged." in answer.notes
    with pytest.raises(UserError, match="no finished run; finish the comparison"):
        ask(runs[6:], "flops", 1.2e14)


def ladder(laws: dict[str, tuple[float, float]], noise: float = 0.005, workdir=None) -> list[dict]:
    """Returns runs of four sizes, three horizons and three seeds per model; `laws` has the
    constants A and α.
    """
    rng = np.random.default_rng(0)
    return [
        make_run(
            f"{name}@{size}-{horizon}",
            seed,
            1.5 + a * size**-alpha + 60 * (size * horizon) ** -0.28 + noise * rng.standard_normal(),
            size,
            size * horizon,
            **({"workdir": workdir} if workdir else {}),
        )
        for name, (a, alpha) in laws.items()
        for size in (300_000, 700_000, 1_600_000, 3_500_000)
        for horizon in (5, 10, 20)
        for seed in range(3)
    ]


def test_a_budget_between_those_of_the_runs(ask, tmp_path):
    """Model b wins at large budgets, although no run was trained with exactly this budget."""
    workdir = tmp_path / "a run"
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")
    runs = ladder({"a": (60, 0.34), "b": (547, 0.5)}, workdir=str(workdir))
    large, small = ask(runs, "flops", 6e14), ask(runs, "flops", 5e12)
    assert (large.chosen, small.chosen) == ("b", "a")
    assert large.notes[0].startswith("Losses, sizes and tokens are interpolated")
    best = large.contenders[0]
    assert best.low < best.loss < best.high and best.parameters > 1_600_000
    assert 6 * best.parameters * best.tokens == pytest.approx(6e14, rel=1e-3)
    # The nearest run, at 3.5M parameters and 10 tokens per parameter, took 7.35e14 FLOPs in 100
    # steps.
    assert large.command.endswith(
        f"'--config=run:{workdir}' --config.train.steps=82 --config.optimizer.decay_steps=82 "
        "--workdir=runs/chosen"
    )
    beyond = ask(runs, "flops", 1e17)
    assert beyond.reason.startswith(
        "the budget is beyond the validated range, 2.7e+12 to 1.47e+15, by a factor of 68. At "
        "1.47e+15, the nearest budget with an answer, choose b: "
    )
    assert not beyond.chosen and [row.name for row in beyond.contenders] == ["b", "a"]
    assert ask(ladder({"a": (60, 0.34), "b": (60, 0.34)}), "flops", 6e14).chosen is None
    text = choice.format_answer(large)
    assert len(text.splitlines()) <= 24 and f"Nearest trained run, {large.run}: d_model=64" in text
    assert large.run == "b@3500000-10"
    shown = [row.name for row in large.front if row.name in text]
    assert shown == [row.name for row in large.front][-6:]  # those near the budget


def test_interpolates_runs_of_one_size_or_of_equal_tokens_per_parameter(ask):
    """The middle of two budgets, in logarithms, has the middle of the losses of each seed, and the
    lower one counts.
    """
    sizes, ratios = (1_000_000, 2_000_000), (5, 10, 20)
    losses = dict(zip(((n, r) for n in sizes for r in ratios), (4.0, 3.6, 3.3, 3.7, 2.8, 2.7)))
    runs = [
        make_run(f"{name}@{n}-{r}", seed, loss + shift + 0.1 * seed, n, n * r)
        for name, shift in (("a", 0.0), ("b", 0.5))
        for (n, r), loss in losses.items()
        for seed in (0, 1)
    ]

    def asked(first: tuple[int, int], second: tuple[int, int]):
        cost = [6.0 * n * n * r for n, r in (first, second)]
        best = ask(runs, "flops", float(np.sqrt(cost[0] * cost[1]))).contenders[0]
        return best.name, best.loss, best.parameters, best.tokens

    one, two = sizes
    assert asked((one, 5), (one, 10)) == (
        "a",
        pytest.approx(3.85),
        one,
        pytest.approx(one * np.sqrt(50)),
    )
    # This is also the budget of the smaller size's 20 tokens per parameter, with a loss of 3.35.
    assert asked((one, 10), (two, 10)) == (
        "a",
        pytest.approx(3.25),
        round(one * np.sqrt(2)),
        pytest.approx(np.sqrt(2) * 10 * one),
    )
    assert ask(runs, "flops", 6 * two * two * 20 * 1.2).contenders[0].loss == pytest.approx(2.75)
    assert ask(runs, "flops", 6 * two * two * 20 * 1.3).reason.startswith(
        "the budget is beyond the validated range"
    )


def test_interpolates_between_next_budgets_and_common_seeds(ask):
    """A loss that falls late is not drawn to an earlier budget, and a seed without a run on one
    side does not count.
    """
    runs = [
        make_run(f"{name}@{ratio}", seed, loss + shift + gap * seed, tokens=1_000_000 * ratio)
        for name, shift in (("a", 0.0), ("b", 0.5))
        for ratio, loss, gap in ((5, 4.0, 0.1), (10, 3.9, 0.3), (20, 3.0, 0.0))
        for seed in (0, 1, 2)
    ]

    def losses(found: list[dict], ratio: float) -> dict[str, float]:
        return {row.name: row.loss for row in ask(found, "flops", 6e12 * ratio).contenders}

    assert losses(runs, 50**0.5) == pytest.approx(
        {"a": 4.15, "b": 4.65}
    )  # from 5 to 20 in one piece: 3.80
    assert losses(
        [run for run in runs if run["name"] != "a@20" or run["seed"] > 0], 200**0.5
    ) == pytest.approx({"a": 3.675, "b": 4.1})
    far = [run for run in runs if "@10" not in run["name"]]
    assert losses(far, 10) == pytest.approx({"a": 3.55, "b": 4.05})
    for run in far:
        if "@5" in run["name"]:
            run["curve"][-1]["flops"] /= 2.1  # now 8.4 times less than with 20 tokens per parameter
    assert ask(far, "flops", 6e13).reason.startswith(
        "no run was trained near the budget; the nearest budget below it is 1.43e+13, by a factor "
        "of 4.2"
    )


def test_starts_without_the_libraries_of_training():
    """Their imports take longer than an answer."""
    code = "import sys, smallgpt_jax.choose; sys.exit(bool({'flax', 'optax', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_bad_input(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"format": 1, "runs": make_runs({"a": 3.0, "b": 3.2})}))
    both = call("choose", f"--results={path}", "--flops=1e14", "--seconds=3")
    assert (
        both.returncode == 2
        and "--flops and --seconds cannot be combined; give one of --flops" in both.stderr
    )
    for arguments, message in (
        (["--flops=1e14", "--batch=2"], "--batch: does not apply to --flops; remove it"),
        (["--decode_ms=2", "--batch=2"], "--batch=2: decoding is measured at 1 and 32;"),
    ):
        done = call("choose", f"--results={path}", *arguments)
        assert done.returncode == 2 and message in done.stderr
    unknown = call("choose", f"--results={tmp_path}/none.json", "--flops=1e14")
    assert (
        unknown.returncode == 1
        and "none.json: No such file or directory; give the results.json" in unknown.stderr
    )
    good = call("choose", f"--results={path}", "--flops=1.2e14", "--json")
    assert good.returncode == 0 and json.loads(good.stdout)["chosen"] == "a"
    path.write_text(json.dumps({"format": 1, "runs": [{"name": 3}]}))
    with pytest.raises(UserError, match=r"runs\[0\]"):
        choice.choose(path, "flops", 1e14)
