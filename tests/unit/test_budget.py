"""Tests of planned comparisons: budgets, invalid configs, names of runs."""

import collections
import functools
import importlib
import json
import math
import re
import statistics
from types import SimpleNamespace
from unittest.mock import create_autospec

import jax
import pytest
from absl import flags
from conftest import ROOT, load_config
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

from configs.compare import base
from smallgpt_jax import cli, models
from smallgpt_jax.analysis import record
from smallgpt_jax.comparison import budget, parameters, recipe
from smallgpt_jax.comparison.runs import run_folder
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import texts
from smallgpt_jax.models import architectures
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.run.config import Config
from smallgpt_jax.training.checks import check_config
from smallgpt_jax.training.program import Program

# Comparisons whose models have the learning rates of configs/compare/rates.py → their presets.
RATED = {
    "rates": ("tiny", "0.2M", "0.47M"),
    "tokens": ("tiny", "0.33M", "0.33M-others", "0.2M"),
    "orders": ("tiny", "0.2M"),
    "transition": ("tiny", "first", "all", "paper"),
    "larger": ("tiny", "1.3M"),
    "english": ("tiny", "0.2M"),
    "context": ("tiny", "0.47M"),
}
SHIPPED = sorted(
    path.stem
    for path in (ROOT / "configs" / "compare").glob("*.py")
    if path.stem not in ("base", "scaling", "mixers", "sizes", *RATED)
)


def comparison(size: str = "tiny", **fields) -> ConfigDict:
    config = base.recipes(("gpt", "pgpt", "lgpt", "cgpt"), size)
    for name, value in fields.items():
        group, field = name.split("__")
        config[group][field] = value
    return config


def test_tokens_are_equal_and_schedules_follow(tmp_path):
    config = comparison(compare__seeds=3)
    config.unlock()
    config.runs.pgpt.train = ConfigDict(
        {"batch_size": 16}
    )  # twice as many tokens per step as in the other runs
    planned = recipe.make_comparison(config, tmp_path).runs({})
    assert [run.name for run in planned] == ["gpt", "pgpt", "lgpt", "cgpt"] * 3
    assert [run.config.train.seed for run in planned[::4]] == [1337, 1338, 1339]
    assert len({run.folder for run in planned}) == 12
    assert {run.name: run.config.train.steps for run in planned} == {
        "gpt": 40,
        "pgpt": 20,
        "lgpt": 40,
        "cgpt": 40,
    }
    assert (planned[1].config.optimizer.warmup_steps, planned[1].config.optimizer.decay_steps) == (
        2,
        20,
    )


def test_all_runs_have_the_same_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(architectures, "faster_dtype", lambda: "bfloat16")
    config = comparison(model__dtype="auto", compare__names="gpt,lgpt")
    planned = recipe.make_comparison(config, tmp_path).runs({})
    assert {run.config.model.dtype for run in planned} == {"bfloat16"}


def test_padding_counts_as_flops_but_not_as_tokens(tmp_path):
    """With a budget of tokens, a run with padding (`best_fit`) gets more steps than one without
    padding (`concat`).

    With a budget of FLOPs, both runs get the same number of steps.
    """
    source = (
        tmp_path / "source.jsonl"
    )  # every document has 41 tokens, so a row of 64 tokens has room for only one
    source.write_text("".join(json.dumps({"text": f"{n:040}"}) + "\n" for n in range(400)))
    common = load_config("gpt", data__source=str(source), train__steps=200)
    for kind, steps in (("tokens", round(200 * 64 / 41)), ("flops", 200)):
        config = base.comparison(
            common, {"joined": {}, "whole": {"data": {"packing": "best_fit"}}}, budget=kind, seeds=1
        )
        planned = recipe.make_comparison(config, tmp_path).runs({})
        assert {run.name: run.config.train.steps for run in planned} == {
            "joined": 200,
            "whole": steps,
        }


