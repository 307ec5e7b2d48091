"""Random model configs, and the checks that any of them must pass: one draw of fields tests how
they work together.
"""

import dataclasses
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import init, load_config
from conversion_helpers import export, load_in_torch, torch
from float64_model import plain_logits

from smallgpt_jax import models
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.context import Context

TIME, VOCABULARY = 24, 40
# The rows of a batch: lengths of their documents. Rows 1 and 2 begin with the first and the second
# document of row 0.
ROWS = ((5, 12, 7), (5, 19), (12, 12), (24,))
TOLERANCE = dict(rtol=1e-3, atol=2e-4)
FIELDS = {  # field → values; the first is drawn as often as all others together
    "d_model": (16, 32),
    "num_heads": (4, 2),
    "num_kv_heads": (0, 1, 2),
    "head_dim": (0, 6, 10),
    "qk_norm": (False, True),
    "attention_windows": ((), (5,), (4, 0), (3, 0, 7), (9, 9, 2)),
    "norm": ("layer", "rms"),
    "norm_position": ("pre", "post", "deepnorm"),
    "norm_epsilon": (1e-5, 1e-2),
    "mlp": ("dense", "gated", "moe"),
    "mlp_ratio": (2.0, 1.0, 2.625),
    "rank_ratio": (0.0, 0.0, 0.5),
    "activation": ("gelu", "gelu_tanh", "silu", "relu2"),
    "position": ("rope", "learned", "alibi", "none"),
    "rope_base": (1e4, 100.0),
    "use_bias": (False, True),
    "tie_embeddings": (False, True),
    "scan_layers": (False, True),
    "remat": ("none", "full", "dots"),
    "num_experts": (5, 4, 8),
    "experts_per_token": (2, 1, 3),
    "num_shared_experts": (1, 0, 2),
    "expert_mlp": ("dense", "gated"),
    "expert_scale": (1.0, 2.5),
    "grouped_matmul": ("blocks", "ragged"),
}
OWN_FIELDS = {
    "gpt": {"num_layers": (2, 1, 3, 4)},
    "pgpt": {"num_layers": (4, 2), "num_paths": (2, 1, 4), "path_weights": ("learned", "equal")},
    "lgpt": {
        "num_layers": (2, 4),
        "blocks_per_stage": (1, 2, 4),
        "compress_last_stage": (True, False),
        "stage_heads": ("fixed", "scaled"),
    },
}
# drawn last, so that the other fields of a seed are those from before these existed
MIXER_FIELDS = {
    "mixers": (
        ("attention",),
        ("delta", "attention"),
        ("delta",),
        ("delta", "delta", "attention"),
        ("mamba",),
        ("mamba", "attention"),
        ("mamba", "delta"),
        ("conv", "attention"),
        ("conv", "delta"),
    ),
    "delta_head_dim": (0, 3),
    "delta_value_ratio": (2, 1),
    "mamba_state": (5, 8),
    "mamba_expand": (2, 1),
    "conv_taps": (3, 2),
}
# drawn after all others, for the same reason; a repeated default is drawn more often
OPTION_FIELDS = {
    "logit_softcap": (0.0, 2.0),
    "value_embeddings": ((), (1,), (0, 1), (1, 1, 0)),
    "input_mix": (False, True),
    "residual_scales": (False, True),
    "parallel_block": (False, True),
    "attention_gate": (False, True),
    "canon_taps": (0, 0, 3),
    "smear": (False, False, True),
    "loops": (1, 1, 2),
}
NOT_EXPORTED = {
    "canon_taps": 0,
    "smear": False,
    "loops": 1,
    "rank_ratio": 0.0,
}  # in the order of refusals
OWN_FIELDS["cgpt"] = OWN_FIELDS["lgpt"] | {"conv_kernel": (3, 1, 5)}
MESHES = (
    dict(data=4),
    dict(fsdp=4),
    dict(data=2, tensor=2),
    dict(fsdp=2, tensor=2),
    dict(data=2, fsdp=2),
)
MESHES_WITH_PATHS = (dict(path=2, data=2), dict(path=2, tensor=2))


def random_fields(seed: int) -> dict:
    """Returns the `model` group of a valid config. Four consecutive seeds have the four
    architectures.
    """
    rng = random.Random(seed)
    architecture = sorted(OWN_FIELDS)[seed % len(OWN_FIELDS)]
    while True:
        drawn = {
            name: rng.choice((values[0], rng.choice(values[1:])))
            for name, values in (
                FIELDS | OWN_FIELDS[architecture] | MIXER_FIELDS | OPTION_FIELDS
            ).items()
        }
        fields = {
            **load_config(architecture).model,
            **drawn,
            "architecture": architecture,
            "context_length": TIME,
            "vocab_size": VOCABULARY,
            "dtype": "float32",
        }
        try:
            models.build(**fields)
        except UserError:  # these values do not go together
            continue
        return fields


