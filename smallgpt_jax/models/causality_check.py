"""Checks that custom modules of a model see no later tokens, and no other documents."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.custom_code import name_custom_classes
from smallgpt_jax.models.initializers import INIT_STD
from smallgpt_jax.models.language_model import LanguageModel

TIME, ROWS = 256, 4
# Relative to the largest value. Layers may ignore dtype="float32", and compute in fewer bits.
TOLERANCE, NARROW_TOLERANCE = 1e-4, 0.03


def check_causality(
    model: LanguageModel, params, model_state, separate_documents: bool = False
) -> None:
    """Raises UserError if an output sees tokens that it must not (collective, under the mesh)."""
    c = model.config
    time = min(c.context_length, TIME)
    if time < 2:
        return
    model = in_float32(model)
    shards = sharding.num_batch_shards()
    rows = shards * -(-ROWS // shards)  # at least 4, and as many on each device
    tokens_BxT, others_BxT = np.random.default_rng(0).integers(0, c.vocab_size, (2, rows, time))
    # The rows' borders are at 1, T − 1 and evenly between.
    borders_Bx1 = np.linspace(1, time - 1, rows).round().astype(int)[:, None]
    is_later_BxT = np.arange(time)[None] >= borders_Bx1
    later = np.where(is_later_BxT, others_BxT, tokens_BxT)
    earlier = np.where(is_later_BxT, tokens_BxT, others_BxT)

    @jax.jit
    def dependence(params, model_state, changed_BxT, is_kept_BxT, segment_ids_BxT):
        """Returns the largest change of an output that must not change, relatively."""
        variables = {"params": _perturbed(params), "state": model_state}
        context = Context(segment_ids_BxT=segment_ids_BxT)
        x_BxTxW = model.apply(variables, tokens_BxT, context, method="hidden")
        changed_BxTxW = model.apply(variables, changed_BxT, context, method="hidden")
        changes_BxTxW = jnp.where(is_kept_BxT[:, :, None], jnp.abs(changed_BxTxW - x_BxTxW), 0)
        return jnp.max(changes_BxTxW) / jnp.max(jnp.abs(x_BxTxW))

    def refuse_dependence(on: str, remedy: str, *inputs):
        with jax.default_matmul_precision("highest"):
            change = float(dependence(params, model_state, *inputs))
            is_dependent = change > tolerance(dependence, params, model_state, *inputs)
        if is_dependent:
            raise UserError(
                f"{name_custom_classes(c)}: outputs depend on {on} (they change by {change:.2g} of "
                f"the largest output); {remedy}"
            )

    if c.attention_mask != "bidirectional":
        refuse_dependence(
            "later tokens, which the model learns to predict",
            "let each position see only itself and earlier positions",
            later,
            ~is_later_BxT,
            None,
        )
    if separate_documents:
        for changed_BxT, is_kept_BxT in ((earlier, is_later_BxT), (later, ~is_later_BxT)):
            refuse_dependence(
                "other documents of their row (config.data.separate_documents=True)",
                "use context.segment_ids_BxT, as in docs/your-own.md#mixers",
                changed_BxT,
                is_kept_BxT,
                1 + is_later_BxT.astype(np.int32),
            )


def in_float32(model: LanguageModel) -> LanguageModel:
    """Returns a model without kernels, whose differences are not those of rounding."""
    return LanguageModel(model.config.replace(dtype="float32", attention="xla", remat="none"))


def tolerance(function, *arguments) -> float:
    is_narrow = re.search(r"\b(bf16|f16|f8\w*)\[", str(jax.make_jaxpr(function)(*arguments)))
    return NARROW_TOLERANCE if is_narrow else TOLERANCE


def _perturbed(params):
    """Adds noise, because initial weights may be 0, as those of a layer's last projection."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = []
    for key, x in zip(keys, leaves):
        noise = jax.random.normal(key, x.shape)
        noisy.append(x + INIT_STD * noise)
    return jax.tree.unflatten(structure, noisy)
