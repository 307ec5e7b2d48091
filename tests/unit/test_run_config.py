"""Tests of the typed config of a run: defaults, schedules that follow train.steps, and what a
resumed run keeps.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import ClassVar, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_config

from configs import run as run_recipe
from smallgpt_jax import models
from smallgpt_jax.comparison.config import CompareConfig
from smallgpt_jax.config.group import IN_DECAY, ConfigGroup
from smallgpt_jax.devices import platform
from smallgpt_jax.errors import UserError
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.learning_rate import (
    DECAYS,
    SCHEDULES,
    decay_start,
    learning_rate_schedule,
)
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.config_file import FORMAT, read_config, write_config
from smallgpt_jax.run.workdir import check_workdir, config_in_workdir


def test_every_field_of_the_paper_recipe_has_its_default():
    groups = Config.of(load_config("pgpt", "paper")).to_dict()
    for name, group in GROUPS.items():
        for field in dataclasses.fields(group):
            assert groups[name][field.name] == (
                "pgpt" if field.name == "architecture" else field.default
            ), field.name


def test_every_field_is_documented():
    """The comment above a field is its documentation."""
    for group in (*GROUPS.values(), CompareConfig):
        lines = Path(sys.modules[group.__module__].__file__).read_text().splitlines()
        for field in dataclasses.fields(group):
            (at,) = (i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
            assert lines[at - 1].startswith("    # "), (group, field.name)


def test_the_schedule_of_small_recipes_follows_the_steps():
    """With one flag, a shorter run still decays to its last step. The paper's recipe keeps its own
    steps.
    """
    short = Config.of(load_config("gpt", "quickstart", train__steps=60)).optimizer
    assert (short.warmup_steps, short.decay_steps, short.final_learning_rate) == (
        1,
        60,
        pytest.approx(3e-4),
    )
    whole = Config.of(load_config("gpt", "quickstart")).optimizer
    assert (whole.warmup_steps, whole.decay_steps, whole.final_learning_rate) == (
        50,
        2000,
        pytest.approx(3e-4),
    )
    paper = Config.of(load_config("gpt", "paper", train__steps=60)).optimizer
    assert (paper.warmup_steps, paper.decay_steps, paper.final_learning_rate) == (715, 19_073, 6e-5)


def test_a_resumed_run_keeps_its_schedule():
    saved = Config.of(load_config("gpt", "quickstart", train__steps=60))
    longer = load_config("gpt", "quickstart", train__steps=90)
    assert Config.of(longer, saved).optimizer == saved.optimizer
    assert Config.of(longer).optimizer.decay_steps == 90
    longer.optimizer.decay_steps = 80  # given explicitly
    assert Config.of(longer, saved).optimizer.decay_steps == 80


def use_processor(monkeypatch, flags: str) -> None:
    monkeypatch.setattr(platform, "processor", lambda: {"flags": f"fpu {flags} ssse3"})


@pytest.mark.parametrize(
    "kind, flags, dtype",
    [
        ("tpu", "avx2", "bfloat16"),
        ("gpu", "avx2", "bfloat16"),
        ("cpu", "avx2", "float32"),
        ("cpu", "avx512f avx512_vnni", "float32"),
        ("cpu", "avx512f avx512_bf16", "bfloat16"),
        ("cpu", "avx512_bf16 amx_bf16", "float32"),
    ],
)
def test_dtype_of_a_platform(monkeypatch, kind, flags, dtype):
    use_processor(monkeypatch, flags)
    device = jax.sharding.AbstractDevice(kind, None, kind)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert Config.of(load_config("pgpt", model__dtype="auto")).model.dtype == dtype
        (other,) = {"float32", "bfloat16"} - {dtype}
        assert Config.of(load_config("pgpt", model__dtype=other)).model.dtype == other


def test_a_resumed_run_keeps_its_dtype(monkeypatch, tmp_path):
    """Also on another processor, and never against a dtype that was given explicitly."""
    use_processor(monkeypatch, "avx512_bf16")
    config = load_config("gpt", model__dtype="auto")
    write_config(tmp_path, Config.of(config).to_dict())
    assert json.loads((tmp_path / "config.json").read_text())["model"]["dtype"] == "bfloat16"
    (tmp_path / "store.json").write_text("{}")
    use_processor(monkeypatch, "avx2")
    resumed = config_in_workdir(config, tmp_path)
    assert resumed.model.dtype == "bfloat16"
    check_workdir(tmp_path, resumed)
    with pytest.raises(UserError, match=r"model\.dtype was 'bfloat16', now 'float32'"):
        check_workdir(
            tmp_path, config_in_workdir(load_config("gpt", model__dtype="float32"), tmp_path)
        )


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cosine", lambda x: 0.1 + 0.9 * (1 + np.cos(np.pi * x)) / 2),
        ("linear", lambda x: 1 - 0.9 * x),
        (
            "wsd",
            lambda x: np.where(
                x < 0.75, 1.0, 0.1 + 0.9 * (1 - np.sqrt(np.maximum(x - 0.75, 0) / 0.25))
            ),
        ),
        (
            "wsd_linear",
            lambda x: np.where(x < 0.75, 1.0, 0.1 + 0.9 * (1 - np.maximum(x - 0.75, 0) / 0.25)),
        ),
        ("constant", np.ones_like),
    ],
)
def test_schedules(name, expected):
    """Each schedule equals its formula, after a linear warmup; x runs from 0 to 1 between warmup
    and decay_steps.
    """
    config = OptimizerConfig(
        schedule=name,
        learning_rate=2.0,
        warmup_steps=20,
        decay_steps=100,
        decay_fraction=0.2,
        final_learning_rate=0.2,
    )
    rates = jax.vmap(learning_rate_schedule(config))(jnp.arange(131.0))
    np.testing.assert_allclose(rates[:20], 2.0 * np.arange(20) / 20, rtol=1e-6)
    np.testing.assert_allclose(rates[20:101], 2.0 * expected(np.arange(81) / 80), rtol=1e-5)
    np.testing.assert_array_equal(rates[101:], rates[100])


@pytest.mark.parametrize("name", sorted(DECAYS))
def test_runs_of_several_lengths_have_the_same_rates_before_the_decay(name):
    """Bit for bit, also with another length of the decay."""

    def rates(steps: int, fraction: float) -> tuple[int, np.ndarray]:
        config = OptimizerConfig(
            schedule=name,
            warmup_steps=7,
            decay_steps=steps,
            decay_fraction=fraction,
            final_learning_rate=6e-5,
        )
        return decay_start(config), np.array(
            jax.vmap(learning_rate_schedule(config))(jnp.arange(100.0))
        )

    trunk_start, trunk = rates(100, 0.2)
    start, short = rates(50, 0.1)
    assert (trunk_start, start) == (80, 45)
    np.testing.assert_array_equal(short[: start + 1], trunk[: start + 1])
    assert (short[start + 1 : 51] < trunk[start + 1 : 51]).all() and short[50] == np.float32(6e-5)
    assert OptimizerConfig.field_names(**IN_DECAY) == ("decay_steps", "decay_fraction")
    assert [name for name, group in GROUPS.items() if group.field_names(**IN_DECAY)] == [
        "optimizer"
    ]


@pytest.mark.parametrize("name", sorted(DECAYS))
def test_decays_that_lower_no_rate_are_refused(name):
    def config(fraction: float, warmup: int = 5) -> OptimizerConfig:
        return OptimizerConfig(
            schedule=name, decay_steps=40, warmup_steps=warmup, decay_fraction=fraction
        )

    for steps, refused in ((0, config(0.01)), (1, config(0.03)), (1, config(0.2, warmup=39))):
        with pytest.raises(
            UserError, match=rf"config.optimizer.decay_fraction=.*: the decay would have {steps} "
        ):
            learning_rate_schedule(refused)
    rates = [float(learning_rate_schedule(config(0.05))(step)) for step in (38, 39)]
    assert rates[1] < rates[0] == pytest.approx(config(0.05).learning_rate)


def test_unknown_schedules_are_refused():
    with pytest.raises(
        UserError,
        match=r"config.optimizer.schedule='cosin': must be one of .*; did you mean 'cosine'",
    ):
        learning_rate_schedule(OptimizerConfig(schedule="cosin"))
    assert set(SCHEDULES) == {"cosine", "linear", "wsd", "wsd_linear", "constant"}


def test_a_new_field_does_not_stop_an_old_run(tmp_path, monkeypatch):
    """A config.json without a field is read with the field's default, and may be resumed with this
    default.
    """
    config = Config.of(load_config("gpt"))
    groups = config.to_dict()
    del groups["optimizer"]["clip_norm"], groups["model"]["norm"], groups["train"]["stall_seconds"]
    (tmp_path / "config.json").write_text(json.dumps({"format": FORMAT, **groups}))
    (tmp_path / "store.json").write_text("{}")
    assert read_config(tmp_path) == config
    check_workdir(tmp_path, config)
    with pytest.raises(UserError, match=r"optimizer\.clip_norm was 1\.0, now 0\.5"):
        check_workdir(tmp_path, config.replace(optimizer={"clip_norm": 0.5}))


def test_configs_of_unreleased_versions_are_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Config.of(load_config("gpt")).to_dict()))
    with pytest.raises(UserError, match=r"config.json: was written by another version") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_the_recipe_of_a_run_is_its_config(tmp_path):
    config = Config.of(load_config("pgpt", model__num_paths=4, model__num_layers=4))
    (tmp_path / "config.json").write_text(json.dumps({"format": FORMAT, **config.to_dict()}))
    assert Config.of(run_recipe.get_config(str(tmp_path))) == config


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(train__stepz=3), r"config.train.stepz=3: no such field; did you mean 'steps'"),
        (dict(train__eval_every=0), r"config.train.eval_every=0: must be at least 1"),
        (
            dict(optimizer__decay_fraction=0.0),
            r"config.optimizer.decay_fraction=0.0: must be above 0",
        ),
        (
            dict(train__steps=2**31),
            r"config.train.steps=2147483648: must be below 2\^31",
        ),
        (
            dict(optimizer__decay_steps=2**31),
            r"config.optimizer.decay_steps=2147483648: must be below 2\^31",
        ),
        (dict(optimizer__warmup_steps=-2), r"config.optimizer.warmup_steps=-2: must be at least 0"),
        (
            dict(model__dtype="autos"),
            r"config.model.dtype='autos': must be one of float32, bfloat16, auto; did you mean",
        ),
        (
            dict(train__kept_steps=(0,)),
            r"config.train.kept_steps=\(0,\): must be integers, at least 1",
        ),
        (dict(data__workers=-1), r"config.data.workers=-1: must be at least 0"),
        (dict(data__max_document_bytes=0), r"config.data.max_document_bytes=0: must be at least 1"),
        (
            dict(data__invalid_utf8="ignore"),
            r"config.data.invalid_utf8='ignore': must be one of refuse, replace",
        ),
        (
            dict(data__invalid_items="keep"),
            r"config.data.invalid_items='keep': must be one of refuse, skip",
        ),
        (
            dict(data__validation_fraction=0.0),
            r"config.data.validation_fraction=0.0: must be above 0 and below 1",
        ),
    ],
)
def test_wrong_fields(change, message):
    groups = load_config("gpt").to_dict()
    for name, value in change.items():
        group, field = name.split("__")
        groups[group][field] = value
    with pytest.raises(UserError, match=message):
        Config.of(groups)


def test_one_line_declares_a_field():
    """The recipe's ConfigDict, messages and the rule of resumption follow from the dataclass."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Group(ConfigGroup):
        GROUP: ClassVar[str] = "group"

        width: int = 3
        rates: tuple[float, ...] = (0.5,)

    assert Group.config_dict().to_dict() == {"width": 3, "rates": (0.5,)}
    assert Group.field_names(fixed_by="run") == ("width", "rates")
    assert Group.from_fields({"rates": [1.0]}).rates == (1.0,)
    with pytest.raises(
        UserError, match=r"config.group.widht=3: no such field; did you mean 'width'"
    ):
        Group.from_fields({"widht": 3})
    with pytest.raises(UserError, match=r"config.group.width='3': must be an integer"):
        Group.from_fields({"width": "3"})


