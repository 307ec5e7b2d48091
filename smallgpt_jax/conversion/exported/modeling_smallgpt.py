"""The models of smallgpt_jax in PyTorch, for Hugging Face's transformers.

Shapes in comments: B batch size, T new positions, S cached and new positions, D width, H heads, G
key–value heads, K head width.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from .configuration_smallgpt import SmallGPTConfig
from .mlp_smallgpt import MLPS
from .recurrent_smallgpt import RECURRENT

# Attributes with weights have the names of smallgpt_jax's parameters, since the file names its tensors
# by them (conversion/tensors.py).


class MixerInputs(NamedTuple):
    """The tokens, attention mask, positions and padding of a forward pass."""

    tokens: torch.Tensor | None  # (B, T)
    mask: torch.Tensor  # (B or 1, 1, T, S): whether a query attends to a key, apart from windows
    distances: torch.Tensor  # (B or 1, 1, T, S): position of a query minus position of a key
    positions: torch.Tensor  # (B or 1, T): positions of the queries in their texts
    is_text: torch.Tensor | None  # (B, T, 1): 0 at padding; None without padding


def make_norm(config, width):
    if config.norm == "rms":
        return nn.RMSNorm(width, eps=config.norm_epsilon)
    return nn.LayerNorm(width, eps=config.norm_epsilon, bias=config.use_bias)


def apply_rope(x, positions, base):
    """Returns queries or keys (B, H or G, T, K) with rotary positions (arXiv 2104.09864).

    Entries i and i + K/2 form a pair, which is rotated by the angle position · base^(−2i/K).
    """
    half = x.shape[-1] // 2
    frequencies = [base ** (-i / half) for i in range(half)]  # in float64
    frequencies = torch.tensor(frequencies, dtype=torch.float32, device=x.device)
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def alibi_bias(mask, distances, heads):
    """Returns the bias of attention scores, (B or 1, H, T, S); −∞: masked (arXiv 2108.12409)."""
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=mask.device) / heads)
    return (-slopes[:, None, None] * distances.abs()).masked_fill(~mask, -torch.inf)


class Attention(nn.Module):
    """Self-attention. Each of the G key–value heads is shared by H/G heads.

    For each key–value head in turn, `qkv` returns H/G queries, one key and one value. With a window
    of w positions, a query attends to its own position and the w − 1 positions before, in an
    encoder also to the w − 1 positions after.
    """

    def __init__(self, config, layer, number, stage):
        super().__init__()
        width, self.heads, self.kv_heads, head_width = config.stage(stage)
        self.layer = layer
        self.window = config.window(number)
        self.position = config.position
        self.rope_base = config.rope_base
        features = (self.heads + 2 * self.kv_heads) * head_width
        self.qkv = nn.Linear(width, features, bias=config.use_bias)
        self.q_norm = self.k_norm = nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(head_width, eps=config.norm_epsilon)
            self.k_norm = nn.RMSNorm(head_width, eps=config.norm_epsilon)
        self.out = nn.Linear(self.heads * head_width, width, bias=config.use_bias)
        self.gate = nn.Linear(width, self.heads, bias=False) if config.attention_gate else None
        self.value_embedding = None
        if config.has_value_embedding(number):
            self.value_embedding = nn.Embedding(config.vocab_size, self.kv_heads * head_width)

    def forward(self, x, inputs, cache):  # (B, T, D)
        batch, time, _ = x.shape
        shared = self.heads // self.kv_heads  # queries per key–value head
        qkv = self.qkv(x).view(batch, time, self.kv_heads, shared + 2, -1)
        qkv = qkv.transpose(1, 2)  # (B, G, T, H/G + 2, K)
        q = self.q_norm(qkv[..., :-2, :].transpose(2, 3).flatten(1, 2))  # (B, H, T, K)
        k = self.k_norm(qkv[..., -2, :])  # (B, G, T, K)
        v = qkv[..., -1, :]
        if self.value_embedding is not None:
            embedded = self.value_embedding(inputs.tokens).view(batch, time, self.kv_heads, -1)
            v = v + embedded.transpose(1, 2)
        if self.position == "rope":
            q = apply_rope(q, inputs.positions, self.rope_base)
            k = apply_rope(k, inputs.positions, self.rope_base)
        if cache is not None:  # after the rotation: cached keys are not rotated again
            k, v = cache.update(k, v, self.layer)  # (B, G, S, K)
        # The cache has the heads once; only this product has copies.
        if shared > 1:
            k = k.repeat_interleave(shared, dim=1)
            v = v.repeat_interleave(shared, dim=1)
        mask = inputs.mask
        if self.window:
            mask = mask & (inputs.distances.abs() < self.window)
        if self.position == "alibi":
            mask = alibi_bias(mask, inputs.distances, self.heads).to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y.transpose(1, 2)  # (B, T, H, K)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))[..., None]
        return self.out(y.reshape(batch, time, -1))


class Block(nn.Module):
    """A mixer (attention or a recurrent one), then an MLP, each with a residual and a norm.

    `layer` is the number of the block's cache, `number` its place in the patterns of mixers,
    windows and value embeddings.
    """

    def __init__(self, config, layer, number, stage=0):
        super().__init__()
        width, *_ = config.stage(stage)
        self.norm_position = config.norm_position
        self.alpha = (2 * config.depth) ** 0.25 if config.norm_position == "deepnorm" else 1
        self.has_attention = config.mixer(number) == "attention"
        if self.has_attention:
            self.attention_norm = make_norm(config, width)
            self.attention = Attention(config, layer, number, stage)
        else:
            self.mixer_norm = make_norm(config, width)
            self.mixer = RECURRENT[config.mixer(number)](config, layer, stage)
        self.mlp_norm = None if config.parallel_block else make_norm(config, width)
        self.mlp = MLPS[config.mlp](config, width, round(config.mlp_ratio * width))
        self.input_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.input_mix else None
        self.residual_scales = nn.Parameter(torch.ones(2)) if config.residual_scales else None

    def forward(self, x, first, inputs, cache):
        """Returns the next x; `first` is the first block's input."""
        if self.has_attention:
            norm, mixer = self.attention_norm, self.attention
        else:
            norm, mixer = self.mixer_norm, self.mixer
        mixer_scale, mlp_scale = (1, 1) if self.residual_scales is None else self.residual_scales

        def mix(x):
            return mixer_scale * mixer(x, inputs, cache)

        def mlp(x):
            return mlp_scale * self.mlp(x)

        if self.input_mix is not None:
            x = self.input_mix[0] * x + self.input_mix[1] * first
        if self.mlp_norm is None:  # a parallel block
            return self.add(x, norm, lambda x: mix(x) + mlp(x))
        x = self.add(x, norm, mix)
        return self.add(x, self.mlp_norm, mlp)

    def add(self, x, norm, f):
        """Returns x + f(x), with the norm on the input of f ("pre") or on the sum."""
        if self.norm_position == "pre":
            return x + f(norm(x))
        # alpha is 1 but for DeepNorm (arXiv 2203.00555), where it grows with the depth
        return norm(self.alpha * x + f(x))


