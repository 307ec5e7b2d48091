"""Tests of sized recipes: the sizes that can be named, the rules, and the models that follow."""

import dataclasses
import json
import math
import random
import sys
import types

import pytest
from conftest import ROOT, call

from experiments import learning_rate_rules
from smallgpt_jax import models
from smallgpt_jax.config import sizes
from smallgpt_jax.config.recipes import load_config
from smallgpt_jax.conversion.model_card import format_model_card
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.gpt import GPT
from smallgpt_jax.models.naming import architecture_name
from smallgpt_jax.run import sizing
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import write_config
from smallgpt_jax.training import trainer
from smallgpt_jax.training.checks import check_config, require_learning_rate
from smallgpt_jax.training.opening import check_run
from smallgpt_jax.training.size_messages import size_messages

RECIPES = ("gpt", "llama", "pgpt", "lgpt", "moe", "mamba", "hybrid")


def sized(recipe: str, **overrides) -> Config:
    fields = {name.replace("__", "."): value for name, value in overrides.items()}
    return Config.of(load_config(recipe, fields))


def num_parameters(model: models.ModelConfig) -> int:
    return models.num_active_parameters(models.LanguageModel(model))


def active_parameters(config: Config) -> int:
    return num_parameters(config.model)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("30M", (30e6, None, 20.0)),
        ("1.1M", (1.1e6, None, 20.0)),
        ("0.3B@40", (0.3e9, None, 40.0)),
        ("500k@2.5", (500e3, None, 2.5)),
        ("1e17", (None, 1e17, 20.0)),
        ("2.5E+15@10", (None, 2.5e15, 10.0)),
    ],
)
def test_sizes(text, expected):
    size = sizes.Size.parse(text)
    assert (size.parameters, size.flops, size.tokens_per_parameter) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("30", "no size '30'; expected a size such as 30M, 30M@40 or 1e17"),
        ("30X", "no size '30X'; expected a size such as 30M, 30M@40 or 1e17"),
        ("30M@", "no size '30M@'; expected a size such as 30M, 30M@40 or 1e17"),
        ("-30M", "no size '-30M'; choose from paper, quickstart, tiny, or a size such as 30M"),
        ("", "no size ''; choose from paper, quickstart, tiny, or a size such as 30M"),
        ("0M", "size '0M': a model of 0 parameters; choose a size from 20k to 1000B parameters"),
        ("0.003k", "size '0.003k': a model of 3 parameters; choose a size from 20k"),
        ("30m", "no size '30m'; did you mean 30M?"),
        ("1e10", "size '1e10': choose a budget from 4.8e10 to 1.2e26 FLOPs, for models of 20k to"),
        ("1e99@40", "size '1e99@40': choose a budget from 9.6e10 to 2.4e26 FLOPs"),
        ("30M@0", "size '30M@0': expected between 0 and 100,000 tokens per parameter after @"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(text, message):
    with pytest.raises(UserError) as error:
        load_config(f"gpt:{text}")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["d_model", "num_layers", "num_heads", "mlp_ratio"])
def test_a_shape_of_zero_is_refused(field):
    with pytest.raises(UserError, match=f"^config.model.{field}=0(.0)?: must be a"):
        sized("gpt:1M", **{f"model__{field}": 0.0 if field == "mlp_ratio" else 0})


def test_an_odd_width_is_the_cause_of_odd_heads():
    """The user did not set the number of heads."""
    with pytest.raises(UserError, match=r"have 17; change config.model.d_model$"):
        sized("llama:1M", model__d_model=51)


