"""The config group `model`, which all architectures share."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from smallgpt_jax.config.group import (
    AUTO,
    REPLACED_AT_START,
    ConfigGroup,
    field_types,
    free,
    per_run,
)
from smallgpt_jax.ops import grouped_matmul
from smallgpt_jax.ops.activations import ACTIVATIONS
from smallgpt_jax.ops.attention import BACKENDS

POSITIONS = ("learned", "rope", "alibi", "none")
# A config.json may come from somebody else. What these count is traced one by one, in about 50 ms.
_MOST = {"num_layers": 10_000, "loops": 100, "canon_taps": 100, "conv_taps": 100}
_MOST_TRACED_BLOCKS = 500
_MAX_SIZE = 2**31 - 1  # sizes are int32 in JAX


def usual_heads(d_model: int) -> int:
    """Returns two heads below width 64 and four below 128; then heads of about width 32, from width
    512 on of 64. Their width is even, as rope needs, if possible.
    """
    limits = {64: 2, 128: 4, 512: d_model / 32}
    usual = next((heads for limit, heads in limits.items() if d_model < limit), d_model / 64)

    def cost(heads: int) -> float:
        width = d_model // heads
        # An odd width costs more than any distance to the usual number, because rope refuses it. Of
        # an even number of heads, two can share keys and values; see `ModelConfig.shape`.
        return abs(math.log(heads / usual)) + heads % 2 + 4 * (width % 2) + (width % 8 > 0) / 2

    return min((heads for heads in range(1, d_model + 1) if d_model % heads == 0), key=cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigGroup):
    """The config group `model`. Architectures subclass it to add fields."""

    GROUP: ClassVar[str] = "model"

    # gpt | pgpt | lgpt | cgpt | package.module:Class
    architecture: str
    # rows of the token embedding; at least the tokenizer's vocabulary size. In recipes, it follows
    # another config.data.tokenizer whose value says its size (docs/data.md)
    vocab_size: int = 50_304
    # positions per sequence
    context_length: int = 1024
    # blocks in all paths and stages together
    num_layers: int = 12
    # attention heads per block; must divide d_model, unless head_dim is set
    num_heads: int = 12
    # width of the residual stream; in lgpt and cgpt, of the first stage
    d_model: int = 768
    # key–value heads per block (grouped-query attention); 0: as many as num_heads
    num_kv_heads: int = 0
    # width of each head; 0: d_model / num_heads. If set, all stages of lgpt and cgpt use it
    head_dim: int = 0
    # apply RMSNorm to each head's queries and keys
    qk_norm: bool = False
    # positions that attention sees: the earlier ones ("causal") | also later ones of the text's
    # prefix ("prefix") | all ("bidirectional"). It follows from config.train.objective, which is
    # causal, prefix or masked
    attention_mask: str = "causal"
    # attention window of each block, in positions; 0 or an empty list: full attention. Fewer
    # windows than blocks are repeated: (256, 0) means 256, 0, 256, 0, …
    attention_windows: tuple[int, ...] = ()
    # mixer of each block: attention | delta (Gated DeltaNet) | mamba (Mamba-2) | conv (gated short
    # convolution) | package.module:Class. Fewer mixers than blocks are repeated, as windows are:
    # ("delta", "delta", "attention")
    mixers: tuple[str, ...] = ("attention",)
    # "delta": width of each head's queries and keys; 0: as in attention. If set, all stages of lgpt
    # and cgpt use it
    delta_head_dim: int = 0
    # "delta": (width of each head's values) / (width of its keys)
    delta_value_ratio: int = 2
    # "mamba": size of the state of each channel
    mamba_state: int = 128
    # "mamba": (width of each head's values) / (head width of attention)
    mamba_expand: int = 2
    # "conv": taps of the convolution, the positions that a token of one block sees
    conv_taps: int = 3
    # norm in blocks and before the head: "layer" | "rms" | package.module:Class
    norm: str = "layer"
    # "pre": x + f(norm(x)) | "post": norm(x + f(x)) | "deepnorm": norm(α·x + f(x))
    norm_position: str = "pre"
    # each block begins with x ← a·x + b·x0, where x0 is the first block's input, and a and b are
    # learned numbers
    input_mix: bool = False
    # multiply the outputs of mixer and MLP by a learned number each
    residual_scales: bool = False
    # mixer and MLP have the same input: x + mixer(norm(x)) + MLP(norm(x)), and so with the other
    # norm_position
    parallel_block: bool = False
    # taps of causal convolutions per channel, added to the inputs of mixer and MLP (Canon layers A
    # and C); 0: none
    canon_taps: int = 0
    # add a learned, gated part of the previous token's embedding to each embedding
    smear: bool = False
    # "attention": multiply each head's output by sigmoid(x·w), with a learned vector w per head
    attention_gate: bool = False
    # "attention": 1: each token has a learned vector, a row of the block's own table, which is
    # added to its values | 0: none. Fewer numbers than blocks are repeated, as windows are: (0, 1)
    value_embeddings: tuple[int, ...] = ()
    # times that the blocks (of a path, or a stage) are applied, one pass after the other, with the
    # same weights
    loops: int = 1
    # logits z become c·tanh(z/c), with this c; 0: no cap
    logit_softcap: float = 0.0
    # ε of all norms, which is added to the variance
    norm_epsilon: float = 1e-5
    # "dense": act(x·W_up)·W_down | "gated": (act(x·W_gate) ⊙ x·W_up)·W_down | "moe": mixture of
    # such experts | package.module:Class
    mlp: str = "dense"
    # (width of the MLP's inner layer) / d_model. With "moe": (width of one expert) / d_model
    mlp_ratio: float = 4.0
    # "moe": routed experts per block
    num_experts: int = 16
    # "moe": routed experts that each token uses
    experts_per_token: int = 3
    # "moe": experts that every token uses
    num_shared_experts: int = 1
    # "moe": kind of MLP of each expert, "dense" | "gated"
    expert_mlp: str = "dense"
    # "moe": factor on the output of the routed experts; DeepSeek-V3 uses 2.5
    expert_scale: float = 1.0
    # "moe": change per step of the biases that balance the routed experts; 0: no biases
    expert_bias_rate: float = 0.001
    # "moe": weight of the sequence-wise balance loss; DeepSeek-V3 uses 1e-4; 0: none
    balance_loss: float = 0.0
    # "moe": backend of the experts' matrix products: auto | ragged (TPU) | blocks
    grouped_matmul: str = free("auto")
    # 0: full matrices. Between 0 and 1: each (m, n) matrix of mixer and MLP is the product of two
    # factors, (m, r) and (r, n), with the rank r = ⌊rank_ratio·m·n/(m + n)⌋, at least 1. The
    # factors then have at most rank_ratio·m·n parameters together. Routed experts, and narrow
    # matrices of delta and mamba, are full
    rank_ratio: float = 0.0
    # dropout rate on the embeddings and on the outputs of attention and MLP
    dropout: float = per_run(0.0)
    # activation of the MLP: "gelu" (exact) | "gelu_tanh" (GPT-2's) | "silu" | "relu2"
    activation: str = "gelu"
    # position encoding: "learned" | "rope" | "alibi" (only with XLA's attention) | "none". With
    # "learned", no sequence can be longer than context_length, and a trained model keeps its
    # context_length (docs/conversion.md)
    position: str = "learned"
    # base of RoPE's frequencies, base^(−2i/head width)
    rope_base: float = 10_000.0
    # use biases in blocks, including LayerNorms
    use_bias: bool = False
    # share one matrix between token embedding and head
    tie_embeddings: bool = False
    # dtype of matrix products and activations: float32 | bfloat16 | auto: bfloat16 on TPUs, GPUs
    # and CPUs with AVX512-BF16 without AMX, otherwise float32; a resumed run keeps its dtype.
    # Weights are float32
    dtype: str = per_run("bfloat16", **REPLACED_AT_START)
    # attention backend: auto | flash (TPU) | splash (TPU) | cudnn (NVIDIA) | xla (anywhere). With
    # xla, delta and mamba have no kernel on TPUs either
    attention: str = free("auto")
    # scan over the blocks: compiles faster, but steps are slower and need more memory
    scan_layers: bool = free(False)
    # rematerialization: "none" | "dots": the backward pass recomputes all but products with weights
    # | "full": it recomputes everything
    remat: str = free("none")

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def delta_key_width(self) -> int:
        return self.delta_head_dim or self.head_width

    @property
    def delta_value_width(self) -> int:
        return self.delta_value_ratio * self.delta_key_width

    @property
    def mamba_head_width(self) -> int:
        return self.mamba_expand * self.head_width

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def window(self) -> int:
        """A block's attention window, 0: unlimited. Of a whole model, the first block's."""
        return self.attention_windows[0] if self.attention_windows else 0

    @property
    def depth(self) -> int:
        """The number of blocks in sequence, without loops."""
        return self.num_layers

    @property
    def blocks_in_sequence(self) -> int:
        """The number of blocks in sequence, with loops."""
        return self.loops * self.depth

    @property
    def last_stage(self) -> Self:
        """The config of the last blocks, which are narrower in lgpt and cgpt."""
        return self

    @property
    def ends_with_norm(self) -> bool:
        """Whether the trunk's output is normalized, so that the model needs no final norm."""
        return self.norm_position != "pre"

    @property
    def mlp_width(self) -> int:
        return round(self.mlp_ratio * self.d_model)

    @property
    def output_width(self) -> int:
        return self.d_model

    @classmethod
    def shape(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that follow from `fields`, which has d_model and num_layers.

        A sized recipe (models/shape.py) uses only those that it has set to -1.
        """
        heads = fields.get("num_heads") or usual_heads(fields["d_model"])
        if (groups := fields.get("num_kv_heads")) and "num_heads" not in fields:
            heads = groups * max(1, round(heads / groups))
        head_width = fields.get("head_dim") or fields["d_model"] // heads
        return {
            "num_heads": heads,
            "num_kv_heads": heads // 2 if heads % 2 == 0 else 0,
            "delta_head_dim": max(1, 3 * head_width // 4),
            "mamba_state": 32 if fields["d_model"] < 512 else 128,
        }

    @property
    def rate_factor(self) -> float:
        """The best learning rate of a sized recipe, relative to that of attention with rope."""
        factor = 0.5 if self.position == "learned" else 1.0
        return 0.65 * factor if "delta" in self.mixers else factor

    def validate(self) -> None:
        """Raises UserError. Overriding methods call `super().validate()` first."""
        sizes = "vocab_size context_length num_layers num_heads d_model loops"
        of_mixers = "delta_value_ratio mamba_state mamba_expand"
        self.validate_range(*sizes.split(), *of_mixers.split(), least=1)
        self.validate_most()
        self.validate_fraction("dropout")
        self.validate_choice("dtype", ("float32", "bfloat16", AUTO))
        self.validate_choice("activation", ACTIVATIONS)
        self.validate_choice("position", POSITIONS)
        self.validate_choice("norm_position", ("pre", "post", "deepnorm"))
        self.validate_choice("attention_mask", ("causal", "prefix", "bidirectional"))
        self.validate_choice("attention", BACKENDS)
        self.validate_range("norm_epsilon", "rope_base", "mlp_ratio", above=True)
        if any(not isinstance(window, int) or window < 0 for window in self.attention_windows):
            self.refuse("attention_windows", "must be integers of at least 0; 0: full attention")
        if not set(self.value_embeddings) <= {0, 1}:
            self.refuse("value_embeddings", "must be 0 or 1 for each block")
        if self.canon_taps < 0 or self.canon_taps == 1:
            self.refuse("canon_taps", "must be 0, or at least 2")
        self.validate_range("logit_softcap")
        if not self.mixers:
            self.refuse("mixers", "must have at least one name")
        if not 0 <= self.rank_ratio < 1:
            self.refuse("rank_ratio", "must be at least 0 and below 1; 0 means full matrices")
        for field, default in (
            ("num_kv_heads", "num_heads"),
            ("head_dim", "d_model / num_heads"),
            ("delta_head_dim", "head_dim"),
        ):
            if getattr(self, field) < 0:
                self.refuse(field, f"must be at least 0; 0 means config.model.{default}")
        self.validate_range("conv_taps", least=2)  # with one tap, nothing moves between positions
        if self.mlp == "moe":
            self.validate_experts()
        self.validate_block()

    def validate_most(self) -> None:
        """Refuses what JAX cannot express, or would trace for minutes."""
        for field, kind in field_types(type(self)).items():
            most = _MOST.get(field, _MAX_SIZE)
            if kind is int and getattr(self, field) > most:
                self.refuse(field, f"must be at most {most:,}")
        patterns = (self.mixers, self.attention_windows, self.value_embeddings)
        period = math.lcm(*(max(len(pattern), 1) for pattern in patterns))
        # Blocks of whole periods are stacked, so that only one period is traced.
        traced = self.loops * (self.num_layers if self.num_layers % period else period)
        if traced > _MOST_TRACED_BLOCKS:
            self.refuse(
                "num_layers",
                f"with config.model.loops={self.loops}, {traced:,} blocks would be traced one by "
                f"one, more than {_MOST_TRACED_BLOCKS}; use a multiple of the patterns' lengths",
            )

    def validate_experts(self) -> None:
        self.validate_range("num_experts", least=1)
        if not 1 <= self.experts_per_token <= self.num_experts:
            most = f"config.model.num_experts={self.num_experts}"
            self.refuse("experts_per_token", f"must be at least 1 and at most {most}")
        self.validate_range("num_shared_experts", "expert_bias_rate", "balance_loss")
        self.validate_range("expert_scale", above=True)
        if self.use_bias:
            self.refuse("use_bias", "must be False with config.model.mlp='moe'")
        self.validate_choice("expert_mlp", ("dense", "gated"))
        self.validate_choice("grouped_matmul", grouped_matmul.BACKENDS)

    def validate_block(self) -> None:
        """Checks what depends on the width of a block, which can differ between stages."""
        if not self.head_dim and self.d_model % self.num_heads:
            rule = f"must divide config.model.d_model={self.d_model}"
            self.refuse("num_heads", f"{rule}, unless config.model.head_dim is set")
        if self.num_heads % self.kv_heads:
            self.refuse("num_kv_heads", f"must divide config.model.num_heads={self.num_heads}")
        if self.position == "rope" and self.head_width % 2:
            cause = "head_dim" if self.head_dim else "num_heads"
            if not self.head_dim and self.d_model % 2:  # no number of heads has an even width
                cause = "d_model"
            self.refuse(
                "position",
                f"needs an even head width, but heads in blocks of width {self.d_model} have "
                f"{self.head_width}; change config.model.{cause}",
            )
        if not math.isfinite(self.mlp_ratio * self.d_model):
            self.refuse("mlp_ratio", "gives an MLP of infinite width; decrease it")
        if self.mlp_width < 1:
            width = f"an MLP width of 0 in blocks of width {self.d_model}"
            self.refuse("mlp_ratio", f"rounds to {width}; increase it")
        width = min(self.d_model, self.num_heads * self.head_width)  # of the smallest matrix
        # A W × W matrix has W² parameters, and two factors have at least 2·W.
        if self.rank_ratio and width < 3:
            self.refuse("rank_ratio", f"saves nothing for matrices of width {width}; set it to 0")
