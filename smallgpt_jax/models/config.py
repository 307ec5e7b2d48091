"""The model config that all architectures share."""

import dataclasses
import typing
from collections.abc import Iterable

from smallgpt_jax.errors import UserError
from smallgpt_jax.ops import grouped_matmul
from smallgpt_jax.ops.activations import ACTIVATIONS
from smallgpt_jax.ops.attention import BACKENDS

NORM_POSITIONS = ("pre", "post", "deepnorm")
POSITIONS = ("learned", "rope", "alibi", "none")
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string",
              tuple: "integers, separated by commas"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The `model` group of a config; configs/base.py documents each field.

    Architectures subclass it to add fields. Fields with a default were added after the first release. Configs of older
    runs lack these fields and get the defaults.
    """

    architecture: str
    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    d_model: int
    mlp_ratio: float
    dropout: float
    use_bias: bool
    tie_embeddings: bool
    dtype: str
    scan_layers: bool
    activation: str = "gelu"
    position: str = "learned"
    attention: str = "auto"
    remat: str = "none"
    norm: str = "layer"
    norm_position: str = "pre"
    norm_epsilon: float = 1e-5
    mlp: str = "dense"
    num_kv_heads: int = 0
    qk_norm: bool = False
    attention_windows: tuple[int, ...] = ()
    rope_base: float = 10_000.0
    head_dim: int = 0
    rank_ratio: float = 0.0
    num_experts: int = 16
    experts_per_token: int = 3
    num_shared_experts: int = 1
    expert_mlp: str = "dense"
    expert_scale: float = 1.0
    expert_bias_rate: float = 0.001
    balance_loss: float = 0.0
    grouped_matmul: str = "auto"

    def __post_init__(self):
        if isinstance(self.attention_windows, list):  # from JSON
            object.__setattr__(self, "attention_windows", tuple(self.attention_windows))

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """The number of key–value heads per block."""
        return self.num_kv_heads or self.num_heads

    @property
    def window(self) -> int:
        """The attention window of a block, in positions; 0 means unlimited.

        In the config of a whole model, this is the window of the first block. `layer_configs` returns the configs of
        single blocks.
        """
        return self.attention_windows[0] if self.attention_windows else 0

    @property
    def depth(self) -> int:
        """The number of blocks that a token passes through, one after the other."""
        return self.num_layers

    @property
    def ends_with_norm(self) -> bool:
        """Whether the trunk's output is normalized, so that the model needs no final norm."""
        return self.norm_position != "pre"

    @property
    def mlp_width(self) -> int:
        """The width of the MLP's inner layer; in a mixture of experts, of one expert."""
        return round(self.mlp_ratio * self.d_model)

    @property
    def output_width(self) -> int:
        """The width of the trunk's output."""
        return self.d_model

    def refuse(self, field: str, rule: str):
        """Raises UserError with the name and value of `field`, and the `rule` that the value breaks."""
        raise UserError(f"config.model.{field}={getattr(self, field)!r}: {rule}")

    def validate(self) -> None:
        """Raises UserError for invalid values. Subclasses that override this method call `super().validate()` first."""
        self.validate_types()
        for field in ("vocab_size", "context_length", "num_layers", "num_heads", "d_model"):
            if not getattr(self, field) >= 1:
                self.refuse(field, "must be at least 1")
        if not 0 <= self.dropout < 1:
            self.refuse("dropout", "must be at least 0 and below 1")
        for field, allowed in (
                ("dtype", ("float32", "bfloat16")), ("activation", ACTIVATIONS), ("position", POSITIONS),
                ("norm_position", NORM_POSITIONS),
                ("attention", BACKENDS)):
            self.validate_choice(field, allowed)
        for field in ("norm_epsilon", "rope_base", "mlp_ratio"):
            if not 0 < getattr(self, field) < float("inf"):
                self.refuse(field, "must be above 0")
        if any(not isinstance(window, int) or window < 0 for window in self.attention_windows):
            self.refuse("attention_windows", "must be integers of at least 0, in positions; 0 means full attention")
        if not 0 <= self.rank_ratio < 1:
            self.refuse("rank_ratio", "must be at least 0 and below 1; 0 means full matrices. Two factors with as many "
                        "parameters as their matrix, or more, save nothing")
        for field, default in (("num_kv_heads", "num_heads"), ("head_dim", "d_model / num_heads")):
            if getattr(self, field) < 0:
                self.refuse(field, f"must be at least 0; 0 means config.model.{default}")
        if self.mlp == "moe":
            self.validate_experts()
        self.validate_block()

    def validate_experts(self) -> None:
        """Raises UserError if a field of the mixture of experts is invalid."""
        if self.num_experts < 1:
            self.refuse("num_experts", "must be at least 1")
        if not 1 <= self.experts_per_token <= self.num_experts:
            self.refuse("experts_per_token",
                        f"must be at least 1 and at most config.model.num_experts={self.num_experts}")
        if self.num_shared_experts < 0:
            self.refuse("num_shared_experts", "must be at least 0")
        if self.use_bias:
            self.refuse("use_bias", "must be False with config.model.mlp='moe', because experts have no biases")
        self.validate_choice("expert_mlp", ("dense", "gated"))
        self.validate_choice("grouped_matmul", grouped_matmul.BACKENDS)
        for field in ("expert_bias_rate", "balance_loss"):
            if not 0 <= getattr(self, field) < float("inf"):
                self.refuse(field, "must be a finite number, at least 0")
        if not 0 < self.expert_scale < float("inf"):
            self.refuse("expert_scale", "must be a finite number above 0")

    def validate_choice(self, field: str, allowed: Iterable[str]) -> None:
        """Raises UserError unless the value of `field` is in `allowed`."""
        if getattr(self, field) not in allowed:
            self.refuse(field, f"must be one of {', '.join(allowed)}")

    def validate_types(self) -> None:
        """Raises UserError for values of the wrong type, because a config.json can contain values of any type."""
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), typing.get_origin(field.type) or field.type
            if not isinstance(value, (float, int) if kind is float else kind) or (
                    isinstance(value, bool) and kind is not bool):
                self.refuse(field.name, f"must be {TYPE_NAMES[kind]}")

    def validate_block(self) -> None:
        """Raises UserError for fields that are invalid for blocks of width d_model."""
        if not self.head_dim and self.d_model % self.num_heads:
            self.refuse("num_heads", f"must divide config.model.d_model={self.d_model}, unless config.model.head_dim "
                        "is set")
        if self.num_heads % self.kv_heads:
            self.refuse("num_kv_heads", f"must divide config.model.num_heads={self.num_heads}")
        if self.position == "rope" and self.head_width % 2:
            self.refuse("position", f"needs an even head width, but heads in blocks of width {self.d_model} have "
                        f"{self.head_width}; change config.model.{'head_dim' if self.head_dim else 'num_heads'}")
        if self.mlp_width < 1:
            self.refuse("mlp_ratio", f"rounds to an MLP width of 0 in blocks of width {self.d_model}; increase it")
        width = min(self.d_model, self.num_heads * self.head_width)  # no matrix has fewer rows or columns
        if self.rank_ratio and width < 3:  # a W × W matrix has W² parameters, and two factors have at least 2·W
            self.refuse("rank_ratio", f"saves nothing for matrices of width {width}; set it to 0")