def flops(config) -> float:
    """Returns the FLOPs of a run, as `make_comparison` counts them."""
    model = models.LanguageModel(Config.of(config).model)
    return (
        train_flops_per_token(model)
        * config.train.steps
        * config.train.batch_size
        * config.model.context_length
    )


@pytest.mark.slow
def test_flops_are_equal_within_one_percent(tmp_path):
    planned = recipe.make_comparison(
        comparison(compare__budget="flops", train__steps=2000), tmp_path
    ).runs({})[:4]
    target = flops(load_config("gpt", train__steps=2000))
    assert [run.name for run in planned] == ["gpt", "pgpt", "lgpt", "cgpt"]
    for run in planned:
        assert abs(flops(run.config) / target - 1) < 0.01, run.name
    # Multiplications per token, counted by hand for width D, context length T and vocabulary size
    # V. In gpt, each of the 4 blocks needs 12·D² for weights and 2·D·T for attention, and the head
    # needs D·V. pgpt needs 2·D² more for its dense layers and 2·D more for the weighted sum of its
    # two paths.
    D, T, V = 64, 64, 512
    gpt = 4 * (12 * D**2 + 2 * D * T) + D * V
    assert planned[1].config.train.steps == round(2000 * gpt / (gpt + 2 * D**2 + 2 * D)) == 1938


def test_equal_flops_include_those_of_the_optimizer_and_of_further_heads(tmp_path):
    """Muon's five Newton–Schulz steps take more FLOPs than the model in a step of 128 tokens.

    A step on an (m, n) matrix with m ≤ n has the products x·xᵀ, a·a and (…)·x
    (github.com/KellerJordan/Muon). A head for one further token (mtp) has a joint projection of 2·D
    to D, a block, and the output head of the model.
    """
    common = load_config("gpt", model__context_length=16, train__steps=1000)
    runs = {
        "adamw": {},
        "muon": {"optimizer": {"name": "muon"}},
        "mtp": {"train": {"future_tokens": 1}},
        "both": {"train": {"future_tokens": 1}, "optimizer": {"name": "muon"}},
    }
    config = base.comparison(common, runs, budget="flops", seeds=1)
    planned = {run.name: run.config for run in recipe.make_comparison(config, tmp_path).runs({})}
    D, layers = 64, 4
    step = flops(planned["adamw"]) / planned["adamw"].train.steps
    square, joint, wide = (
        5 * (2 * D * D * n + 2 * D**3 + 2 * D * D * n) for n in (D, 2 * D, 4 * D)
    )
    muon = layers * (4 * square + 2 * wide)
    assert planned["adamw"].train.steps == 1000
    assert planned["muon"].train.steps == round(1000 * step / (step + muon)) < 500
    T, V = 16, 512
    mtp = 8 * T * 6 * (2 * D * D + 12 * D * D + 2 * T * D + V * D + D)
    assert planned["mtp"].train.steps == round(1000 * step / (step + mtp)) < 750
    both = step + muon + mtp + (joint + 4 * square + 2 * wide)
    assert planned["both"].train.steps == round(1000 * step / both)


@pytest.mark.slow
def test_parameters_are_equal_within_two_percent(tmp_path):
    """The width of gpt follows that of pgpt, whose number of heads allows few widths."""
    size, names, target = "tiny", "gpt,pgpt,lgpt", 275_137
    config = comparison(size, compare__budget="parameters", compare__seeds=1, compare__names=names)
    planned = recipe.make_comparison(config, tmp_path).runs({})
    assert [run.name for run in planned] == names.split(",")
    tokens = {
        run.config.train.steps * run.config.train.batch_size * run.config.model.context_length
        for run in planned
    }
    assert len(tokens) == 1
    for run in planned:
        assert abs(parameters.num_parameters(run.config) / target - 1) < 0.02, run.name
        own = load_config(run.name, size)
        ours = {
            **run.config.to_dict()["model"],
            "d_model": own.model.d_model,
            "num_heads": own.model.num_heads,
        }
        assert ours == own.model.to_dict()  # only the width differs


