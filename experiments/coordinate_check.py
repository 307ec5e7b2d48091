"""Measures how the activations of each kind of layer depend on the width, with and without muP.

    python experiments/coordinate_check.py --config=configs/gpt.py:tiny --config.model.head_dim=16 \
        --config.train.batch_size=1 --output=coordinates.png

At each width, a model is trained for a few steps at a constant rate, on one batch of random tokens.
Then the mean absolute value of the outputs of each layer is measured, and averaged over equal
layers. With muP, it should not depend on the width (Yang et al., arXiv 2203.03466, section D.1).
--depths compares numbers of blocks instead, with and without CompleteP; the outputs of residual
branches then fall as 1/depth, and "trunk" should not change.

Use small batches: in a layer with fewer inputs than the batch has tokens, updates for different
tokens hide each other. Of the logits, the change since the initialization is measured, because the
initial logits shrink with the width. The random part of the head still makes the change larger in
narrow models. If heads become wider with the model, attention/qkv shrinks, because queries contain
the factor of the scores. With config.model.head_dim, wider models have more heads instead.

Prints the largest mean divided by the smallest, for each kind of layer, and writes a plot.
"""

import json
from pathlib import Path

from absl import flags
from coordinates import at_size, coordinates, spread
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.measuring import table
from smallgpt_jax import cli
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.plotting import COLORS, png, style_axes
from smallgpt_jax.storage.atomic import write_atomically

_CONFIG = cli.define_config()
_OUTPUT = flags.DEFINE_string("output", "coordinates.png", "The plot to write.")
_WIDTHS = flags.DEFINE_list(
    "widths", ["64", "128", "256", "512"], "Values of config.model.d_model."
)
_DEPTHS = flags.DEFINE_list(
    "depths", [], "Values of config.model.num_layers, to compare instead of widths."
)
_SEEDS = flags.DEFINE_integer(
    "seeds", 3, "Seeds, over which the means are averaged.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 5, "Training steps.", lower_bound=0)


def plot(values: list[int], field: str, measured: dict[str, list[dict[str, float]]]) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (title, means) in zip(figure.subplots(1, 2, sharey=True), measured.items()):
        for number, name in enumerate(means[0]):
            axes.plot(
                values,
                [m[name] for m in means],
                label=name,
                color=COLORS[number % len(COLORS)],
                linestyle=("-", "--", ":")[number // len(COLORS) % 3],
                marker="o",
                markersize=3,
            )
        style_axes(axes, field, "mean |output|")
        axes.set(xscale="log", yscale="log", title=title)
        axes.set_xticks(values, map(str, values))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right", fontsize="small")
    return figure


def main() -> None:
    field, values = ("num_layers", _DEPTHS.value) if _DEPTHS.value else ("d_model", _WIDTHS.value)
    config, values = Config.of(_CONFIG.value), sorted(map(int, values))
    name, base = (
        ("muP", values[0])
        if field == "d_model"
        else ("CompleteP", config.model.replace(num_layers=values[0]).depth)
    )
    measured = {
        f"{with_or_without} {name}": [
            over_seeds(at_size(config, field, value, b)) for value in values
        ]
        for with_or_without, b in (("with", base), ("without", 0))
    }
    spreads = {title: spread(means) for title, means in measured.items()}
    print(
        table(
            ["output", *spreads],
            (
                [layer, *(f"{factors[layer]:.2f}" for factors in spreads.values())]
                for layer in next(iter(spreads.values()))
            ),
        )
    )
    write_atomically(Path(_OUTPUT.value), png(plot(values, field, measured)))
    print(
        json.dumps(
            {
                "config": config.to_dict(),
                "field": field,
                "values": values,
                "means": measured,
                "spreads": spreads,
            }
        )
    )


def over_seeds(config: Config) -> dict[str, float]:
    means = [
        coordinates(config.replace(train={"seed": seed}), _STEPS.value)
        for seed in range(_SEEDS.value)
    ]
    return {kind: sum(m[kind] for m in means) / len(means) for kind in means[0]}


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
