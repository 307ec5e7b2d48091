"""From a comparison's config to its runs: each one's own config, with as much of everything as the others."""

import bisect
import copy
import difflib
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from smallgpt_jax import data, models, workdir
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.data.pipeline import pack
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import locked, safe_name, write_atomically
from smallgpt_jax.program import build_program

BUDGETS = ("tokens", "flops", "parameters", "seconds")
MOST_OFF = 0.01  # by how much a run may miss its budget of tokens, FLOPs or seconds
MOST_OFF_PARAMETERS = 0.02
MOST_MOVED = 0.1  # by how much equal parameters may be others than the reference's
RUNS_FOLDER, SPEEDS_FILE = "runs", "speeds.json"  # in the folder of a comparison
SPEED_SECONDS = 5.0  # for how long a run's speed is measured


class Planned(NamedTuple):
    """One run of a comparison: `config` as `smallgpt_jax.main` would take it."""

    name: str
    config: ConfigDict
    folder: Path


def plan(config: ConfigDict, output: Path) -> list[Planned]:
    """The runs of a comparison, in the order in which they are trained: all with the first seed, then all
    with the next.

    Raises UserError for a comparison that cannot be made, and for a budget that a run cannot meet.
    """
    runs, compare = resolved(config), config.compare
    reference = resolve(config, compare.reference)
    if compare.budget == "parameters":
        runs = with_equal_parameters(runs, num_parameters(reference))
    speeds = measured_speeds(runs, output) if compare.budget == "seconds" else {}
    for name, run in runs.items():
        set_steps(name, run, compare, reference, speeds.get(name))
    planned = []
    for seed in range(config.train.seed, config.train.seed + compare.seeds):
        for name, run in runs.items():
            seeded = run.copy_and_resolve_references()
            seeded.train.seed = seed
            planned.append(Planned(name, seeded, folder(output, name, seed)))
    return planned


def resolved(config: ConfigDict) -> dict[str, ConfigDict]:
    """The runs of a comparison before its budget, {name: config}, all of one text."""
    check(config)
    runs = {name: resolve(config, name) for name in names(config)}
    check_same_text(runs)
    return runs


def folder(output: Path, name: str, seed: int) -> Path:
    """The workdir of a run: its name and seed, as a name for a folder."""
    return output / RUNS_FOLDER / f"{safe_name(name)}-seed{seed}"


def check(config: ConfigDict) -> None:
    if "compare" not in config or "runs" not in config:
        raise UserError("--config: not a comparison, but the recipe of one run; see configs/compare/, or name "
                        "finished runs with --workdirs")
    compare = config.compare
    if odd := [name for name in config.runs if "," in name or name != name.strip()]:
        raise UserError(f"config.runs: {odd[0]!r}: names have no commas, and no blanks at their ends")
    if not names(config):
        raise UserError("config.compare.names: the comparison has no runs")
    if unknown := [name for name in names(config) if name not in config.runs]:
        raise UserError(f"config.compare.names: there is no run {unknown[0]!r}; there are {', '.join(config.runs)}")
    if compare.budget not in BUDGETS:
        raise UserError(f"config.compare.budget={compare.budget!r}: must be one of {', '.join(BUDGETS)}")
    if compare.reference not in config.runs:
        raise UserError(f"config.compare.reference={compare.reference!r}: must be one of the runs: "
                        + ", ".join(config.runs))
    if compare.seeds < 1:
        raise UserError(f"config.compare.seeds={compare.seeds}: must be at least 1")
    if compare.budget == "seconds" and not 0 < compare.seconds < math.inf:
        raise UserError(f"config.compare.seconds={compare.seconds:g}: must be above 0 with budget 'seconds'")
    if compare.budget != "seconds" and compare.seconds:
        raise UserError(f"config.compare.seconds={compare.seconds:g}: only budget 'seconds' reads it")
    if not compare.contexts or not all(isinstance(times, int) and times >= 1 for times in compare.contexts):
        raise UserError(f"config.compare.contexts={compare.contexts}: must be whole numbers, 1 and above")
    folders: dict[Path, str] = {}
    for name in config.runs:
        if "steps" in config.runs[name].get("train", {}):
            raise UserError(f"config.runs.{name}.train.steps: follows from the budget; set config.train.steps, which "
                            "the reference has")
        other = folders.setdefault(folder(Path(), name, 0), name)
        if other != name:
            raise UserError(f"config.runs: {other!r} and {name!r} would have the same workdir; rename one of them")


def names(config: ConfigDict) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in config.compare.names.split(",") if name.strip()))