def test_all_runs_follow_one_that_misses_the_target(monkeypatch):
    """As at size `paper`, where no width of lgpt gives gpt's number of parameters within 2%: gpt's
    width is changed to match the nearest lgpt.
    """

    def count(config) -> int:
        step = 16 if config.model.architecture == "lgpt" else 1
        return 10 * (step * round(config.model.d_model / step)) ** 2

    monkeypatch.setattr(parameters, "num_parameters", count)
    runs = {
        name: load_config(name, model__d_model=32, model__head_dim=8) for name in ("gpt", "lgpt")
    }
    resized = parameters.with_equal_parameters(runs, wanted=10_900)
    assert {count(run) for run in resized.values()} == {10 * 32**2}
    with pytest.raises(
        UserError,
        match=r"lgpt has no width that gives 15,000 parameters within 2%; the nearest width gives "
        r"10,240 \(-31.7%\), with model.d_model=\d+, model.num_heads=\d+",
    ):
        parameters.with_equal_parameters(runs, wanted=15_000)


@pytest.mark.parametrize(
    "target, d_model, num_heads, head_dim",
    [
        (10_240, 32, 4, 0),  # the recipe's own width
        (2_560, 16, 4, 0),  # another width than the recipe's, but the recipe's number of heads (4)
        (
            6_250,
            25,
            5,
            0,
        ),  # another number of heads, because no width for 4 heads is within 2% of the target
        (12_250, 35, 5, 0),
        (
            5_000,
            22,
            2,
            0,
        ),  # no width is within 2% of the target for any number of heads; 22 is the nearest
        (6_250, 24, 4, 8),  # the number of heads is kept if the head width is set
    ],
)
def test_width_search(target, d_model, num_heads, head_dim, monkeypatch):
    """The search finds the width and the number of heads that bring the number of parameters near
    `target`.

    The search counts parameters at most six times, because each count takes seconds for deep
    models.
    """
    counted = []

    def count(config) -> int:
        counted.append(config.model.d_model)
        return 10 * config.model.d_model**2

    monkeypatch.setattr(parameters, "num_parameters", count)
    config = load_config("gpt", model__d_model=32, model__num_heads=4, model__head_dim=head_dim)
    found = parameters.with_parameters(config, target).model
    assert (found.d_model, found.num_heads) == (d_model, num_heads)
    assert len(counted) <= 6


def test_digests_of_older_versions():
    """Stored speeds of a comparison stay valid when later versions add config fields."""
    config = load_config("gpt")
    before = budget.config_digest(config)
    older = config.copy_and_resolve_references()
    with older.unlocked():
        del older.model["norm_position"], older.model["head_dim"]
        for field in ("z_loss", "tracker", "profile_from", "profile_steps", "stall_seconds"):
            del older.train[field]
    assert budget.config_digest(older) == before
    config.train.z_loss = 1e-4
    assert budget.config_digest(config) != before