def check(seed: int, folder: Path) -> None:
    """Checks the model of a seed: float64 formulas, packed rows, decoding with a cache, four
    devices, PyTorch.
    """
    fields, rng = random_fields(seed), np.random.default_rng(seed)
    model = models.build(**fields)
    params = init(model, seed)
    state = jax.tree.map(
        lambda x: np.float32(
            rng.uniform(0, 0.3, x.shape) if x.name == "bias" else np.zeros(x.shape)
        ),
        models.abstract_model_state(model),
    )
    documents = [
        rng.integers(0, VOCABULARY, length)
        for length in (*ROWS[0], *ROWS[1][1:], *ROWS[2][1:], *ROWS[3])
    ]
    rows = [
        documents[:3],
        [documents[0], documents[3]],
        [documents[1], documents[4]],
        [documents[5]],
    ]
    tokens = np.stack([np.concatenate(row) for row in rows]).astype(np.int32)
    segments = np.stack(
        [np.repeat(np.arange(1, len(row) + 1), list(map(len, row))) for row in rows]
    ).astype(np.int32)
    expected = [plain_logits(model.config, params, document, state) for document in documents]
    expected_rows = np.stack(
        [
            np.concatenate(
                [
                    next(logits for other, logits in zip(documents, expected) if other is document)
                    for document in row
                ]
            )
            for row in rows
        ]
    )

    check_packed_rows(model, params, state, (tokens, segments), expected_rows, seed)
    check_decoding(model, params, state, [documents[5], documents[1]], [expected[5], expected[1]])
    for field, default in NOT_EXPORTED.items():
        if getattr(model.config, field) != default:
            with pytest.raises(UserError, match=f"config.model.{field}="):
                export(folder, model, params)
            return
    theirs = load_in_torch(
        export(folder, model, params, model_state=jax.tree.map(jnp.asarray, state))
    )
    with torch.no_grad():
        np.testing.assert_allclose(
            theirs(torch.tensor(documents[5][None])).logits[0], expected[5], **TOLERANCE
        )


def mesh_lengths(seed: int, num_paths: int) -> dict[str, int]:
    by_path = MESHES_WITH_PATHS if num_paths % 2 == 0 else ()
    return random.Random(seed).choice([*MESHES, *by_path])


def check_packed_rows(model, params, state, rows, expected, seed):
    """Each document has the same logits in a packed row on four devices as alone in NumPy."""
    lengths = mesh_lengths(seed, getattr(model.config, "num_paths", 1))
    mesh = sharding.make_mesh(sharding.MeshConfig(**{"data": 1, **lengths}), jax.devices()[:4])

    @jax.jit
    def forward(params, tokens, segments):
        return model.apply(
            {"params": params, "state": state}, tokens, Context(segment_ids_BxT=segments)
        )

    with sharding.use_mesh(mesh):
        shardings = sharding.stored_shardings(mesh, models.abstract_params(model))
        found = forward(
            jax.device_put(jax.device_get(params), shardings),
            *jax.device_put(rows, sharding.batch_sharding(mesh)),
        )
    np.testing.assert_allclose(found, expected, **TOLERANCE, err_msg=f"on a mesh {lengths}")


def check_decoding(model, params, state, texts, expected):
    """Decoding with a cache gives the logits of the whole texts; prompts of 14 and 9 tokens, then
    single tokens.
    """
    weights = layout.pack(model, jax.device_get(params), state)
    prompts = [text[:1].tolist() for text in texts]
    session = decoder.DecodeSession(
        decoder.Decoder(model, model.config.vocab_size), weights, prompts
    )
    for lengths in ((14, 9), (15, 10), (16, 11)):
        session.ids = [text[:length].tolist() for text, length in zip(texts, lengths)]
        _, logits = session.sample_with_logits(Sampling(temperature=None))
        for found, whole, length in zip(logits, expected, lengths):
            np.testing.assert_allclose(found, whole[length - 1], **TOLERANCE)


def describe(seed: int) -> str:
    """Returns the fields of a seed's config that differ from their defaults."""
    config = models.build(**random_fields(seed)).config
    return ", ".join(
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    )
