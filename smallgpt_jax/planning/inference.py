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

import jax
import jax.numpy as jnp

from smallgpt_jax import models
from smallgpt_jax.devices import chips, sharding
from smallgpt_jax.inference import decoder, layout, require_next_tokens
from smallgpt_jax.inference.sampling import Sampler, Sampling
from smallgpt_jax.models import flops
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.naming import architecture_name
from smallgpt_jax.planning.compilation import Compiler
from smallgpt_jax.planning.gpus import find_gpu

_USABLE = 0.9  # fraction of the device's memory for weights and cache
_LARGEST_BATCH = 2**24  # larger compute-bound batches are None


@dataclasses.dataclass(frozen=True)
class InferenceEstimate:
    """Of one device. Fields that need unknown properties of it are None, as on CPUs."""

    model: str  # its architecture, with what its block has instead of GPT's parts
    device_kind: str
    dtype: str
    parameters: int
    active_parameters: int
    batch: int
    context_length: int
    weight_bytes: int
    cache_bytes_per_token: int  # of one more token, until the first attention window is full
    cache_bytes_per_text: int  # of a text that fills the context, states included
    # of a text that fills the context, up to its next token; None if they are unknown
    prefill_flops: float | None
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
    """Returns what prefill and decoding of `batch` texts at a time cost. Raises UserError."""
    require_next_tokens(model)
    c, chip = model.config, chips.find_chip(device.device_kind)
    bandwidth = find_bandwidth(device.device_kind)
    ridge = chip.flops / bandwidth if chip and bandwidth else None
    weights = layout.packed_shapes(model)
    weight_bytes = layout.num_bytes(weights)
    per_text = decoder.num_cache_bytes(model, c.context_length)
    # The difference of two lengths leaves out states, whose size does not depend on the length.
    one_token, two_tokens = (decoder.num_cache_bytes(model, length) for length in (1, 2))

    flops_empty = count_flops(model, weights, 1, 1)
    flops_full = count_flops(model, weights, 1, c.context_length)
    empty = StepCost(model, weight_bytes, one_token, flops_empty)
    full = StepCost(model, weight_bytes, per_text, flops_full)

    largest_batch = None
    if chip and per_text:
        room = _USABLE * chip.hbm - weight_bytes
        largest_batch = max(0, int(room // per_text))
    return InferenceEstimate(
        model=architecture_name(c),
        device_kind=device.device_kind,
        dtype=c.dtype,
        parameters=models.num_parameters(model),
        active_parameters=models.num_active_parameters(model),
        batch=batch,
        context_length=c.context_length,
        weight_bytes=weight_bytes,
        cache_bytes_per_token=two_tokens - one_token,
        cache_bytes_per_text=per_text,
        prefill_flops=count_flops(model, weights, c.context_length, c.context_length),
        decode_flops_empty=flops_empty,
        decode_flops_full=flops_full,
        intensity=full.intensity(batch),
        intensity_one_text=full.intensity(1),
        ridge=ridge,
        compute_bound_batch_empty=empty.compute_bound_batch(ridge),
        compute_bound_batch_full=full.compute_bound_batch(ridge),
        seconds_one_text=full.seconds(1, bandwidth, chip),
        seconds=full.seconds(batch, bandwidth, chip),
        largest_batch=largest_batch,
        largest_tokens=None if largest_batch is None else largest_batch * c.context_length,
        formula_bytes=weight_bytes + batch * per_text,
        compiled_bytes=compiled_bytes(model, device, batch),
    )


def find_bandwidth(device_kind: str) -> float | None:
    """Returns the bytes per second of the device's memory."""
    device = find_gpu(device_kind) or chips.find_chip(device_kind)
    return device and device.bandwidth


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One token for each of B texts; see this module's docstring."""

    model: models.LanguageModel
    weight_bytes: int
    cache_bytes: int  # of one text
    flops: float | None  # of one text

    def bytes(self, batch: int) -> float:
        return self.weight_bytes - self.unread_bytes(batch) + batch * self.cache_bytes

    def unread_bytes(self, batch: int) -> float:
        """Returns the bytes of embeddings and experts that `batch` tokens do not use."""
        c = self.model.config
        # The head reads a tied embedding whole.
        table_rows = 0 if c.tie_embeddings else c.vocab_size
        if c.position == "learned":
            table_rows += c.context_length
        tables = max(0, table_rows - batch) * c.d_model
        # Each token reads one row of each block's value embeddings.
        params = jax.tree.leaves(models.abstract_params(self.model))
        values = sum(p.size for p in params if p.name == "value_embedding")
        unread_values = max(0, 1 - batch / c.vocab_size) * values
        # `routed`: the experts that one token does not use. Each further token uses K/E of them.
        routed = models.num_parameters(self.model) - models.num_active_parameters(self.model)
        experts = routed * (1 - c.experts_per_token / c.num_experts) ** (batch - 1)
        return jnp.dtype(c.dtype).itemsize * (tables + unread_values + experts)

    def intensity(self, batch: int) -> float | None:
        return None if self.flops is None else batch * self.flops / self.bytes(batch)

    def compute_bound_batch(self, ridge: float | None) -> int | None:
        """Returns the smallest batch whose intensity reaches `ridge`."""
        if ridge is None or self.flops is None or self.intensity(_LARGEST_BATCH) < ridge:
            return None
        # the intensity grows with the batch
        return bisect.bisect_left(range(_LARGEST_BATCH), ridge, lo=1, key=self.intensity)

    def seconds(self, batch: int, bandwidth: float | None, chip: chips.Chip | None) -> float | None:
        if bandwidth is None or chip is None or self.flops is None:
            return None
        return max(self.bytes(batch) / bandwidth, batch * self.flops / chip.flops)


def count_flops(model: models.LanguageModel, weights, tokens: int, length: int) -> float | None:
    """Returns the FLOPs of products for new tokens of one text; None if they are unknown."""
    # The other implementation, "blocks", pads the groups of tokens, and its padding would count.
    model = model.clone(config=model.config.replace(grouped_matmul="ragged"))
    start_B = jnp.zeros(1, jnp.int32)
    length_B = jnp.full(1, tokens, jnp.int32)
    context = Context(cache_length=length, start_B=start_B, length_B=length_B)
    # A prefill begins with an empty cache. Positions after the newest token count, because
    # `cached_attention` computes them.
    cache = {} if tokens > 1 else decoder.cache_shapes(model, weights, 1, length)
    tokens_1xT = jax.ShapeDtypeStruct((1, tokens), "int32")
    step = functools.partial(decoder.next_logits, model, context=context)
    # a mixer of a user may call what cannot be counted
    try:
        return flops.count_operations(step, weights, cache, tokens_1xT).products
    except flops.UnknownFlops:
        return None


def compiled_bytes(model: models.LanguageModel, device: jax.Device, batch: int) -> int:
    """Returns the bytes of a compiled, greedy decoding step of `batch` texts with full caches."""
    mesh = sharding.make_mesh(sharding.MeshConfig(), [device])
    on_mesh = sharding.replicated(mesh)
    length = model.config.context_length
    weights = layout.packed_shapes(model)
    cache = decoder.cache_shapes(model, weights, batch, length)  # makes arrays, hence no use_mesh

    def numbers(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=on_mesh)

    def on_device(tree):
        return jax.tree.map(lambda x: numbers(x.dtype, *x.shape), tree)

    ids, starts, counts = (
        numbers("int32", batch, 1),
        numbers("int32", batch),
        numbers("int32", batch),
    )
    with sharding.use_mesh(mesh):
        lowered = decoder.decode_step.lower(
            decoder.Decoder(model, model.config.vocab_size, cache_length=length),
            on_device(weights),
            decoder.DecodeState(on_device(cache), None),
            decoder.NewTokens(ids, starts, counts),
            Sampler(numbers("uint32"), numbers("uint32", batch, 2), Sampling(temperature=None)),
        )
    return Compiler([device]).compile(lowered).total_bytes


def format_inference(result: InferenceEstimate) -> str:
    def number(value, form=",.0f", unit="", missing="unknown"):
        return missing if value is None else f"{value:{form}}{unit}"

    def milliseconds(seconds):
        return "unknown" if seconds is None else f"{1000 * seconds:.3f} ms"

    # A missing batch: no batch is compute-bound, or the speed of the device is unknown.
    never = "none" if result.ridge else "unknown"
    rows = [
        ("weights", f"{result.weight_bytes:,} bytes in {result.dtype}"),
        ("cache per token", f"{result.cache_bytes_per_token:,} bytes"),
        ("cache per text, full context", f"{result.cache_bytes_per_text:,} bytes"),
        ("prefill of a full context", number(result.prefill_flops, ".3e", " FLOPs")),
        (
            "decoding, FLOPs per token",
            f"{number(result.decode_flops_empty)} with an empty cache, "
            f"{number(result.decode_flops_full)} with a full one",
        ),
        (
            "FLOPs per byte, full cache",
            f"{number(result.intensity_one_text, '.2f')} for one text, "
            f"{number(result.intensity, '.2f')} for {result.batch}; compute-bound from "
            f"{number(result.ridge, '.0f')}",
        ),
        (
            "compute-bound batch",
            f"{number(result.compute_bound_batch_empty, ',', missing=never)} with empty caches, "
            f"{number(result.compute_bound_batch_full, ',', missing=never)} with full ones",
        ),
        (
            "least time per step, full cache",
            f"{milliseconds(result.seconds_one_text)} for one text, "
            f"{milliseconds(result.seconds)} for {result.batch}",
        ),
        (
            f"largest batch in {_USABLE:.0%} of memory",
            f"{number(result.largest_batch, ',')} texts, {number(result.largest_tokens, ',')} tokens",
        ),
        (
            f"memory of a step of {result.batch}",
            f"compiled {result.compiled_bytes:,} bytes, formula {result.formula_bytes:,} "
            f"({result.formula_bytes / result.compiled_bytes:.1%})",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [
            f"inference of {result.model} on one {result.device_kind}, context "
            f"{result.context_length:,}",
            *(f"  {name:{width}}  {text}" for name, text in rows),
        ]
    )
