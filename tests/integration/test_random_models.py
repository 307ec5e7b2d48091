"""Random model configs: logits by formulas in float64, packed rows, decoding, four devices, export
to PyTorch.

benchmarks/check_models.py checks as many as wanted.
"""

import itertools

import pytest
import random_models

# Chosen from the seeds below 2,500 for the pairs of values that have an effect (5,431; 4,871 of them
# exported) per second of processor time.
SEEDS = (23, 89, 108, 170, 307, 605, 1077, 1231, 1399, 1510, 1881, 2140, 2146, 2188)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model(seed, tmp_path):
    print(random_models.describe(seed))
    random_models.check(seed, tmp_path / "exported")


# Without these, a field has no effect.
EXPERT_FIELDS = (
    "num_experts",
    "experts_per_token",
    "num_shared_experts",
    "expert_mlp",
    "expert_scale",
    "grouped_matmul",
)
ATTENTION_FIELDS = (
    "num_kv_heads",
    "qk_norm",
    "attention_windows",
    "position",
    "rope_base",
    "attention_gate",
    "value_embeddings",
)
MIXER_OF = {
    **dict.fromkeys(ATTENTION_FIELDS, "attention"),
    "delta_head_dim": "delta",
    "delta_value_ratio": "delta",
    "mamba_state": "mamba",
    "mamba_expand": "mamba",
    "conv_taps": "conv",
}


def paths(fields) -> int:
    return fields["num_paths"] if fields["architecture"] == "pgpt" else 1


def mixers_of_blocks(fields) -> set[str]:
    pattern = itertools.cycle(fields["mixers"])
    return set(itertools.islice(pattern, fields["num_layers"] // paths(fields)))


def has_effect(name: str, fields) -> bool:
    if name in EXPERT_FIELDS and fields["mlp"] != "moe":
        return False
    if name == "rope_base" and fields["position"] != "rope":
        return False
    return name not in MIXER_OF or MIXER_OF[name] in mixers_of_blocks(fields)


def test_every_value_of_every_field_has_an_effect():
    """Except patterns without attention, which refuse most values of its fields (test_decoding.py
    has one). Every architecture has every mixer, and all meshes occur.
    """
    drawn = {seed: random_models.random_fields(seed) for seed in SEEDS}
    groups = [
        random_models.FIELDS,
        random_models.MIXER_FIELDS,
        random_models.OPTION_FIELDS,
        *random_models.OWN_FIELDS.values(),
    ]
    missing = {
        (name, value)
        for group in groups
        for name, values in group.items()
        for value in values
        if not (name == "mixers" and "attention" not in value)
        and not any(
            fields.get(name) == value and has_effect(name, fields) for fields in drawn.values()
        )
    }
    assert not missing
    mixers = {
        (fields["architecture"], mixer)
        for fields in drawn.values()
        for mixer in mixers_of_blocks(fields)
    }
    assert mixers == set(
        itertools.product(random_models.OWN_FIELDS, ("attention", "delta", "mamba", "conv"))
    )
    meshes = [random_models.mesh_lengths(seed, paths(fields)) for seed, fields in drawn.items()]
    expected = (*random_models.MESHES, *random_models.MESHES_WITH_PATHS)
    assert all(lengths in meshes for lengths in expected)
