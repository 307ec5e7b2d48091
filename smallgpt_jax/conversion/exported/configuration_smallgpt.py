"""The configuration of a smallgpt_jax model, for Hugging Face's transformers."""

from transformers import PretrainedConfig

# The fields and their defaults. smallgpt.py reads this table without importing it.
FIELDS = {
    "architecture": "gpt",
    "vocab_size": 50304,
    "context_length": 1024,
    "num_layers": 12,
    "num_heads": 12,
    "num_kv_heads": 0,
    "head_dim": 0,
    "d_model": 768,
    "mlp": "dense",
    "mlp_ratio": 4,
    "activation": "gelu",
    "norm": "layer",
    "norm_position": "pre",
    "norm_epsilon": 1e-5,
    "qk_norm": False,
    "attention_mask": "causal",
    "attention_windows": (),
    "mixers": ("attention",),
    "delta_head_dim": 0,
    "delta_value_ratio": 2,
    "mamba_state": 128,
    "mamba_expand": 2,
    "conv_taps": 3,
    "position": "learned",
    "rope_base": 10_000.0,
    "use_bias": False,
    "input_mix": False,
    "residual_scales": False,
    "parallel_block": False,
    "attention_gate": False,
    "value_embeddings": (),
    "logit_softcap": 0.0,
    "num_experts": 16,
    "experts_per_token": 3,
    "num_shared_experts": 1,
    "expert_mlp": "dense",
    "expert_scale": 1.0,
    # only smallgpt_jax's training uses these two
    "expert_bias_rate": 0.001,
    "balance_loss": 0.0,
    # None: not a field of the architecture
    "num_paths": None,
    "path_weights": "learned",
    "blocks_per_stage": None,
    "compress_last_stage": None,
    "stage_heads": None,
    "conv_kernel": None,
    "training_dtype": "float32",
    "training_dropout": 0.0,
    "use_cache": True,
}


class SmallGPTConfig(PretrainedConfig):
    """A GPT, ParallelGPT, LinearGPT or ConvGPT (arXiv 2404.14462) trained by smallgpt_jax.

    Most fields have the same names as in smallgpt_jax's `model` config group.
    """

    model_type = "smallgpt"
    attribute_map = {  # noqa: RUF012
        "max_position_embeddings": "context_length",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(self, tie_word_embeddings=False, **kwargs):
        for name, default in FIELDS.items():
            value = kwargs.pop(name, default)
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        # A config.json that transformers has saved contains these two, which follow from the rest.
        kwargs.pop("num_hidden_layers", None)
        kwargs.pop("layer_types", None)
        # the layers with a cache: all blocks, and convolutions that read past inputs
        self.num_hidden_layers = self.num_layers
        if (self.conv_kernel or 1) > 1:
            self.num_hidden_layers += self.num_compressions
        if set(self.mixers) != {"attention"}:  # read by transformers' DynamicCache
            self.layer_types = self.cache_types()
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    @property
    def num_stages(self) -> int:
        return self.num_layers // self.blocks_per_stage if self.blocks_per_stage else 1

    @property
    def num_compressions(self) -> int:
        """The number of layers that halve the width."""
        if not self.blocks_per_stage:
            return 0
        return self.num_stages if self.compress_last_stage else self.num_stages - 1

    @property
    def depth(self) -> int:
        """The number of blocks in sequence."""
        return self.num_layers // (self.num_paths or 1)

    @property
    def ends_with_norm(self) -> bool:
        """Whether the trunk ends with a norm. If so, the model has no final norm of its own."""
        return self.norm_position != "pre" and not self.compress_last_stage

    def stage(self, number: int) -> tuple[int, int, int, int]:
        """Returns (width, heads, key–value heads, head width) of the blocks of a stage."""
        width = self.d_model // 2**number
        divisor = 2**number if self.stage_heads == "scaled" else 1
        heads = self.num_heads // divisor
        kv_heads = self.num_kv_heads // divisor or heads
        return width, heads, kv_heads, self.head_dim or width // heads

    def mixer(self, number: int) -> str:
        """Returns the mixer of block `number`: "attention", "delta", "mamba" or "conv"."""
        return self.mixers[number % len(self.mixers)]

    def cache_types(self) -> list[str]:
        """Returns transformers' name for the cache of each layer."""
        types = []
        for layer in range(self.num_layers):
            mixer = self.mixer(layer % self.depth)  # each path of a pgpt starts the pattern again
            types.append("full_attention" if mixer == "attention" else "hybrid")
        # convolutions keep their past inputs like keys
        num_convolutions = self.num_hidden_layers - self.num_layers
        return types + ["full_attention"] * num_convolutions

    def window(self, number: int) -> int:
        """Returns the attention window of block `number`, in positions; 0: full attention."""
        windows = self.attention_windows
        return windows[number % len(windows)] if windows else 0

    def has_value_embedding(self, number: int) -> bool:
        """Returns whether the attention of block `number` adds a vector per token to its values."""
        pattern = self.value_embeddings
        return bool(pattern and pattern[number % len(pattern)])