@pytest.mark.parametrize(
    "recipe", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES[1:])]
)
def test_models_of_random_sizes(recipe):
    """They have the parameters that were asked for, train on 20 tokens for each, and suit meshes."""
    parameters = 10 ** random.Random(recipe).uniform(5.3, 9)
    config = sized(f"{recipe}:{parameters / 1e6:.4f}M")
    model, exact = config.model, active_parameters(config)
    assert exact == pytest.approx(parameters, rel=0.03)
    tokens = config.train.steps * config.train.batch_size * model.context_length
    assert tokens == pytest.approx(20 * exact, rel=0.01)
    assert model.num_layers % 2 == 0
    assert model.head_width % 2 == 0 and model.num_heads % 2 == 0
    shards = min(8, config.train.batch_size)  # 4 for the smallest
    tensor = 8 // shards
    for mesh in (
        {"data": shards, "tensor": tensor},
        {"data": 2, "fsdp": shards // 2, "tensor": tensor},
    ):
        config = config.replace(mesh=mesh)
        check_config(config, sharding.make_mesh(config.mesh))
    if recipe == "gpt":
        d, layers, rows = model.d_model, model.num_layers, 2 * model.vocab_size
        block = 4 * d**2 + 2 * d * model.mlp_width + 2 * d
        assert exact == (rows + model.context_length + 1) * d + layers * block


def test_the_vocabulary_follows_the_tokenizer():
    """With it the shape, so that the model still has its size; a value that is set wins."""
    larger = sized("llama:1M", data__tokenizer="sentencepiece:4096")
    assert larger.model.vocab_size == 4096
    assert active_parameters(larger) == pytest.approx(1e6, rel=0.03)
    rows = {
        (recipe, tokenizer): sized(recipe, data__tokenizer=tokenizer).model.vocab_size
        for recipe in ("gpt:1M", "gpt:quickstart", "gpt:tiny")
        for tokenizer in ("bytes", "gpt2", "sentencepiece:1000", "my_tokenizer/")
    }
    assert list(rows.values()) == [
        *(320, 50_304, 1024, 1024),  # 257, 50,257 and 1,000 entries; those of a folder are unknown
        *(320, 50_304, 1024, 1024),
        *(512, 50_304, 1024, 512),  # bytes are this recipe's own
    ]
    both = sized("gpt:1M", data__tokenizer="bytes", model__vocab_size=512)
    assert both.model.vocab_size == 512


def test_a_resumed_run_keeps_its_vocabulary():
    """As of before recipes followed the tokenizer."""
    saved = sized("gpt:1M", data__tokenizer="bytes", model__vocab_size=1024)
    assert Config.of(load_config("gpt:1M", {"data.tokenizer": "bytes"}), saved) == saved


def test_a_budget_of_flops():
    """Steps cost the budget, and train on about 20 tokens per parameter."""
    config = sized("gpt:1e14")
    tokens = config.train.steps * config.train.batch_size * config.model.context_length
    flops = tokens * train_flops_per_token(models.LanguageModel(config.model))
    assert flops == pytest.approx(1e14, rel=0.01)
    assert tokens / active_parameters(config) == pytest.approx(20, rel=0.05)


def test_rules():
    """By hand, from the sources' formulas."""
    assert sizes.batch_tokens(108e6, 20) == 327_680
    assert sizes.batch_tokens(864e6, 20) == pytest.approx(4 * 327_680)  # 8^⅔
    assert sizes.batch_tokens(108e6, 160) == pytest.approx(2.2176 * 327_680, rel=1e-4)  # 8^0.383
    assert sizes.learning_rate(108e6, 327_680) == pytest.approx(0.00235)
    assert sizes.learning_rate(864e6, 4 * 327_680) == pytest.approx(0.001175)  # 8^-⅓
    assert sizes.learning_rate(108e6 / 16, 4 * 51_606) == pytest.approx(2 * 0.0047, rel=1e-3)
    assert sizes.learning_rate(1e4, 2048) == sizes.learning_rate(2e4, 2048)
    # 8 times the tokens: a decay of √2.2176/8 times 0.1
    decay = sizes.weight_decay(108e6, sizes.batch_tokens(108e6, 160), 160)
    assert decay == pytest.approx(0.1 * math.sqrt(2.2176) / 8, rel=1e-4)


def test_small_models_have_half_the_batch():
    """And a rate and a decay that fit it."""
    published = 327_680 * 0.01 ** (2 / 3)  # at 1.08M
    assert sizes.batch_tokens(1.08e6, 20) == pytest.approx(published)
    for parameters in (0.999e6, 0.1e6):
        published = 327_680 * (parameters / 108e6) ** (2 / 3)
        half = sizes.batch_tokens(parameters, 20)
        assert half == pytest.approx(published / 2)
        for rule in (sizes.learning_rate, lambda n, batch: sizes.weight_decay(n, batch, 20)):
            ratio = rule(parameters, half) / rule(parameters, published)
            assert ratio == pytest.approx(math.sqrt(0.5))
    assert sizes.batch_tokens(1e4, 20) == 1024


def test_the_rate_of_the_records():
    """At 0.2M it is between the neighbours of the best recorded one, for all models with rope."""
    runs = json.loads((ROOT / "docs/results/rates.json").read_text())["runs"]
    losses: dict[str, dict[float, float]] = {}
    for run in runs:
        model = run["name"].partition("@")[0]
        rate = run["config"]["optimizer.learning_rate"]
        losses.setdefault(model, {})[rate] = run["curve"][-1]["loss"]
    for model in ("gpt", "llama", "pgpt", "moe", "lgpt", "hybrid"):
        fields = next(run["config"] for run in runs if run["name"].startswith(f"{model}@"))
        own = {name[6:]: value for name, value in fields.items() if name.startswith("model.")}
        rule = sizing.usual_rate(models.make_config(**own), batch=2048)
        best = min(losses[model], key=losses[model].get)
        assert best / 2 < rule < 2 * best, model


def test_fields_that_are_set_win_and_the_rest_follows():
    rule = sized("gpt:1M")
    narrow = sized("gpt:1M", model__d_model=64, model__num_layers=4)
    assert (narrow.model.d_model, narrow.model.num_layers) == (64, 4)
    assert narrow.optimizer.learning_rate > rule.optimizer.learning_rate
    ratio = active_parameters(narrow) / active_parameters(rule)
    work = [config.train.steps * config.train.batch_size for config in (narrow, rule)]
    assert work[0] / work[1] == pytest.approx(ratio, rel=0.01)
    assert (
        "parameters instead of 1M, because of fields that were set or " in size_messages(narrow)[1]
    )

    larger = sized("gpt:1M", train__batch_size=4 * rule.train.batch_size)
    assert larger.train.steps == pytest.approx(rule.train.steps / 4, abs=1)
    assert larger.optimizer.learning_rate / rule.optimizer.learning_rate == pytest.approx(
        2, rel=0.01
    )
    given = sized("gpt:1M", train__steps=7, optimizer__learning_rate=0.5)
    assert (given.train.steps, given.optimizer.decay_steps) == (7, 7)
    assert (given.optimizer.learning_rate, given.model) == (0.5, rule.model)

    fields = load_config("gpt:1M").to_dict()
    without = Config.of({"model": fields["model"], "train": {"size": "1M"}})
    assert (without.train.steps, without.train.batch_size, without.optimizer.learning_rate) == (
        (rule.train.steps, rule.train.batch_size, rule.optimizer.learning_rate)
    )


@pytest.mark.parametrize(
    "fields", [{"value_embeddings": (0, 1)}, {"tie_embeddings": True}, {"position": "none"}]
)
def test_tables_of_tokens_and_positions_are_no_part_of_the_blocks(fields):
    model = sized("gpt:1M").model
    changed = model.replace(**fields)
    assert num_parameters(changed) != num_parameters(model)
    assert sizing.block_parameters(changed) == sizing.block_parameters(model)


def test_the_parts_that_only_some_recipes_have():
    assert "4 × 80 in 2 paths, 4 heads, MLP 312; " in size_messages(sized("pgpt:0.5M"))[0]
    assert " × 17 experts, 4 per token; " in size_messages(sized("moe:0.3M"))[0]


def test_recipes_of_one_architecture_have_different_names():
    names = {recipe: architecture_name(sized(f"{recipe}:tiny").model) for recipe in RECIPES}
    assert names["gpt"] == "gpt" and names["pgpt"] == "pgpt"
    assert names["llama"] == "gpt (mlp gated, norm rms, position rope)"
    llama = models.LanguageModel(sized("llama:tiny").model)
    card = format_model_card("llama", llama, [])
    assert "This is a GPT (mlp gated, norm rms, position rope): " in card
    assert names["moe"] == "gpt (mlp moe)"
    assert names["hybrid"].startswith("gpt (mixers delta + attention, mlp gated, ")
    assert len(set(names.values())) == len(names)


def test_the_line_of_a_size(tmp_path, monkeypatch, capsys):
    config = sized("gpt:1M")
    model, train, optimizer = config.model, config.train, config.optimizer
    (line,) = size_messages(config)
    assert line.startswith(
        f"size 1M: {model.num_layers} × {model.d_model}, {model.num_heads} heads, MLP "
        f"{model.mlp_width}; {train.steps:,} steps of 4,096 tokens, 20 per parameter; rate "
        f"{optimizer.learning_rate:.3g} after {optimizer.warmup_steps} steps, decay over the last "
    )
    assert " after 1 step, " in size_messages(sized("gpt:1M", optimizer__warmup_steps=1))[0]

    monkeypatch.setattr(trainer, "with_microbatches", lambda config: pytest.fail("compiles"))
    missing = config.replace(data={"source": str(tmp_path / "texts")})
    with pytest.raises(UserError, match="texts"):  # before the steps are compiled, for minutes
        trainer.train_and_evaluate(missing, tmp_path / "run")
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    "recipe, fields, note",
    [
        ("gpt:1M@1000", {}, ""),
        ("gpt:1M", {"train__steps": 100}, "{ratio:.3g} tokens per parameter instead of 20, "),
        ("gpt:1e12", {}, ""),
        (
            "gpt:1e12",
            {"train__steps": 467},
            " 2.5e+11 training FLOPs instead of 1e+12 and 5.01 tokens ",
        ),
        (
            "gpt:1e12",
            {"model__d_model": 64},
            "run has {ratio:.3g} tokens per parameter instead of 20",
        ),
    ],
)
def test_a_run_that_is_not_what_its_size_says(recipe, fields, note):
    config = sized(recipe, **fields)
    tokens = config.train.steps * config.train.batch_size * config.model.context_length
    line, *notes = size_messages(config)
    if note:
        (shown,) = notes
        assert note.format(ratio=tokens / active_parameters(config)) in shown
    else:
        assert not notes
    assert "e+" not in line