def test_seconds_are_equal_by_a_stored_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        budget, "steps_per_second", lambda run: {"gpt": 3.0, "pgpt": 2.0}[run.model.architecture]
    )
    fields = {"compare__budget": "seconds", "compare__seconds": 30.0, "compare__seeds": 2}
    config = comparison(compare__names="gpt,pgpt", **fields)
    assert [
        run.config.train.steps for run in recipe.make_comparison(config, tmp_path).runs({})
    ] == [90, 60] * 2
    monkeypatch.setattr(budget, "steps_per_second", lambda run: 5.0)
    assert [
        run.config.train.steps for run in recipe.make_comparison(config, tmp_path).runs({})
    ] == [90, 60] * 2
    config.compare.seconds = 60.0
    assert [
        run.config.train.steps for run in recipe.make_comparison(config, tmp_path).runs({})
    ] == [180, 120] * 2
    config.model.d_model = (
        128  # the configs are new, so their speeds are measured again, but not for a report
    )
    config.compare.train = False
    with pytest.raises(
        UserError, match=r"config.compare.train=False: the speed of gpt, .* has not been measured"
    ):
        recipe.make_comparison(config, tmp_path)
    config.compare.train = True
    assert [
        run.config.train.steps for run in recipe.make_comparison(config, tmp_path).runs({})
    ] == [300, 300] * 2
    config.compare.seconds = 0.1
    with pytest.raises(
        UserError,
        match=r"gpt takes 0.2 seconds and the budget is 0.1.* steps, 1, misses .* \+100.0%",
    ):
        recipe.make_comparison(config, tmp_path)
    config.compare.seconds, config.model.d_model = 60.0, 256
    run_folder(tmp_path, "pgpt", config.train.seed).mkdir(parents=True)
    with pytest.raises(UserError, match="contains a run pgpt with another budget or config"):
        recipe.make_comparison(config, tmp_path)


def test_speed_excludes_the_first_two_steps(monkeypatch):
    now, durations = [0.0], iter([30.0, 5.0] + [0.5] * 20)

    def step(state, batch):
        now[0] += next(durations)
        return state, {}

    program = create_autospec(Program, instance=True)
    program.bind.return_value, program.abstract_batch.return_value = step, ()
    monkeypatch.setattr(budget, "shared_program", lambda config: program)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert budget.steps_per_second(load_config("gpt")) == 2.0


def test_names_with_dots_and_spaces(tmp_path):
    """Covers run names such as "lr 0.001", as in the learning rate example of
    configs/compare/base.py.
    """
    rates = {f"lr {x}": {"optimizer": {"learning_rate": x}} for x in (0.001, 0.01)}
    planned = recipe.make_comparison(
        base.comparison(load_config("gpt"), rates, seeds=1), tmp_path
    ).runs({})
    assert [(run.name, run.config.optimizer.learning_rate, run.folder.name) for run in planned] == [
        ("lr 0.001", 0.001, "lr_0.001-seed1337"),
        ("lr 0.01", 0.01, "lr_0.01-seed1337"),
    ]


def test_flags_set_any_field_of_any_run(monkeypatch):
    """Of the reference too, which overrides no field. Fields that a run does not override follow
    the common config.
    """
    monkeypatch.setattr(recipe, "build_program", validate)
    arguments = [
        "compare",
        f"--config={ROOT}/configs/compare/paper.py:tiny",
        "--config.runs.gpt.model.d_model=32",
        "--config.runs.pgpt.optimizer.learning_rate=1",
        "--config.optimizer.beta1=0.7",
    ]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    values(arguments)
    config = values["config"].value
    gpt, pgpt, *_ = recipe.resolve_runs(config).values()
    assert (gpt.model.d_model, pgpt.model.d_model) == (32, config.model.d_model)
    assert (gpt.optimizer.learning_rate, pgpt.optimizer.learning_rate) == (
        config.optimizer.learning_rate,
        1.0,
    )
    assert gpt.optimizer.beta1 == pgpt.optimizer.beta1 == 0.7
    assert recipe.own_fields(config, "gpt")["model"] == {"d_model": 32}