def test_types_may_be_strings():
    """All annotations of a module with `from __future__ import annotations` are strings."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(models.ModelConfig):
        passes: "int"
        scale: "float" = 1.0
        taps: "tuple[int, ...]" = ()

    placeholder = Own.config_dict()
    placeholder.passes = 2
    assert placeholder.passes == 2 and "num_layers" in placeholder
    with pytest.raises(TypeError):
        placeholder.passes = "two"
    own = Own.from_fields({"architecture": "own:Own", "passes": 3, "scale": 2, "taps": [1, 2]})
    assert (own.passes, own.scale, own.taps, type(own.scale)) == (3, 2.0, (1, 2), float)
    with pytest.raises(
        UserError, match=r"config.model.taps=3: must be integers, separated by commas"
    ):
        Own.from_fields({"architecture": "own:Own", "passes": 3, "taps": 3})


@pytest.mark.parametrize(
    "declared, default, message",
    [
        ("int | None", None, "declares another type than int, float, bool, str or a tuple"),
        (Optional[str], None, "declares another type"),  # noqa: UP045
        (list[int], dataclasses.field(default_factory=list), "declares another type"),
        (
            tuple[int, ...],
            dataclasses.field(default_factory=tuple),
            "declares a default_factory; declare a default value",
        ),
    ],
)
def test_unsupported_declarations(declared, default, message):
    own = dataclasses.make_dataclass(
        "Own",
        [("extra", declared, default)],
        bases=(models.ModelConfig,),
        frozen=True,
        kw_only=True,
    )
    for read in (own.config_dict, lambda: own.from_fields({"architecture": "own:Own"})):
        with pytest.raises(UserError, match=rf"^config\.model\.extra: Own {message}") as error:
            read()
        assert "\n" not in str(error.value)


def test_a_config_class_without_the_decorator():
    class Own(models.ModelConfig):
        extra: int = 3

    with pytest.raises(
        UserError,
        match=r"config\.model\.extra: Own is not a dataclass with this field; decorate it",
    ):
        Own.from_fields({"architecture": "own:Own"})