@pytest.mark.parametrize("recipe", ["moe:7e13", "llama:3e11"])
def test_budgets_between_shapes_of_different_depth(recipe):
    """Two shapes lead to each other; the one with more fitting tokens is taken."""
    config = sized(recipe)
    tokens = config.train.steps * config.train.batch_size * config.model.context_length
    ratio = tokens / active_parameters(config)
    assert ratio == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"train__batch_size": 0}, "config.train.batch_size=0: must be an integer, at least 1"),
        ({"train__batch_size": -8}, "config.train.batch_size=-8: must be an integer, at least 1"),
        ({"train__steps": 0}, "config.train.steps=0: must be an integer, at least 1"),
        ({"train__steps": -2}, "config.train.steps=-2: must be an integer, at least 1"),
        (
            {"model__mlp_ratio": math.inf},
            "config.model.mlp_ratio=inf: must be a finite number above 0",
        ),
        ({"model__head_dim": "8"}, "config.model.head_dim='8': must be an integer, at least 0"),
        ({"model__d_model": 64.0}, "config.model.d_model=64.0: must be an integer, at least 1"),
        (
            {"model__experts_per_token": 0, "model__num_shared_experts": 0},
            "config.model.experts_per_token=0: must be",
        ),
    ],
)
def test_fields_that_the_rules_cannot_use_are_refused(fields, message):
    groups = load_config("moe:0.2M").to_dict()
    for path, value in fields.items():
        group, _, field = path.partition("__")
        groups[group][field] = value
    with pytest.raises(UserError) as error:
        Config.of(groups)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_run_of_another_architecture_is_refused(tmp_path):
    """Its fields that follow from the size are not those of the saved run: gpt has no stages."""
    write_config(tmp_path, sized("gpt:20k").to_dict())
    (tmp_path / "store.json").touch()  # of a run that has started
    with pytest.raises(UserError, match=r"model\.architecture was 'gpt', now 'lgpt'"):
        check_run(load_config("lgpt:30k"), tmp_path)


