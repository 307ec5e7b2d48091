"""Cost of inference on one device, from the shapes of weights and cache: bytes, FLOPs, and bounds
of the speed.

A decoding step of B texts reads the weights once and the cache of each text, and takes B times the
FLOPs of one text:

    bytes(B) = W(B) + B·c        W: weights without the embeddings' unused rows; c: cache of one text
    seconds ≥ max(bytes(B) / bandwidth, B·f / peak speed)

The compiled program reads each of these bytes once. XLA's "bytes accessed" are several times as
many: they count copies to on-chip memory at both ends, and an update of the cache in place as the
whole cache (docs/inference.md).

Decoding becomes compute-bound where B·f / bytes(B) reaches peak speed / bandwidth. Of E routed
experts, K of which each token uses, B tokens read the fraction 1 − (1 − K/E)^B, as if they chose
independently and uniformly.
"""

import bisect
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from smallgpt_jax import models
from smallgpt_jax.devices import chips, sharding
from smallgpt_jax.inference import decoder, layout, require_next_tokens
from smallgpt_jax.inference.sampling import Sampler, Sampling
from smallgpt_jax.models import flops
from smallgpt_jax.models.context import Context
from smallgpt_jax.planning.compilation import Compiler
from smallgpt_jax.planning.gpus import find_gpu

USABLE = 0.9  # fraction of the device's memory for weights and cache
LARGEST_BATCH = 2**24  # larger compute-bound batches are None


@dataclasses.dataclass(frozen=True)
class InferenceEstimate:
    """Of one device. Fields that need its memory, speed or bandwidth are None if that is unknown,
    as on CPUs.
    """

    device_kind: str
    dtype: str
    parameters: int
    active_parameters: int
    batch: int
    context_length: int
    weight_bytes: int
    cache_bytes_per_token: int  # of one more token, until the first attention window is full
    cache_bytes_per_text: int  # of a text that fills the context, states included
    prefill_flops: (
        float | None
    )  # of a text that fills the context, up to its next token; None if they are unknown
    decode_flops_empty: float | None  # of one token, with an empty cache
    decode_flops_full: float | None  # of one token, at the end of the context
    intensity: float | None  # FLOPs per byte of a decoding step of `batch` texts with full caches
    intensity_one_text: float | None
    ridge: float | None  # FLOPs per byte at which the device is compute-bound
    compute_bound_batch_empty: int | None  # smallest; None: no batch, or unknown
    compute_bound_batch_full: int | None
    seconds_one_text: float | None  # least seconds of a decoding step with full caches
    seconds: float | None  # the same of `batch` texts
    largest_batch: int | None  # of texts that fill the context, in 90% of the memory
    largest_tokens: int | None  # their tokens
    formula_bytes: int  # weights and caches of `batch` texts
    compiled_bytes: int  # of the compiled decoding step: arguments, temporaries, results


