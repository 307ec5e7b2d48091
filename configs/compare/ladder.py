"""Comparison of blocks for gpt, from the paper's to a modern one, at equal FLOPs. Each run has its
best learning rate.

    python -m smallgpt_jax.compare --config=configs/compare/ladder.py --output=runs/ladder

Each run adds one option to the run before it, with these exceptions:

- "relu2" and "gated" both start from "rms".
- "experts-adamw" adds experts to "windows", without Muon.
- "pgpt" and "lgpt" are the paper's models with the options of "windows".
- "hybrid" has Gated DeltaNet in three of four blocks of "gqa". "delta", "mamba" and "conv" have
  their mixer in all blocks of "gated", without rope.

The comparison trains at least 80 runs. The run "gpt" trains for config.train.steps steps; all
others have equal FLOPs.
"""

from configs.compare import base

# Name of the run → fields that it changes, compared with the run before it.
STEPS = {
    "gpt": {},
    "rope": {"model": {"position": "rope"}},
    "rms": {"model": {"norm": "rms"}},
    "gated": {"model": {"mlp": "gated", "activation": "silu", "mlp_ratio": 8 / 3}},
    "qk-norm": {"model": {"qk_norm": True}},
    "gqa": {"model": {"num_kv_heads": 2}},
    "windows": {"model": {"attention_windows": (32, 32, 32, 0)}},
    "muon": {"optimizer": {"name": "muon"}},
    "experts": {
        "model": {"mlp": "moe", "expert_mlp": "gated", "mlp_ratio": 2 / 3, "expert_scale": 2.5}
    },
}


def get_config(size: str = "quickstart"):
    gpt, common = base.recipe("gpt", size), base.recipe("gpt", size)
    common.train.steps = common.optimizer.decay_steps = max(common.train.steps, 200)
    # With fewer steps, rounding to whole steps could change a run's FLOPs by more than 1%, the
    # budget's tolerance.
    runs, fields = {}, {}
    for name, change in STEPS.items():
        fields = merged(fields, change)
        runs[name] = fields
        if name == "rms":
            runs["relu2"] = merged(fields, {"model": {"activation": "relu2"}})
    runs["experts-adamw"] = merged(runs["windows"], STEPS["experts"])
    for name in ("pgpt", "lgpt"):
        runs[name] = merged(base.differences(base.recipe(name, size), gpt), runs["windows"])
    hybrid, mamba = (
        base.differences(base.recipe(name, size), base.recipe("llama", size))
        for name in ("hybrid", "mamba")
    )
    runs["hybrid"] = merged(runs["gqa"], hybrid)
    runs["delta"] = merged(
        runs["gated"], merged(hybrid, {"model": {"mixers": ("delta",), "position": "none"}})
    )
    runs["mamba"] = merged(runs["gated"], mamba)
    runs["conv"] = merged(runs["gated"], {"model": {"mixers": ("conv",), "position": "none"}})
    return base.comparison(
        common, runs, budget="flops", seeds=3, learning_rates=(0.5, 1.0, 2.0), decoding=False
    )


def merged(fields: dict, change: dict) -> dict:
    return {
        group: {**fields.get(group, {}), **change.get(group, {})} for group in {**fields, **change}
    }
