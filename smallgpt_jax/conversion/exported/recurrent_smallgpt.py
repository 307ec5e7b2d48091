"""The mixers of smallgpt_jax with a state of constant size, in PyTorch: Gated DeltaNet (arXiv
2412.06464), Mamba-2 (arXiv 2405.21060) and the gated short convolution of LFM2 (arXiv 2511.23404).

The cache of layer `layer` has the states and the last inputs of the convolutions. It also has one
number per position, because transformers takes the length of the text from the first layer.

Shapes in comments: B batch size, T new positions, D width, H heads, K key width or state size, V
value width, C positions per chunk.
"""

import torch
from torch import nn
from torch.nn import functional as F

TAPS = 4  # of the convolutions of Gated DeltaNet and Mamba-2
CHUNK = 64  # positions per chunk


class GatedDeltaNet(nn.Module):
    """Per head, with a state S (K, V): S ← α·(I − β·k·kᵀ)·S + β·k·vᵀ and y = Sᵀ·q."""

    def __init__(self, config, layer, stage):
        super().__init__()
        width, self.heads, _, head_width = config.stage(stage)
        self.layer = layer
        self.key_width = config.delta_head_dim or head_width
        keys = self.heads * self.key_width
        values = keys * config.delta_value_ratio
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

    def forward(self, x, inputs, cache):  # x (B, T, D)
        batch, time, _ = x.shape
        by_head = (batch, time, self.heads, -1)
        state = old_state(cache, self.layer)
        # One convolution for all three: a layer of the cache has one array of past inputs.
        # The channels of the convolution are, head by head, its query, key and value.
        projections = [self.query(x), self.key(x), self.value(x)]
        qkv = torch.cat([projection.view(by_head) for projection in projections], -1)
        qkv = self.convolution(with_past(qkv.flatten(2), inputs.is_text, cache, self.layer))
        qkv = F.silu(qkv).view(by_head)
        value_width = qkv.shape[-1] - 2 * self.key_width
        q, k, v = qkv.split((self.key_width, self.key_width, value_width), dim=-1)
        q = normalize(q) / self.key_width**0.5
        k = normalize(k)
        # in float32, because a small error in a decay grows with the length of the text
        step = F.softplus(self.decay(x).float() + self.dt_bias.float())
        log_decay = -self.A_log.float().exp() * step
        beta = self.beta(x).float().sigmoid()
        if inputs.is_text is not None:  # padding neither decays the state nor adds to it
            log_decay = log_decay * inputs.is_text
            beta = beta * inputs.is_text
        y, state = gated_delta(q, k, v, log_decay, beta, state)
        save_state(state, x, cache, self.layer)
        y = self.out_norm(y.to(x.dtype)) * F.silu(self.gate(x).view(by_head))
        return self.out(y.flatten(2))