@pytest.mark.parametrize(
    "recipe, rule, tokens", [("gpt:0.65M", 3747, 4096), ("hybrid:0.2M", 1651, 1024)]
)
def test_a_batch_is_a_power_of_two_and_at_most_an_eighth_above_the_rule(recipe, rule, tokens):
    config = sized(recipe)
    count = sizing.block_parameters(config.model)
    assert sizes.batch_tokens(count, 20) == pytest.approx(rule, abs=0.5)
    assert config.train.batch_size * config.model.context_length == tokens


def test_a_small_batch_of_long_texts_has_a_sequence_for_each_of_four_devices():
    assert sized("llama:0.2M", model__context_length=768).train.batch_size == 4


def test_a_resumed_run_keeps_its_size(monkeypatch):
    saved = sized("gpt:1M", model__d_model=64)
    monkeypatch.setattr(sizing, "fit_shape", None)  # other rules of a later version
    monkeypatch.setattr(sizes, "learning_rate", None)
    config = Config.of(load_config("gpt:1M"), saved)
    assert config == saved
    assert Config.of(saved.to_dict()) == saved


def test_steps_after_a_decay_to_zero_are_refused(tmp_path):
    write_config(tmp_path, sized("gpt:20k", train__steps=20).to_dict())
    (tmp_path / "store.json").touch()  # of a run that has started
    for recipe in ("gpt:20k", f"run:{tmp_path}"):
        with pytest.raises(UserError, match="=60: the learning rate is 0 from step 20 on"):
            check_run(load_config(recipe, {"train.steps": 60}), tmp_path)
    rises = sized("gpt:20k", train__steps=60, optimizer__decay_steps=20).replace(
        optimizer={"final_learning_rate": 1e-3}
    )
    require_learning_rate(rises)
    require_learning_rate(rises.replace(optimizer={"schedule": "constant", "learning_rate": 0.1}))