class CausalConv(nn.Conv1d):
    """A causal convolution over time, whose past inputs are cached like keys."""

    def __init__(self, width, features, taps, layer):
        super().__init__(width, features, taps)
        self.layer = layer

    def forward(self, x, is_text, cache):  # x (B, T, D), is_text (B, T, 1) or None
        time = x.shape[1]
        past = self.kernel_size[0] - 1  # inputs before the first new one that it reads
        if is_text is not None:
            # Set the padding to zero, so that the convolution reads zeros before the first token,
            # as in unpadded texts.
            x = x * is_text
        if cache is not None and past:
            # As keys of one head with empty values: transformers then reorders, crops and counts them.
            keys, _ = cache.update(x[:, None], x[:, None, :, :0], self.layer)
            x = keys[:, 0]
        # as many past inputs as the kernel reads; zeros before the first token
        x = x[:, -(time + past) :]
        x = F.pad(x, (0, 0, time + past - x.shape[1], 0))
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def apply_blocks(blocks, x, inputs, cache):
    first = x
    for block in blocks:
        x = block(x, first, inputs, cache)
    return x


class Path(nn.Module):
    """One path of a ParallelGPT."""

    def __init__(self, config, first_layer, length):
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.blocks = nn.ModuleList(Block(config, first_layer + i, i) for i in range(length))

    def forward(self, x, inputs, cache):
        return apply_blocks(self.blocks, self.dense(x), inputs, cache)