class Mamba2(nn.Module):
    """Per head, with a state h (K, V): h ← a·h + b·(Δ·v)ᵀ and y = hᵀ·c + D·v. Heads share b and c."""

    def __init__(self, config, layer, stage):
        super().__init__()
        width, self.heads, _, head_width = config.stage(stage)
        self.layer = layer
        values = self.heads * head_width * config.mamba_expand
        state = config.mamba_state
        self.value = nn.Linear(width, values, bias=config.use_bias)
        self.gate = nn.Linear(width, values, bias=config.use_bias)
        self.key = nn.Linear(width, state, bias=False)
        self.query = nn.Linear(width, state, bias=False)
        self.step = nn.Linear(width, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.convolution = ShortConvolution(values)
        self.key_query_convolution = ShortConvolution(2 * state)
        self.out_norm = nn.RMSNorm(values, eps=config.norm_epsilon)
        self.out = nn.Linear(values, width, bias=config.use_bias)

    def forward(self, x, inputs, cache):  # x (B, T, D)
        batch, time, _ = x.shape
        values = self.value.out_features
        state = old_state(cache, self.layer)
        vbc = torch.cat([self.value(x), self.key(x), self.query(x)], -1)
        vbc = with_past(vbc, inputs.is_text, cache, self.layer)
        v = F.silu(self.convolution(vbc[..., :values])).view(batch, time, self.heads, -1)
        bc = F.silu(self.key_query_convolution(vbc[..., values:]))
        b, c = bc[:, :, None].chunk(2, dim=-1)  # (B, T, 1, K), for all heads
        steps = F.softplus(self.step(x).float() + self.dt_bias.float())  # Δ, (B, T, H)
        if inputs.is_text is not None:  # padding neither decays the state nor adds to it
            steps = steps * inputs.is_text
        log_decay = -self.A_log.float().exp() * steps
        y, state = state_space(c, b, steps[..., None] * v, log_decay, state)
        save_state(state, x, cache, self.layer)
        y = (y + self.D.float()[:, None] * v).flatten(2)  # (B, T, H·V)
        y = y * F.silu(self.gate(x).float())
        return self.out(self.out_norm(y.to(x.dtype)))


class GatedConvolution(nn.Module):
    """y = W_out·(c ⊙ convolution(b ⊙ v)), where b, c and v are products of x with matrices."""

    def __init__(self, config, layer, stage):
        super().__init__()
        width, *_ = config.stage(stage)
        self.layer = layer
        self.num_taps = config.conv_taps
        self.value = nn.Linear(width, width, bias=config.use_bias)
        self.input_gate = nn.Linear(width, width, bias=config.use_bias)
        self.output_gate = nn.Linear(width, width, bias=config.use_bias)
        self.out = nn.Linear(width, width, bias=config.use_bias)
        self.convolution = ShortConvolution(width, self.num_taps)

    def forward(self, x, inputs, cache):  # x (B, T, D)
        v = self.input_gate(x) * self.value(x)
        v = with_past(v, inputs.is_text, cache, self.layer, self.num_taps)
        y = self.convolution(v).to(x.dtype)
        count_positions(x, cache, self.layer)
        return self.out(self.output_gate(x) * y)


class ShortConvolution(nn.Module):
    """A convolution with J taps per channel, in float32: (B, T + J − 1, C) → (B, T, C)."""

    def __init__(self, channels, num_taps=TAPS):
        super().__init__()
        self.taps = nn.Parameter(num_taps**-0.5 * torch.randn(num_taps, channels))

    def forward(self, x):
        time = x.shape[1] - len(self.taps) + 1
        # Tap j reads the position J − 1 − j before.
        return sum(taps.float() * x[:, j : j + time] for j, taps in enumerate(self.taps))


def with_past(x, is_text, cache, layer, num_taps=TAPS):
    """Returns (B, T + J − 1, C) float32: past and new inputs; 0 at padding and before the text."""
    length = x.shape[1] + num_taps - 1
    # before the cache, which would keep padding for the next call
    if is_text is not None:
        x = x * is_text
    if cache is not None:
        channels_first = x.transpose(1, 2)
        past_and_new = cache.update_conv_state(channels_first, layer, conv_kernel_size=num_taps - 1)
        x = past_and_new.transpose(1, 2)[:, -length:]
    return F.pad(x.float(), (0, 0, length - x.shape[1], 0))


def old_state(cache, layer):
    """Returns None for a new text. Call it before `with_past`, which marks the state as set."""
    return None if cache is None else cache.get_recurrent_state(layer)


def save_state(state, x, cache, layer):
    if cache is not None:
        cache.update_recurrent_state(state, layer)
        count_positions(x, cache, layer)


def count_positions(x, cache, layer):
    """transformers counts the positions of the keys: one number each, and no values."""
    if cache is not None:
        cache.update(x[:, None, :, :1], x[:, None, :, :0], layer)


def normalize(x):
    # 1e-6 as in training: a zero vector, such as padding, stays zero
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunks(*inputs):
    """Yields chunks (B, H, C, …) of inputs (B, T, H, …), in float32."""
    return zip(*(x.transpose(1, 2).float().split(CHUNK, dim=2) for x in inputs))


def decays_in_chunk(log_decay):
    """Returns the decays Γ_ij from token j to i, (B, H, C, C), and γ_i up to i, (B, H, C, 1)."""
    # log Γ_ij is the sum of log_decay_m over j < m ≤ i. Differences of cumulative sums would be
    # less exact.
    length = log_decay.shape[-1]
    # later_mj: whether token m follows token j
    later = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril(-1)
    # row i: log_decay_m for m ≤ i, and 0 for the later tokens
    up_to = torch.where(later.T, 0.0, log_decay[..., None, :])
    decays = (up_to @ later.float()).exp().tril()
    # Γ_i1 leaves out the decay of the first token itself.
    from_start = decays[..., :1] * log_decay[..., :1, None].exp()
    return decays, from_start


def finish_chunk(q, k, u, decays, kept, state):
    """Returns a chunk's outputs, and the state after it. Token i adds k_i·u_iᵀ to the state."""
    from_chunk = (decays * (q @ k.transpose(-1, -2))) @ u
    added = (decays[..., -1, :, None] * k).transpose(-1, -2) @ u
    return kept * (q @ state) + from_chunk, kept[..., -1:, :] * state + added


def gated_delta(q, k, v, log_decay, beta, state):
    """Returns y (B, T, H, V) and the last state (B, H, K, V), in float32.

    q and k are (B, T, H, K), v is (B, T, H, V), log_decay and beta are (B, T, H); a state of None
    is zero. The rows u_i of what a chunk adds to the state solve (I + A)·U = β·(V − γ·K·S) with
    A_ij = β_i·Γ_ij·(k_i·k_j) for j < i (section 3.3 of the paper).
    """
    if state is None:
        state = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    outputs = []
    for q_, k_, v_, log_decay_, beta_ in chunks(q, k, v, log_decay, beta):
        decays, kept = decays_in_chunk(log_decay_)
        # Only its entries below the diagonal are read: A. The diagonal counts as 1.
        system = beta_[..., None] * decays * (k_ @ k_.transpose(-1, -2))
        target = beta_[..., None] * (v_ - kept * (k_ @ state))
        u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        y, state = finish_chunk(q_, k_, u, decays, kept, state)
        outputs.append(y)
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def state_space(c, b, v, log_decay, state):
    """Returns y (B, T, H, V) and the last state (B, H, K, V); c and b are (B, T, 1, K)."""
    if state is None:
        state = v.new_zeros(len(v), v.shape[2], b.shape[-1], v.shape[-1], dtype=torch.float32)
    outputs = []
    for c_, b_, v_, log_decay_ in chunks(c, b, v, log_decay):
        decays, kept = decays_in_chunk(log_decay_)
        y, state = finish_chunk(c_, b_, v_, decays, kept, state)
        outputs.append(y)
    return torch.cat(outputs, dim=2).transpose(1, 2), state


RECURRENT = {"delta": GatedDeltaNet, "mamba": Mamba2, "conv": GatedConvolution}