def test_rates_that_are_far_too_high_are_named():
    """The quickstart's is, for a wider and deeper model."""
    assert not size_messages(sized("gpt:quickstart"))
    wider = sized("gpt:quickstart", model__d_model=192, model__num_layers=6)
    (line,) = size_messages(wider)
    assert line.startswith("config.optimizer.learning_rate=0.003: the rule of sizes would choose ")


@pytest.mark.parametrize(
    "recipe, fields",
    [
        ("pgpt:1M", {"num_paths": 3}),
        ("lgpt:1M", {"blocks_per_stage": 3}),
        ("llama:0.5M", {"num_kv_heads": 3}),
        ("llama:1M", {"num_kv_heads": 5}),
    ],
)
def test_the_rest_of_the_shape_suits_a_field_that_is_set(recipe, fields):
    config = sized(recipe, **{f"model__{name}": value for name, value in fields.items()})
    assert fields.items() <= vars(config.model).items()
    wanted = sizes.Size.parse(config.train.size).parameters
    assert active_parameters(config) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"optimizer__name": "lion"}, "config.optimizer.name='lion': the rule of sizes is for adamw "),
        ({"optimizer__base_width": 64}, "config.optimizer.base_width=64: the rule of sizes is for "),
        ({"train__batch_size": 512}, "a batch has 131,072 tokens, 19 times as many as the rule's; "),
    ],
)  # fmt: skip
def test_what_the_rule_of_the_rate_was_not_made_for(fields, message):
    _, line = size_messages(sized("llama:0.5M", **fields))
    assert line.startswith(message)
    if "optimizer__name" in fields:
        assert not size_messages(sized("llama:0.5M", **fields, optimizer__learning_rate=1e-4))[1:]


def test_the_size_is_named_with_the_recipe():
    for overrides in ({"train.size": "1M"}, {"train": {"size": "1M"}}):
        with pytest.raises(
            UserError, match=r"train\.size: is named with the recipe, such as llama:"
        ):
            load_config("gpt:quickstart", overrides)
    done = call("plan", "--config=gpt:1M", "--topology=cpu:1", "--config.train.size=2M")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: config.train.size: is named with "
    )


def test_an_architecture_of_ones_own(monkeypatch):
    """It gets the usual shape; its hook sets fields that the recipe leaves to the size."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OwnConfig(models.ModelConfig):
        passes: int

        @classmethod
        def shape(cls, fields):
            return {**super().shape(fields), "passes": fields["num_layers"] // 2}

        @property
        def rate_factor(self) -> float:
            return 0.25

    class Own(GPT):
        config: OwnConfig

        Config = OwnConfig

    module = types.ModuleType("own_model")
    module.Own = Own
    monkeypatch.setitem(sys.modules, "own_model", module)
    config = sized("gpt:1M", model__architecture="own_model:Own", model__passes=-1)
    assert config.model.passes == config.model.num_layers // 2
    assert active_parameters(config) == pytest.approx(1e6, rel=0.03)
    gpt = sized("gpt:1M")
    assert config.optimizer.learning_rate == pytest.approx(
        gpt.optimizer.learning_rate / 2, rel=0.01
    )
    monkeypatch.setattr(OwnConfig, "rate_factor", "0.25")
    with pytest.raises(UserError, match=r"OwnConfig\.rate_factor: is '0\.25'; must be a finite"):
        sized("gpt:1M", model__architecture="own_model:Own", model__passes=-1)
    monkeypatch.setattr(OwnConfig, "rate_factor", 0.25)
    wide = sized("gpt:1M", model__architecture="own_model:Own", model__passes=-1, model__d_model=64)
    assert (
        "coarse shapes, or of custom modules that the rule cannot fit (`shape` "
        in size_messages(wide)[1]
    )
    monkeypatch.setattr(OwnConfig, "shape", classmethod(lambda cls, fields: None))
    with pytest.raises(UserError, match=r"OwnConfig\.shape: returned None; must return "):
        sized("gpt:0.9M", model__architecture="own_model:Own", model__passes=-1)


def test_the_table_of_errors_is_current():
    lines = (ROOT / "docs/sizes.md").read_text().splitlines()
    table = learning_rate_rules.table()
    start = lines.index(table[0])
    assert lines[start : start + len(table)] == table
