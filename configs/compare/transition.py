"""Past the transition to copying: which model is the best from 1e13 to 1e14 FLOPs?

    python -m smallgpt_jax.compare --config=configs/compare/transition.py --output=runs/transition

The runs of configs/compare/mixers.py end after 2.1 M tokens, before any model has learned to copy,
which favours models that cannot. Here, seven models of 0.65M parameters read 26 M tokens. The
presets, after a colon, are `tiny` (seconds per run, for tests), `first` (llama, moe, hybrid and
conv, 5 seeds, about 2.5e15 FLOPs), `all` (delta, canon and windows as well, 4.3e15 FLOPs) and
`paper` (gpt, pgpt, lgpt and cgpt, about 2.7e15 FLOPs).

Predictions, before the runs: hybrid is the best at 1.2e14 FLOPs, and conv, which is the best up to
2e12, is the worst of the six that were planned then. After the runs of tokens.py at 0.33M, where
canon copied first with each seed, and before those of this file: canon is the best at 6e13, and at
1.2e14 moe, hybrid and canon are within 0.05 of each other, since all three copy by then. windows
came level with canon at 0.33M: before its runs here, it is within 0.05 of canon at equal FLOPs from
3e13 on.

docs/results/transition.json has five seeds, of delta one, trained on a GPU; transition-cpu.json has
one seed of each but delta, and two of canon, trained on CPUs. hybrid and moe have the lowest losses
after 26 M tokens, canon with fewer.

Predictions for `paper`, which has no record yet, from the runs with up to 0.47M parameters: after
26 M tokens, gpt is within 0.05 of llama, and has copied with each seed; pgpt has copied with three
seeds of five at most, and is 0.1 to 0.3 behind gpt; lgpt and cgpt have not, and are 0.4 behind or
more.
"""

from configs.compare import base, rates, scaling

FIRST = ("llama", "moe", "hybrid", "conv")
# Preset → models, size, tokens, seeds.
PRESETS = {
    "tiny": (("llama", "conv"), "20k", 16_384, 2),
    "first": (FIRST, "0.65M", 26_000_000, 5),
    "all": ((*FIRST, "delta", "canon", "windows"), "0.65M", 26_000_000, 5),
    "paper": (("gpt", "pgpt", "lgpt", "cgpt"), "0.65M", 26_000_000, 5),
}


def get_config(preset: str = "all"):
    models, size, tokens, seeds = base.preset(preset, PRESETS)
    common = rates.common_config(preset)
    common.train.eval_repeats = True
    steps = scaling.num_steps(size, tokens / scaling.num_parameters(size), common)
    return rates.one_size(models, size, steps, common, horizons=(0.25, 0.5, 1.0), seeds=seeds)