@pytest.mark.parametrize(
    "given, read",
    [
        (
            "--config.runs.lr 0.1.optimizer.learning_rate=0.2",
            ("lr 0.1", "optimizer", "learning_rate", "0.2"),
        ),
        ("--config.runs.2×.model.d_model=8", ("2×", "model", "d_model", "8")),
        ("--config.runs.a.b.data.source=x.model.y=z", ("a.b", "data", "source", "x.model.y=z")),
        ("--config.runs.lgpt.model.d_model=8", ("lgpt", "model", "d_model", "8")),
    ],
)
def test_overrides_of_runs_whose_names_have_dots_and_spaces(given, read):
    (quoted,) = cli.quote_run_names([given])
    path, _, value = quoted.removeprefix("--config.").partition("=")
    assert " " not in path and (*config_path.split(path), value) == ("runs", *read)
    assert cli.unquote_run_names(quoted) == given


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(compare__budget="time"),
            "config.compare.budget='time': must be one of tokens, flops, parameters, seconds",
        ),
        (
            dict(compare__budget="flops", train__steps=8),
            r"step of pgpt .* number of steps, 8, misses .*% \(limit: 1%\)",
        ),
        (dict(compare__budget="seconds"), "config.compare.seconds=0.0: must be above 0"),
        (dict(compare__seconds=3.0), "needs config.compare.budget='seconds'"),
        (dict(compare__seeds=0), "config.compare.seeds=0: must be at least 1"),
        (dict(compare__most_seeds=2), "config.compare.most_seeds=2: must be above config.comp"),
        (dict(compare__names=""), "the comparison has no runs"),
        (dict(compare__names="gtp"), "no run 'gtp'; choose from cgpt, gpt"),
        (dict(compare__reference="x"), "config.compare.reference='x': must be one of cgpt, gpt"),
        (dict(train__steps=0), "config.train.steps=0: must be at least 1"),
        (dict(train__batch_size=0), "config.train.batch_size=0: must be at least 1"),
        (dict(compare__contexts=(0,)), "must be integers, at least 1"),
        (
            dict(compare__learning_rates=(1, 0)),
            r"config.compare.learning_rates=\(1, 0\): 0 is not a positive, finite num",
        ),
        (dict(compare__learning_rates=(1, math.inf)), "inf is not a positive, finite number"),
        (dict(compare__learning_rates=(1, math.nan)), "nan is not a positive, finite number"),
        (dict(compare__learning_rates=("a", 1)), "'a' is not a positive, finite number"),
        (dict(compare__learning_rates=(True, 2)), "True is not a positive, finite number"),
        (dict(compare__learning_rates=(1, 2, 1.0)), "1.0 is listed twice"),
        (
            dict(compare__learning_rates=(2,)),
            r"learning_rates=\(2,\): a grid has at least two multiples",
        ),
        (
            dict(train__seed=0, compare__learning_rates=(1, 2)),
            "config.train.seed=0: must be at least 1 with",
        ),
        (
            dict(compare__averaged_evaluations=0),
            "config.compare.averaged_evaluations=0: must be at least 1",
        ),
        (
            dict(compare__averaged_evaluations=99),
            r"averaged_evaluations=99: gpt has only \d evaluations; decrease",
        ),
        (
            dict(compare__horizons=(0.5, 0.25, 1)),
            r"horizons=\(0.5, 0.25, 1\): must be in ascending order and end in 1",
        ),
        (
            dict(compare__horizons=(0.5,)),
            r"horizons=\(0.5,\): must be in ascending order and end in 1",
        ),
        (dict(compare__horizons=(0, 1)), r"horizons=\(0, 1\): must be numbers above 0"),
        (
            dict(compare__horizons=(0.5, 1)),
            "gpt: config.optimizer.schedule='cosine': the runs of a trunk need a schedule",
        ),
        (
            dict(compare__horizons=(0.1, 1), optimizer__schedule="wsd"),
            r"horizons: 0.1: the decay of gpt would start at step 4 of 4, but must start after the warmup \(5 steps\)",
        ),
        (
            dict(
                compare__horizons=(0.4, 1),
                optimizer__schedule="wsd",
                optimizer__decay_fraction=0.05,
            ),
            r"horizons: 0.4: gpt: config.optimizer.decay_fraction=0.05: the decay would have 1 step",
        ),
        (
            dict(compare__horizons=(0.5, 0.501, 1), optimizer__schedule="wsd"),
            "horizons: 0.501: gpt has 20 steps, as at the horizon before it",
        ),
        (
            dict(train__trunk="runs/gpt"),
            "run 'gpt': config.train.trunk='runs/gpt': comparisons set this field; use config",
        ),
        (
            dict(compare__max_added_learning_rates=-1),
            "config.compare.max_added_learning_rates=-1: must be at least 0",
        ),
        (dict(model__num_heads=3), "run 'gpt': config.model.num_heads=3: must divide"),
    ],
)
def test_refuses_invalid_comparisons(fields, message, tmp_path):
    with pytest.raises(UserError, match=message):
        recipe.make_comparison(comparison(**fields), tmp_path)


