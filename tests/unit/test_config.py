"""Tests of the shipped configs, and of the error messages for wrong flags and config files."""

import dataclasses
import importlib

import jax
import pytest
from conftest import ARCHITECTURES, ROOT, call, load_config

from configs import base
from smallgpt_jax import __main__ as package
from smallgpt_jax import cli, models
from smallgpt_jax.devices import sharding
from smallgpt_jax.models.parameters import abstract_variables
from smallgpt_jax.optim.optimizer import make_optimizer
from smallgpt_jax.run.config import Config
from smallgpt_jax.training.checks import check_config

RECIPES = [
    path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("base", "run")
]


def test_every_architecture_has_a_recipe():
    assert set(ARCHITECTURES) <= set(RECIPES)


# This test leaves out sizes at which other tests train models, and the paper's four recipes, whose
# parameters and FLOPs at size `paper` are counted in test_plan.py.
@pytest.mark.parametrize(
    "recipe, size",
    [
        *(
            pytest.param(recipe, "paper", marks=[pytest.mark.slow] * (recipe == "hybrid"))
            for recipe in RECIPES
            if recipe not in ("gpt", "pgpt", "lgpt", "cgpt")
        ),
        ("lgpt", "quickstart"),
    ],
)
def test_every_recipe_builds(recipe, size):
    config = importlib.import_module(f"configs.{recipe}").get_config(size)
    assert config.is_locked
    model = models.build(**config.model)
    params = models.abstract_params(model)
    tokens = jax.ShapeDtypeStruct((2, config.model.context_length), "int32")
    logits = jax.eval_shape(model.apply, abstract_variables(model), tokens)
    assert logits.shape == (2, config.model.context_length, config.model.vocab_size)
    optimizer = make_optimizer(params, Config.of(config).optimizer)
    state = jax.eval_shape(optimizer.init, params)
    assert 2 * sum(x.size for x in jax.tree.leaves(params)) == sum(
        x.size for x in jax.tree.leaves(state) if x.ndim
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", base.SIZES)
def test_every_recipe_is_a_valid_config(recipe, size):
    config = importlib.import_module(f"configs.{recipe}").get_config(size)
    assert config.is_locked
    config = Config.of(config)
    mesh = sharding.make_mesh(config.mesh)
    check_config(config, mesh)


def test_cgpt_kernel():
    """The convolutions of cgpt have kernel size 1 at size `paper`, and kernel size 3 at the smaller
    sizes.

    In configs/compare/paper.py, they have kernel size 1 at all sizes.
    """
    assert {size: load_config("cgpt", size).model.conv_kernel for size in base.SIZES} == {
        "paper": 1,
        "quickstart": 3,
        "tiny": 3,
    }
    comparison = importlib.import_module("configs.compare.paper")
    assert {comparison.get_config(size).runs.cgpt.model.conv_kernel for size in base.SIZES} == {1}


def test_paper_recipes_differ_only_in_the_model():
    for size in base.SIZES:
        others = [
            load_config(name, size).copy_and_resolve_references()
            for name in ("gpt", "pgpt", "lgpt", "cgpt")
        ]
        for config in others:
            for group in ("data", "mesh", "train"):
                assert config[group] == others[0][group]
            # At size `quickstart`, the learning rate of lgpt and cgpt differs from that of gpt and
            # pgpt.
            narrows = size == "quickstart" and config.model.architecture in ("lgpt", "cgpt")
            assert config.optimizer == others[2 if narrows else 0].optimizer


def comparison_models(name: str, size: str = "quickstart") -> dict[str, models.LanguageModel]:
    comparison = importlib.import_module(f"configs.compare.{name}").get_config(size)
    return {
        name: models.build(
            **{
                **comparison.model,
                **{field: value for field, value in run.model.items() if value is not None},
            }
        )
        for name, run in comparison.runs.items()
    }


def test_mixers_of_the_ladder():
    """The runs with other mixers differ from those with attention in as few fields as possible."""
    configs = {
        name: dataclasses.asdict(model.config)
        for name, model in comparison_models("ladder").items()
    }
    changed = {
        name: {field for field, value in configs[name].items() if value != configs[other][field]}
        for name, other in (
            ("hybrid", "gqa"),
            ("delta", "gated"),
            ("mamba", "gated"),
            ("conv", "gated"),
        )
    }
    assert changed == {
        "hybrid": {"mixers", "delta_head_dim"},
        "delta": {"mixers", "position", "delta_head_dim"},
        "mamba": {"mixers", "position", "mamba_state"},
        "conv": {"mixers", "position"},
    }
    assert {configs[name]["mixers"] for name in ("delta", "mamba", "conv")} == {
        ("delta",),
        ("mamba",),
        ("conv",),
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", ["45k", "0.2M"])
def test_mixers_comparison_changes_one_thing(size):
    """Without the tables of value embeddings, parameters are equal within 2%, and the states within
    12%.
    """
    found = {
        name.partition("@")[0]: model
        for name, model in comparison_models("mixers", "small").items()
        if name.endswith(size)
    }
    parameters = {name: models.num_parameters(model) for name, model in found.items()}
    assert (
        parameters.pop("value embeddings")
        > max(parameters.values())
        < 1.02 * min(parameters.values())
    )
    delta, mamba = found["delta"].config, found["mamba"].config
    assert delta.delta_key_width * delta.delta_value_width == pytest.approx(
        mamba.mamba_state * mamba.mamba_head_width, rel=0.12
    )
    attention = dataclasses.asdict(found["attention"].config)
    sizes = {"delta_head_dim", "delta_value_ratio", "mamba_state", "mamba_expand"}
    changed = {
        name: {
            field
            for field, value in dataclasses.asdict(model.config).items()
            if value != attention[field]
        }
        - sizes
        for name, model in found.items()
    }
    assert changed == {
        "attention": set(),
        "windows": {"attention_windows"},
        "hybrid": {"mixers"},
        "delta": {"mixers", "position"},
        "mamba": {"mixers", "position"},
        "conv": {"mixers", "position"},
        "x0": {"input_mix"},
        "residual scales": {"residual_scales"},
        "value embeddings": {"value_embeddings"},
        "smear": {"smear"},
        "canon": {"canon_taps"},
        "gate": {"attention_gate"},
        "softcap": {"logit_softcap"},
        "parallel": {"parallel_block"},
        "loops": {"loops"},
        "ema": set(),
    }


def test_sizes_of_the_recall_comparison():
    """Parameters are equal within 3%, and the states of delta and mamba are equal."""
    found = comparison_models("recall")
    parameters = [models.num_parameters(model) for model in found.values()]
    assert max(parameters) < 1.03 * min(parameters)
    delta, mamba = found["delta"].config, found["mamba"].config
    assert (
        delta.num_heads * delta.delta_key_width * delta.delta_value_width
        == mamba.num_heads * mamba.mamba_state * mamba.mamba_head_width
        == 1152
    )


@pytest.mark.parametrize(
    "flags, status, substrings",
    [
        ([], 2, ["--config and --workdir must be given"]),
        (["--config=configs/nothing.py"], 2, ["no file 'configs/nothing.py'"]),
        (["--config=configs/gpt.py:huge"], 2, ["'huge'", "quickstart"]),
        (
            ["--config=configs/gpt.py", "--config.model.num_layer=3"],
            2,
            ["'num_layer'", "--config.model.num_layers?"],
        ),
        (["--config=configs/gpt.py", "--config.modle.num_layers=3"], 2, ["'modle'", "'model'"]),
        (
            ["--config=configs/gpt.py", "--config.model.num_layers=x"],
            2,
            ["num_layers=x: expected an integer"],
        ),
        (
            ["--config=configs/gpt.py", "--config.optimizer.beta1=x"],
            2,
            ["beta1=x: expected a number"],
        ),
        (
            ["--config=configs/gpt.py", "--config.model.use_bias=x"],
            2,
            ["use_bias=x: expected true or false"],
        ),
        (["--config=configs/gpt.py", "--config.model.num_layers=2.5"], 2, ["num_layers=2.5"]),
        (["--config=configs/gpt.py", "--wrokdir=a"], 2, ["wrokdir"]),
        (["--config=configs/gpt.py", "more"], 2, ["'more'"]),
        (["--config=configs/gpt.py", "--train.steps=5"], 2, ["did you mean --config.train.steps?"]),
        (
            ["--steps=30", "--config=configs/gpt.py"],
            2,
            ["no flag --steps; did you mean --config.train.steps?"],
        ),
        (
            ["--config=configs/gpt.py", "--batch-size", "4"],
            2,
            ["--batch-size; did you mean --config.train.batch_size?"],
        ),
        (["--steps=30"], 2, ["no flag --steps; did you mean --config.train.steps?"]),
    ],
)
def test_wrong_usage(tmp_path, flags, status, substrings):
    flags = [*flags, f"--workdir={tmp_path / 'run'}"] if flags else []
    result = call("main", *flags)
    assert result.returncode == status
    assert all(s in result.stderr for s in substrings), result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") <= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--config=gtp"], "no recipe or file 'gtp'; did you mean gpt?"),
        (["--config", "gtp:tiny"], "no recipe or file 'gtp'; did you mean gpt:tiny?"),
        (["--config=configs/gtp.py"], "no file 'configs/gtp.py'; did you mean configs/gpt.py?"),
        (["--config=paper"], "no recipe or file 'paper'; did you mean compare/paper?"),
        (["--config=nothing.py"], "no file 'nothing.py'"),
        (
            ["--config=gs://bucket/gpt.py"],
            "'gs://bucket/gpt.py' is a URL, which is not supported here; use a local path",
        ),
    ],
)
def test_missing_config_files(flags, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        cli.parse(["main", *flags])
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: --config: {message}\n")


@pytest.mark.parametrize(
    "body, substrings",
    [
        ("config.train.step = 3", ["line 4", "'step'", "--config.train.steps?"]),
        ("config.model.num_layers = 'three'", ["num_layers", "three"]),
        ("config.model.num_layers = three", ["line 4", "NameError", "three"]),
        ("config.model.num_layers = = 3", ["line 4", "SyntaxError"]),
    ],
)
def test_wrong_config_files(tmp_path, body, substrings):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import base\ndef get_config(size='tiny'):\n"
        f"    config = base.get_config(size)\n    {body}\n    return config\n"
    )
    result = call("main", f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert all(s in result.stderr for s in substrings), result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") <= 2


def test_the_package_lists_its_commands(monkeypatch, capsys):
    commands = {
        path.stem
        for path in (ROOT / "smallgpt_jax").glob("*.py")
        if "cli.run(main" in path.read_text()
    }
    assert set(package.COMMANDS) == commands
    monkeypatch.setattr("sys.argv", ["smallgpt_jax"])
    package.main()
    listed = capsys.readouterr().out.splitlines()
    assert (
        "python -m smallgpt_jax.main      Trains the model of a config and writes the run to a "
        "workdir." in listed
    )
    assert all(any(f"smallgpt_jax.{command} " in line for line in listed) for command in commands)
    monkeypatch.setattr("sys.argv", ["smallgpt_jax", "main"])
    with pytest.raises(SystemExit, match="2"):
        package.main()
    assert capsys.readouterr().err.endswith("use python -m smallgpt_jax.main\n")


@pytest.mark.parametrize("command", ["main", "prepare", "generate"])
def test_help(command):
    result = call(command, "--help")
    assert result.returncode == 0
    assert f"python -m smallgpt_jax.{command}" in result.stdout