class Trunk(nn.Module):
    """The layers between the embedding and the final norm."""

    def __init__(self, config):
        super().__init__()
        self.architecture = config.architecture
        if config.architecture == "gpt":
            self.blocks = nn.ModuleList(Block(config, i, i) for i in range(config.num_layers))
        elif config.architecture == "pgpt":
            length = config.num_layers // config.num_paths
            self.paths = nn.ModuleList(
                Path(config, p * length, length) for p in range(config.num_paths)
            )
            if config.num_paths > 1 and config.path_weights == "learned":
                self.path_logits = nn.Parameter(torch.full((config.num_paths - 1,), 0.5))
        else:
            length = config.blocks_per_stage
            self.stage = nn.ModuleList()
            for s in range(config.num_stages):
                blocks = (Block(config, i, i, s) for i in range(s * length, (s + 1) * length))
                self.stage.append(nn.ModuleList(blocks))
            self.compress = nn.ModuleList(
                self.compression(config, s) for s in range(config.num_compressions)
            )

    @staticmethod
    def compression(config, stage):
        width, *_ = config.stage(stage)
        if config.architecture == "lgpt":
            return nn.Linear(width, width // 2)
        return CausalConv(width, width // 2, config.conv_kernel, config.num_layers + stage)

    def forward(self, x, inputs, cache):
        if self.architecture == "gpt":
            return apply_blocks(self.blocks, x, inputs, cache)
        if self.architecture == "pgpt":
            return self.join([path(x, inputs, cache) for path in self.paths], x.dtype)
        for s, stage in enumerate(self.stage):
            x = apply_blocks(stage, x, inputs, cache)
            if s == len(self.compress):  # no layer after the last stage
                break
            compress = self.compress[s]
            x = compress(x) if self.architecture == "lgpt" else compress(x, inputs.is_text, cache)
        return x

    def join(self, paths, dtype):
        """Returns the weighted mean of the outputs of all paths. The last logit is 0."""
        if len(paths) == 1:
            return paths[0]
        if not hasattr(self, "path_logits"):
            return torch.stack(paths).mean(0)
        # in float32, as in training
        logits = F.pad(self.path_logits.float(), (0, 1))
        weights = torch.softmax(logits, 0).to(dtype)
        return sum(weight * path for weight, path in zip(weights, paths))


class SmallGPT(PreTrainedModel):
    """Token and position embeddings, a trunk, the final norm, and an output head."""

    config_class = SmallGPTConfig
    base_model_prefix = ""  # there is no model without a head inside
    main_input_name = "input_ids"
    _input_embed_layer = "token_embedding"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _tied_weights_keys = {"head.weight": "token_embedding.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        self.trunk = Trunk(config)
        width = config.d_model // 2**config.num_compressions
        self.final_norm = nn.Identity() if config.ends_with_norm else make_norm(config, width)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        # A recurrent state cannot be set back, so transformers refuses assisted generation.
        self._is_stateful = "hybrid" in config.cache_types()
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, head):
        self.head = head

    def logits(self, x):
        # the cap is that of Gemma 2 (arXiv 2408.00118): a smooth limit, ±cap
        logits = self.head(x)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def loss(self, logits, labels, **kwargs):
        if labels is None:
            return None
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)

    def hidden(self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds):
        """Returns the input of the output head, (B, T, W). Texts may be padded on either side;
        `attention_mask` is 1 at tokens and 0 at padding.
        """
        x = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        time = x.shape[1]
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        key_positions = torch.arange(past + time, device=x.device)[None]
        if attention_mask is not None:  # positions count tokens, not padding
            # −1 before the first token becomes 0; it is masked, but must be a row of the embedding
            key_positions = attention_mask.long().cumsum(1).sub(1).clamp(min=0)
        if position_ids is None:
            position_ids = key_positions[:, -time:]
        if self.config.position == "learned":
            x = x + self.position_embedding(position_ids)
        mask = torch.ones(time, past + time, dtype=torch.bool, device=x.device)[None, None]
        if self.config.attention_mask == "causal":
            mask = mask.tril(past)  # row i is position past + i of the keys
        is_text = None  # without padding, masks of recurrent states and convolutions are skipped
        if attention_mask is not None:
            # Padding attends to itself, because attention without keys gives NaN.
            here = torch.eye(past + time, dtype=torch.bool, device=x.device)[past:]
            mask = mask & (attention_mask[:, None, None].bool() | here)
            is_text = attention_mask[:, -time:, None].to(x.dtype)
        if input_ids is None and any(self.config.value_embeddings):
            raise ValueError("a model with value_embeddings needs input_ids, not inputs_embeds")
        distances = (key_positions[:, -time:, None] - key_positions[:, None])[:, None]
        inputs = MixerInputs(input_ids, mask, distances, position_ids, is_text)
        return self.final_norm(self.trunk(x, inputs, past_key_values))


class SmallGPTForCausalLM(SmallGPT, GenerationMixin):
    """Predicts the next token."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        return_dict=None,
        **kwargs,
    ):
        """Returns the logits of each position's next token, and the loss if `labels` are given.

        `labels` are the input tokens, not shifted; positions with the label −100 do not count in
        the loss.
        """
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        x = self.hidden(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        # The head is the largest product, so generation asks for the last position alone.
        # As in transformers: the number of last positions (0: all), or the indices of positions.
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(x[:, keep])
        output = CausalLMOutputWithPast(
            loss=self.loss(logits, labels, **kwargs), logits=logits, past_key_values=past_key_values
        )
        return output.to_tuple() if return_dict is False else output


class SmallGPTForMaskedLM(SmallGPT):
    """An encoder that predicts masked tokens. `config.mask_token_id` is the mask token."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        """Returns the logits of each position's own token, and the loss if `labels` are given;
        positions with the label −100 do not count. With `output_hidden_states`, also returns the
        input of the output head, (B, T, W).
        """
        x = self.hidden(input_ids, attention_mask, position_ids, None, inputs_embeds)
        logits = self.logits(x)
        output = MaskedLMOutput(
            loss=self.loss(logits, labels, **kwargs),
            logits=logits,
            hidden_states=(x,) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output
