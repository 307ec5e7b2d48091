"""The MLPs of smallgpt_jax in PyTorch: dense, gated, mixture of experts.

`width` is the width of an MLP's input and output. `inner` is the width of its inner layer, or of
the inner layer of one expert.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F


def relu2(x):
    return F.relu(x).square()


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu2": relu2,
}


class MLP(nn.Module):
    def __init__(self, config, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner, bias=config.use_bias)
        self.down = nn.Linear(inner, width, bias=config.use_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


class GatedMLP(MLP):
    """A gated MLP (arXiv 2002.05202)."""

    def __init__(self, config, width, inner):
        super().__init__(config, width, inner)
        self.gate = nn.Linear(width, inner, bias=config.use_bias)

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Router(nn.Linear):
    """Returns a factor for each of N tokens and E experts, (N, E); 0: the expert is not used.

    The biases balance the load of the experts. They affect the choice of experts, but not the
    factors (arXiv 2412.19437, section 2.1.2). Weights and biases stay in float32, because the
    differences between biases are too small for bfloat16.
    """

    def __init__(self, config, width):
        super().__init__(width, config.num_experts, dtype=torch.float32)
        self.experts_per_token, self.scale = config.experts_per_token, config.expert_scale

    def forward(self, x):  # (N, D)
        scores = F.linear(x.float(), self.weight).sigmoid()  # (N, E)
        chosen = (scores + self.bias).topk(self.experts_per_token).indices
        chosen_scores = scores.gather(1, chosen)  # without the bias
        gates = torch.zeros_like(scores).scatter(1, chosen, chosen_scores)
        # A single gate would become 1, and the router would have no gradient.
        if self.experts_per_token > 1:
            gates = gates / gates.sum(1, keepdim=True)
        return self.scale * gates

    def _apply(self, fn, recurse=True):  # called by `to`, `bfloat16` and the like
        # `fn` may move x to another device, which is done, or cast it, which is undone
        def keep_dtype(x):
            y = fn(x)
            return y if y.dtype == x.dtype else x.to(y.device)

        return super()._apply(keep_dtype, recurse)


class MixtureOfExperts(nn.Module):
    """The sum of shared experts and of those that the router chooses for each token."""

    def __init__(self, config, width, inner):
        super().__init__()
        experts = config.num_experts
        self.router = Router(config, width)
        self.activation = ACTIVATIONS[config.activation]
        self.is_gated = config.expert_mlp == "gated"
        if self.is_gated:
            self.gate = nn.Parameter(0.02 * torch.randn(experts, width, inner))
        self.up = nn.Parameter(0.02 * torch.randn(experts, width, inner))
        self.down = nn.Parameter(0.02 * torch.randn(experts, inner, width))
        self.shared = None
        if config.num_shared_experts:  # all shared experts are computed as one wide MLP
            self.shared = MLPS[config.expert_mlp](config, width, config.num_shared_experts * inner)

    def forward(self, x):  # (B, T, D)
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).to(x.dtype)
        y = torch.zeros_like(tokens)
        # expert by expert, because each has another number of tokens
        for e in range(len(self.up)):
            (chosen,) = gates[:, e].nonzero(as_tuple=True)  # the tokens that use this expert
            output = self.expert(e, tokens[chosen])
            y = y.index_add(0, chosen, gates[chosen, e, None] * output)
        y = y.view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def expert(self, e, x):
        h = x @ self.up[e]
        h = self.activation(x @ self.gate[e]) * h if self.is_gated else self.activation(h)
        return h @ self.down[e]


MLPS = {"dense": MLP, "gated": GatedMLP, "moe": MixtureOfExperts}