def resolve(config: ConfigDict, name: str) -> ConfigDict:
    """The config of a run before its budget: what all share, with what the run has different."""
    run = ConfigDict({group: copy.deepcopy(config[group]) for group in workdir.GROUPS})
    architecture = config.runs[name].get("model", {}).get("architecture", run.model.architecture)
    own_fields = models.field_names(architecture)
    if architecture != run.model.architecture:  # what only the common architecture has is not this run's
        run.model = ConfigDict({field: value for field, value in run.model.items() if field in own_fields})
    for group, fields in config.runs[name].items():
        if group not in run or not isinstance(fields, ConfigDict):
            raise UserError(f"config.runs.{name}.{group}: must be one of the groups {', '.join(workdir.GROUPS)}, with "
                            "the fields that the run has different")
        for field, value in fields.items():
            where = f"config.runs.{name}.{group}.{field}"
            if group == "model" and field in own_fields and field not in run.model:
                run.model[field] = value
                continue
            if field not in run[group]:
                near = difflib.get_close_matches(field, run[group], n=1)
                raise UserError(f"{where}: there is no such field" + (f"; did you mean {near[0]!r}?" if near else ""))
            before = run[group][field]
            try:
                if value is None and before is not None:
                    raise TypeError
                run[group][field] = value
            except TypeError:
                raise UserError(f"{where}={value!r}: not of the type that it has to be (it was {before!r})") from None
    run = run.copy_and_resolve_references()
    try:
        build_program(run)
    except UserError as error:
        raise UserError(f"run {name!r}: {error}") from None
    return run


def check_same_text(runs: dict[str, ConfigDict]) -> None:
    """Raises UserError if two runs would be measured on different texts."""
    first, *others = runs
    for other in others:
        for field in (*data.STORE_FIELDS, "store", "mixture"):
            if runs[first].data[field] != runs[other].data[field]:
                raise UserError(f"config.runs: {first!r} has data.{field}={runs[first].data[field]!r} and {other!r} "
                                f"{runs[other].data[field]!r}: losses on different texts cannot be compared. To "
                                "measure runs on other texts than their own: config.compare.texts")


def num_parameters(config: ConfigDict) -> int:
    return _num_parameters(models.build(**{**config.model, "scan_layers": True}))  # which is counted faster


_num_parameters = functools.cache(models.num_parameters)


def with_equal_parameters(runs: dict[str, ConfigDict], wanted: int) -> dict[str, ConfigDict]:
    """The runs at widths with which all have as many parameters, to 2% of each other: as many as `wanted`, or if
    one cannot have that, the nearest number that it can have.

    Raises UserError if there is no such number within a tenth of it.
    """
    target = wanted
    for _ in range(len(runs) + 1):
        found = {name: with_parameters(run, target) for name, run in runs.items()}
        counts = {name: num_parameters(run) for name, run in found.items()}
        if max(counts.values()) / min(counts.values()) - 1 <= MOST_OFF_PARAMETERS:
            return found
        worst = max(counts, key=lambda name: abs(counts[name] / target - 1))
        missed, target = target, counts[worst]
        if abs(target / wanted - 1) > MOST_MOVED:
            break
    model = found[worst].model
    raise UserError(f"config.compare.budget='parameters': {worst} and the others cannot have equally many within "
                    f"{MOST_OFF_PARAMETERS:.0%}. Nearest to {missed:,} it has {target:,} "
                    f"({target / missed - 1:+.1%}), with model.d_model={model.d_model}, model.num_heads="
                    f"{model.num_heads}. Change config.model.d_model of the reference, or config.runs.{worst}.model")


def with_parameters(config: ConfigDict, target: int) -> ConfigDict:
    """`config` at the width with the number of parameters nearest to `target`.

    The number of heads stays if a width within 2% can have it. If not, others are tried whose heads are less
    than twice as wide or half as wide as the recipe's.
    """
    heads, head_width = config.model.num_heads, config.model.d_model / config.model.num_heads
    # Parameters grow with the width's square, and no slower than with the width.
    widest = math.ceil(config.model.d_model * max(2, 2 * target / num_parameters(config)))
    found, fields = [], config.model.to_dict()
    counts: dict[int, int] = {}  # by width: into how many heads it is cut changes no parameters

    def count(width: int) -> int:
        if width not in counts:
            counts[width] = num_parameters(changed(config, width, num_heads))
        return counts[width]

    for num_heads in [heads, *sorted(set(range(1, 2 * heads + 1)) - {heads}, key=lambda n: abs(n - heads))]:
        widths = [width for width in range(num_heads, widest, num_heads)
                  if (num_heads == heads or 1 / 2 < width / num_heads / head_width < 2)
                  and is_model({**fields, "d_model": width, "num_heads": num_heads})]
        if widths:
            width = nearest_width(widths, config.model.d_model, target, count)
            found.append((width, num_heads))
            if abs(count(width) / target - 1) <= MOST_OFF_PARAMETERS:
                break
    return changed(config, *min(found, key=lambda one: abs(counts[one[0]] - target)))


