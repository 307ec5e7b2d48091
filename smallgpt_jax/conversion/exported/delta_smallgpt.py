"""Gated DeltaNet (arXiv 2412.06464) of smallgpt_jax in PyTorch.

Shapes in comments: B batch size, T new positions, D width, H heads, K key width, V value width, C positions per chunk.
"""

import torch
from torch import nn
from torch.nn import functional as F

TAPS = 4  # of the convolution
CHUNK = 64  # positions per chunk


class GatedDeltaNet(nn.Module):
    """Per head, a state S (K, V) maps keys to values: S ← α·(I − β·k·kᵀ)·S + β·k·vᵀ, and y = Sᵀ·q.

    The cache of layer `layer` has the states and the last inputs of the convolution. It also has one number per
    position, because transformers takes the length of the text from the first layer.
    """

    def __init__(self, config, layer, stage):
        super().__init__()
        width, self.heads, _, head_width = config.stage(stage)
        self.layer, self.key_width = layer, config.delta_head_dim or head_width
        keys, values = self.heads * self.key_width, self.heads * self.key_width * config.delta_value_ratio
        self.query = nn.Linear(width, keys, bias=config.use_bias)
        self.key = nn.Linear(width, keys, bias=config.use_bias)
        self.value = nn.Linear(width, values, bias=config.use_bias)
        self.gate = nn.Linear(width, values, bias=config.use_bias)
        self.decay = nn.Linear(width, self.heads, bias=False)
        self.beta = nn.Linear(width, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.convolution = ShortConvolution(2 * keys + values)
        self.out_norm = nn.RMSNorm(values // self.heads, eps=config.norm_epsilon)
        self.out = nn.Linear(values, width, bias=config.use_bias)

    def forward(self, x, inputs, cache):  # x (B, T, D), inputs.is_text (B, T, 1) or None
        batch, time, _ = x.shape
        qkv = torch.cat([part(x).view(batch, time, self.heads, -1) for part in (self.query, self.key, self.value)], -1)
        log_decay = -self.A_log.float().exp() * F.softplus(self.decay(x).float() + self.dt_bias.float())
        beta = self.beta(x).float().sigmoid()
        if inputs.is_text is not None:  # padding neither enters the convolution nor changes the state
            qkv = qkv * inputs.is_text[..., None]
            log_decay, beta = log_decay * inputs.is_text, beta * inputs.is_text
        state, before = None, None
        if cache is not None:
            state = cache.get_recurrent_state(self.layer)  # before `update_conv_state`, which marks it as set
            before = cache.update_conv_state(qkv.flatten(2).transpose(1, 2), self.layer, conv_kernel_size=TAPS - 1)
        qkv = F.silu(self.convolution(qkv.flatten(2), before)).view(batch, time, self.heads, -1)
        q, k, v = qkv.split((self.key_width, self.key_width, qkv.shape[-1] - 2 * self.key_width), dim=-1)
        y, state = gated_delta(normalize(q) / self.key_width**0.5, normalize(k), v, log_decay, beta, state)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer)
            cache.update(x[:, None, :, :1], x[:, None, :, :0], self.layer)
        y = self.out_norm(y.to(x.dtype)) * F.silu(self.gate(x).view(batch, time, self.heads, -1))
        return self.out(y.flatten(2))


class ShortConvolution(nn.Module):
    """A causal convolution with TAPS taps per channel, in float32."""

    def __init__(self, channels):
        super().__init__()
        self.taps = nn.Parameter(TAPS**-0.5 * torch.randn(TAPS, channels))

    def forward(self, x, before):  # x (B, T, C); before (B, C, past and new positions), or None without a cache
        time = x.shape[1]
        x = x if before is None else before.transpose(1, 2)[:, -(time + TAPS - 1):]
        x = F.pad(x.float(), (0, 0, time + TAPS - 1 - x.shape[1], 0))
        return sum(self.taps[j].float() * x[:, j:j + time] for j in range(TAPS))


def normalize(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta(q, k, v, log_decay, beta, state):
    """Returns y (B, T, H, V) and the last state (B, H, K, V), in float32.

    q and k are (B, T, H, K), v is (B, T, H, V), log_decay and beta are (B, T, H); a state of None is zero. In a chunk,
    γ_i is the decay up to token i, and Γ_ij that from token j to token i. The rows u_i of what the chunk adds to the
    state solve (I + A)·U = β·(V − γ·K·S) with A_ij = β_i·Γ_ij·(k_i·k_j) for j < i (section 3.3 of the paper).
    """
    if state is None:
        state = v.new_zeros(len(q), q.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    outputs = []
    for part in zip(*(x.transpose(1, 2).float().split(CHUNK, dim=2) for x in (q, k, v, log_decay, beta))):
        q, k, v, log_decay, beta = part  # (B, H, C, …)
        length = q.shape[2]
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-1)
        # The sum over m of log_decay_m with j < m ≤ i. Differences of cumulative sums would be less exact.
        decays = (torch.where(later.T, 0.0, log_decay[..., None, :]) @ later.float()).exp().tril()
        kept = decays[..., :1] * log_decay[..., :1, None].exp()
        system = beta[..., None] * decays * (k @ k.transpose(-1, -2))
        u = torch.linalg.solve_triangular(
            system, beta[..., None] * (v - kept * (k @ state)), upper=False, unitriangular=True)
        outputs.append(kept * (q @ state) + (decays * (q @ k.transpose(-1, -2))) @ u)
        state = kept[..., -1:, :] * state + (decays[..., -1, :, None] * k).transpose(-1, -2) @ u
    return torch.cat(outputs, dim=2).transpose(1, 2), state