def estimate_inference(
    model: models.LanguageModel, device: jax.Device, batch: int
) -> InferenceEstimate:
    require_next_tokens(model)
    c, chip = model.config, chips.find_chip(device.device_kind)
    bandwidth = find_bandwidth(device.device_kind)
    weights = layout.packed_shapes(model)
    per_text = decoder.num_cache_bytes(model, c.context_length)
    empty, full, prefill = (
        count(model, weights, *shape)
        for shape in ((1, 1), (1, c.context_length), (c.context_length, c.context_length))
    )
    step = functools.partial(DecodingStep, model, layout.num_bytes(weights))
    from_empty, from_full = step(decoder.num_cache_bytes(model, 1), empty), step(per_text, full)
    ridge = chip.flops / bandwidth if chip and bandwidth else None
    room = USABLE * chip.hbm - layout.num_bytes(weights) if chip else None
    largest = None if room is None else max(0, int(room // per_text)) if per_text else None
    return InferenceEstimate(
        device.device_kind,
        c.dtype,
        models.num_parameters(model),
        models.num_active_parameters(model),
        batch,
        c.context_length,
        layout.num_bytes(weights),
        decoder.num_cache_bytes(model, 2) - decoder.num_cache_bytes(model, 1),
        per_text,
        prefill,
        empty,
        full,
        from_full.intensity(batch),
        from_full.intensity(1),
        ridge,
        from_empty.compute_bound_batch(ridge),
        from_full.compute_bound_batch(ridge),
        from_full.seconds(1, bandwidth, chip),
        from_full.seconds(batch, bandwidth, chip),
        largest,
        None if largest is None else largest * c.context_length,
        layout.num_bytes(weights) + batch * per_text,
        compiled_bytes(model, device, batch),
    )


def find_bandwidth(device_kind: str) -> float | None:
    """Returns the bytes per second of the device's memory."""
    found = find_gpu(device_kind) or chips.find_chip(device_kind)
    return found and found.bandwidth


@dataclasses.dataclass(frozen=True)
class DecodingStep:
    """One token for each of B texts; see this module's docstring."""

    model: models.LanguageModel
    weight_bytes: int
    cache_bytes: int  # of one text
    flops: float | None  # of one text

    def bytes(self, batch: int) -> float:
        return self.weight_bytes - self.unread_bytes(batch) + batch * self.cache_bytes

    def unread_bytes(self, batch: int) -> float:
        c, size = self.model.config, jnp.dtype(self.model.config.dtype).itemsize
        tables = (0 if c.tie_embeddings else c.vocab_size) + (
            c.context_length if c.position == "learned" else 0
        )
        routed = models.num_parameters(self.model) - models.num_active_parameters(self.model)
        unused = 1 - c.experts_per_token / c.num_experts
        experts = routed * unused ** (batch - 1)
        values = sum(
            math.prod(p.shape)
            for p in jax.tree.leaves(models.abstract_params(self.model))
            if p.name == "value_embedding"
        )
        return size * (
            max(0, tables - batch) * c.d_model + max(0, 1 - batch / c.vocab_size) * values + experts
        )

    def intensity(self, batch: int) -> float | None:
        return None if self.flops is None else batch * self.flops / self.bytes(batch)

    def compute_bound_batch(self, ridge: float | None) -> int | None:
        """Returns the smallest batch whose intensity reaches `ridge`."""
        if ridge is None or self.flops is None or self.intensity(LARGEST_BATCH) < ridge:
            return None  # the intensity grows with the batch
        return bisect.bisect_left(range(LARGEST_BATCH), ridge, lo=1, key=self.intensity)

    def seconds(self, batch: int, bandwidth: float | None, chip: chips.Chip | None) -> float | None:
        if bandwidth is None or chip is None or self.flops is None:
            return None
        return max(self.bytes(batch) / bandwidth, batch * self.flops / chip.flops)


def count(model: models.LanguageModel, weights, tokens: int, length: int) -> float | None:
    """Returns the FLOPs of the products of one call of the decoder with `tokens` new tokens and a
    cache of `length`.

    A prefill begins with an empty cache. Positions after the newest token count, as
    `cached_attention` computes them.
    """
    model = model.clone(config=dataclasses.replace(model.config, grouped_matmul="ragged"))
    ones = jnp.ones(1, jnp.int32)
    context = Context(cache_length=length, start_B=0 * ones, length_B=tokens * ones)
    cache = {} if tokens > 1 else decoder.cache_shapes(model, weights, 1, length)

    step = functools.partial(decoder.next_logits, model, context=context)
    try:
        return flops.count_operations(
            step, weights, cache, jax.ShapeDtypeStruct((1, tokens), "int32")
        ).products
    except flops.UnknownFlops:
        return None


def compiled_bytes(model: models.LanguageModel, device: jax.Device, batch: int) -> int:
    """Returns the memory of a greedy decoding step of `batch` texts whose caches have room for the
    whole context.
    """
    mesh, length = sharding.make_mesh(sharding.MeshConfig(), [device]), model.config.context_length
    weights = layout.packed_shapes(model)
    cache = decoder.cache_shapes(
        model, weights, batch, length
    )  # makes arrays, so it must precede use_mesh

    def on_device(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh)),
            tree,
        )

    def numbers(dtype, *shape):
        return on_device(jax.ShapeDtypeStruct(shape, dtype))

    with sharding.use_mesh(mesh):
        lowered = decoder.decode_step.lower(
            decoder.Decoder(model, model.config.vocab_size, cache_length=length),
            on_device(weights),
            decoder.DecodeState(on_device(cache), None),
            decoder.NewTokens(
                numbers("int32", batch, 1), numbers("int32", batch), numbers("int32", batch)
            ),
            Sampler(numbers("uint32"), numbers("uint32", batch, 2), Sampling(temperature=None)),
        )
    return Compiler([device]).compile(lowered).total_bytes


def format_inference(found: InferenceEstimate, architecture: str) -> str:
    def number(value, form=",.0f", unit="", missing="unknown"):
        return missing if value is None else f"{value:{form}}{unit}"

    never = "none" if found.ridge else "unknown"
    milliseconds = [
        None if seconds is None else 1000 * seconds
        for seconds in (found.seconds_one_text, found.seconds)
    ]
    rows = [
        ("weights", f"{found.weight_bytes:,} bytes in {found.dtype}"),
        ("cache per token", f"{found.cache_bytes_per_token:,} bytes"),
        ("cache per text, full context", f"{found.cache_bytes_per_text:,} bytes"),
        ("prefill of a full context", number(found.prefill_flops, ".3e", " FLOPs")),
        (
            "decoding, FLOPs per token",
            f"{number(found.decode_flops_empty)} with an empty cache, "
            f"{number(found.decode_flops_full)} with a full one",
        ),
        (
            "FLOPs per byte, full cache",
            f"{number(found.intensity_one_text, '.2f')} for one text, "
            f"{number(found.intensity, '.2f')} for {found.batch}; compute-bound from "
            f"{number(found.ridge, '.0f')}",
        ),
        (
            "compute-bound batch",
            f"{number(found.compute_bound_batch_empty, ',', missing=never)} with empty caches, "
            f"{number(found.compute_bound_batch_full, ',', missing=never)} with full ones",
        ),
        (
            "least time per step, full cache",
            f"{number(milliseconds[0], '.3f', ' ms')} for one text, "
            f"{number(milliseconds[1], '.3f', ' ms')} for {found.batch}",
        ),
        (
            f"largest batch in {USABLE:.0%} of memory",
            f"{number(found.largest_batch, ',')} texts, {number(found.largest_tokens, ',')} tokens",
        ),
        (
            f"memory of a step of {found.batch}",
            f"compiled {found.compiled_bytes:,} bytes, formula {found.formula_bytes:,} "
            f"({found.formula_bytes / found.compiled_bytes:.1%})",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [
            f"inference of {architecture} on one {found.device_kind}, context "
            f"{found.context_length:,}",
            *(f"  {name:{width}}  {text}" for name, text in rows),
        ]
    )