def nearest_width(widths: list[int], start: int, target: int, count: Callable[[int], int]) -> int:
    """The one among these widths whose parameters, `count(width)`, are nearest to `target`."""
    low, high, guess = 0, len(widths) - 1, bisect.bisect_left(widths, start)
    while low < high:  # the first width with at least as many
        i = min(max(guess, low), high - 1)
        low, high = (low, i) if count(widths[i]) >= target else (i + 1, high)
        # To count takes long, and parameters grow almost with the width's square: so few counts are needed.
        guess = bisect.bisect_left(widths, widths[i] * math.sqrt(target / count(widths[i])))
    return min(widths[max(0, low - 1):low + 1], key=lambda width: abs(count(width) - target))


def changed(config: ConfigDict, d_model: int, num_heads: int) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.model.update(d_model=d_model, num_heads=num_heads)
    return config


def is_model(fields: dict) -> bool:
    try:
        models.build(**fields)
    except UserError:
        return False
    return True


def set_steps(name: str, run: ConfigDict, compare, reference: ConfigDict, speed: float | None) -> None:
    """Gives the run as many steps as the budget allows, its schedule stretched along. `speed`: its steps a
    second, if the budget is seconds."""
    before = run.train.steps
    if compare.budget == "seconds":
        a_step, target, unit = 1 / speed, compare.seconds, "seconds"
    else:
        a_step, target = cost(run, compare.budget), cost(reference, compare.budget) * reference.train.steps
        unit = "FLOPs" if compare.budget == "flops" else "tokens"
    run.train.steps = steps = max(1, round(target / a_step))
    off = steps * a_step / target - 1
    if abs(off) > MOST_OFF:
        raise UserError(
            f"config.compare.budget={compare.budget!r}: a step of {name} takes {a_step:,.4g} of the {target:,.4g} "
            f"{unit}; the nearest, {steps} steps, are {off:+.1%} off, more than {MOST_OFF:.0%}. "
            + ("Use more config.compare.seconds" if compare.budget == "seconds" else
               "Use more config.train.steps or a smaller config.train.batch_size"))
    for field in ("warmup_steps", "decay_steps"):
        run.optimizer[field] = round(run.optimizer[field] * steps / before)


def cost(config: ConfigDict, budget: str) -> float:
    """FLOPs of a step, those of padding too; or its tokens, padding left out."""
    inputs = config.train.batch_size * config.model.context_length
    if budget == "flops":
        return inputs * train_flops_per_token(models.build(**config.model))
    if config.data.packing == "concat":  # has no padding, so the text need not be there
        return inputs
    corpus = data.find_or_make(config.data)
    return inputs * (1 - pack(corpus, "train", config.data, config.model.context_length).padding)


def measured_speeds(runs: dict[str, ConfigDict], output: Path) -> dict[str, float]:
    """The steps a second of each run, as it was measured when the comparison first asked: kept in speeds.json.

    Raises UserError if a run was begun there without that.
    """
    path = output / SPEEDS_FILE
    output.mkdir(parents=True, exist_ok=True)
    with locked(output / workdir.LOCK_FILE, wait=True):  # of several processes, one measures
        speeds = json.loads(path.read_text()) if path.exists() else {}
        for name, run in runs.items():
            if digest(run) not in speeds:
                if folder(output, name, run.train.seed).exists():
                    raise UserError(f"--output={output}: {name} was begun there with another budget or config; use the "
                                    "same to continue it, or another --output")
                speeds[digest(run)] = steps_per_second(run)
                write_atomically(path, json.dumps(speeds, indent=2) + "\n")
    return {name: speeds[digest(run)] for name, run in runs.items()}


def digest(run: ConfigDict) -> str:
    return hashlib.sha256(run.to_json(sort_keys=True).encode()).hexdigest()[:16]


def steps_per_second(config: ConfigDict) -> float:
    """How fast such a run trains on this machine, measured for some seconds."""
    program = build_program(config)
    state, step = program.initial_state(), program.compile_train_step()
    batch = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding),
                         program.abstract_batch())
    steps, started = -2, 0.0  # two that do not count
    while steps <= 0 or time.monotonic() - started < SPEED_SECONDS:
        if steps == 0:
            started = time.monotonic()
        state, _ = jax.block_until_ready(step(state, batch))
        steps += 1
    return steps / (time.monotonic() - started)
