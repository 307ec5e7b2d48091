"""The configuration of a smallgpt_jax model, for Hugging Face's transformers."""

from transformers import PretrainedConfig


class SmallGPTConfig(PretrainedConfig):
    """Configuration of a GPT, ParallelGPT, LinearGPT or ConvGPT (arXiv 2404.14462) trained by smallgpt_jax.

    Most fields have the same names as in smallgpt_jax's `model` config group. `num_hidden_layers` is the number of
    layers with a cache: all blocks, and the convolutions if their kernel size is above 1.
    """

    model_type = "smallgpt"
    attribute_map = {  # noqa: RUF012
        "max_position_embeddings": "context_length", "hidden_size": "d_model",
        "num_attention_heads": "num_heads"}
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(self, architecture="gpt", vocab_size=50304, context_length=1024, num_layers=12, num_heads=12,
                 d_model=768, mlp_ratio=4, activation="gelu", position="learned", use_bias=False,
                 num_paths=None, path_weights="learned", blocks_per_stage=None, compress_last_stage=None,
                 stage_heads=None, conv_kernel=None,
                 training_dtype="float32", training_dropout=0.0, tie_word_embeddings=False,
                 use_cache=True, **kwargs):
        self.architecture = architecture
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.d_model = d_model
        self.mlp_ratio = mlp_ratio
        self.activation = activation
        self.position = position
        self.use_bias = use_bias
        self.num_paths = num_paths
        self.path_weights = path_weights
        self.blocks_per_stage = blocks_per_stage
        self.compress_last_stage = compress_last_stage
        self.stage_heads = stage_heads
        self.conv_kernel = conv_kernel
        self.training_dtype = training_dtype
        self.training_dropout = training_dropout
        self.use_cache = use_cache
        kwargs.pop("num_hidden_layers", None)
        self.num_hidden_layers = num_layers + (self.num_compressions if (conv_kernel or 1) > 1 else 0)
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

    def stage(self, number: int) -> tuple[int, int]:
        """Returns (width, number of heads) of the blocks of stage `number`."""
        heads = self.num_heads // 2**number if self.stage_heads == "scaled" else self.num_heads
        return self.d_model // 2**number, heads