@pytest.mark.parametrize(
    "runs, message",
    [
        ({"a": {"modl": {"d_model": 8}}}, "config.runs.a.modl: must be one of the groups"),
        (
            {"a": {"model": {"num_haeds": 2}}},
            "config.runs.a.model.num_haeds: no such field; did you mean 'num_he",
        ),
        (
            {"a": {"model": {"d_model": "wide"}}},
            "config.runs.a.model.d_model='wide': expected the same type as 64",
        ),
        (
            {"a": {"model": {"architecture": "pgpt", "num_paths": "two"}}},
            "run 'a': config.model.num_paths='two': must be",
        ),
        (
            {"a": {"train": {"microbatches": 3}}},
            "run 'a': config.train.batch_size=8: must be a multiple of",
        ),
        ({"a": {"optimizer": {"name": "sgd"}}}, "run 'a': config.optimizer.name='sgd'"),
        ({"a": {"train": {"steps": 8}}}, "config.runs.a.train.steps: the budget determines it"),
        ({"a, b": {}}, "names cannot contain commas"),
        ({"a": {"model": {"num_paths": 2}}}, "config.runs.a.model.num_paths: no such field"),
        (
            {"a": {}, "b": {"data": {"tokenizer": "gpt2"}}},
            "data.tokenizer is 'bytes' in 'a' and 'gpt2' in 'b'",
        ),
        ({"a b": {}, "a_b": {}}, "'a b' and 'a_b' have the same workdir"),
        ({}, "the comparison has no runs"),
    ],
)
def test_refuses_invalid_runs(runs, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        recipe.make_comparison(base.comparison(load_config("gpt"), runs), tmp_path)


def test_refuses_misspelt_comparison_fields():
    with pytest.raises(KeyError, match="budget"):
        base.comparison(load_config("gpt"), {"gpt": {}}, bugdet="flops")


def validate(config: ConfigDict, devices: int = 8) -> None:
    """Validates a config without tracing the model. Used in place of `build_program`, which takes
    seconds.
    """
    config = Config.of(config)
    check_config(config, sharding.make_mesh(config.mesh, jax.devices()[:devices]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("size", ["tiny", "quickstart", "paper"])
def test_shipped_comparisons_are_valid(name, size, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "build_program", validate)
    config = importlib.import_module(f"configs.compare.{name}").get_config(size)
    if name == "ladder":  # counting the FLOPs of its 18 models takes ten seconds and more
        assert recipe.resolve_runs(config).keys() == set(config.runs)
        if size != "quickstart":
            return
        config.compare.names = "gpt,experts"
    planned = recipe.make_comparison(config, tmp_path).runs({})
    names = recipe.run_names(config)
    assert name == "ladder" or set(names) == set(config.runs)
    assert len(planned) == len(names) * config.compare.seeds
    assert {run.name for run in planned} == set(names)
    if name == "stages":  # the first run has the model of lgpt's recipe
        assert planned[0].config.to_dict()["model"] == load_config("lgpt", size).model.to_dict()
    texts.parse_texts(config.compare.texts)


@pytest.mark.parametrize(
    "name, preset",
    [("scaling", "tiny"), *(("mixers", preset) for preset in ("tiny", "small", "medium"))]
    + [(name, preset) for name, presets in RATED.items() for preset in presets],
)
def test_presets_of_further_comparisons(name, preset, tmp_path, monkeypatch):
    devices = 4 if name == "context" else 8  # it has batches of 4 rows
    monkeypatch.setattr(recipe, "build_program", functools.partial(validate, devices=devices))
    config = importlib.import_module(f"configs.compare.{name}").get_config(preset)
    assert recipe.make_comparison(config, tmp_path).models.keys() == set(config.runs)


def test_the_sweep_around_the_rules_of_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "build_program", lambda config: Config.of(config))
    config = importlib.import_module("configs.compare.sizes").get_config("tiny")
    made = recipe.make_comparison(config, tmp_path)
    trained = {run.name: run.config for run in made.runs({})}
    rule, half, deep = (trained[f"gpt{change}@0.1M"] for change in ("", " 0.5x batch", " 4 blocks"))
    assert (rule.train.batch_size, half.train.batch_size) == (4, 2)
    assert abs(half.train.steps - 2 * rule.train.steps) <= 1
    assert half.train.eval_steps * 2 == rule.train.eval_steps * 4 == 512
    assert (
        deep.model.num_layers == rule.model.num_layers + 2
        and deep.model.d_model < rule.model.d_model
    )


def test_rates_are_multiples_of_those_that_the_grids_chose():
    rates = importlib.import_module("configs.compare.rates")
    for multiples, name in (
        (rates.SCALING, "scaling"),
        ({**rates.MIXERS, **rates.OTHERS}, "mixers"),
    ):
        grids = record.read(ROOT / "docs" / "results" / f"{name}.json").learning_rates
        chosen = {run.partition("@")[0]: grid.best for run, grid in grids.items()}
        assert multiples == {model: chosen[model] for model in multiples}


def test_the_best_rates_at_a_larger_size_are_those_of_the_record():
    rates = importlib.import_module("configs.compare.rates")
    losses = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in record.read(ROOT / "docs" / "results" / "rates.json").runs:
        size, _, multiple = run.size.partition("-")
        if size == "0.2M":
            losses[run.model][float(multiple.removesuffix("x"))].append(run.loss)
    assert len(losses) > 8
    for model, by_multiple in losses.items():
        best = min(by_multiple, key=lambda multiple: statistics.fmean(by_multiple[multiple]))
        assert rates.BEST.get(model, 1.0) == best, model


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["small", "medium", "full"])
def test_sizes_of_the_scaling_comparison(preset, tmp_path, monkeypatch):
    """All models of a size have equal tokens and about as many active parameters. The held-out size
    has four times the compute.
    """
    monkeypatch.setattr(recipe, "build_program", validate)
    scaling = importlib.import_module("configs.compare.scaling")
    config = scaling.get_config(preset)
    (*_, largest), held_out, *_ = scaling.PRESETS[preset]
    # Other models have the widths of gpt or of cgpt. Experts are the same part of a model at all sizes.
    names = ("gpt", "cgpt", "moe") if preset == "full" else ("gpt", "cgpt")
    config.compare.names = ",".join(
        f"{name}@{size}" for size in (largest, held_out) for name in names
    )
    planned = recipe.make_comparison(config, tmp_path).models
    compute = {}
    for size in (largest, held_out):
        group = [planned[f"{name}@{size}"] for name in names]
        counts = [
            models.num_active_parameters(models.LanguageModel(one.model.replace(scan_layers=True)))
            for one in group
        ]
        assert max(counts) < 1.12 * min(counts)
        (steps,) = {one.train.steps for one in group}
        assert 20 * counts[0] == pytest.approx(steps * 8 * 256, rel=0.01) and steps % 8 == 0
        compute[size] = flops(group[0])
    assert 4 <= compute[held_out] / compute[largest] < 6
    ratio = scaling.num_parameters(held_out) / scaling.num_parameters(largest)
    for name in names:
        rates = [planned[f"{name}@{size}"].optimizer.learning_rate for size in (largest, held_out)]
        assert rates[0] / rates[1] == pytest.approx(ratio ** (1 / 3), rel=0.01)
