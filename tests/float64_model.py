"""The logits of every architecture by the formulas of the papers: NumPy in float64, one sequence
and head at a time.

Reads the training layout of the parameters, which models/block.py describes.
"""

import math

import jax
import numpy as np
from scipy.special import erf, softmax

ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.where(x > 0, x, 0) ** 2,
}


def plain_logits(config, params, tokens_T, model_state=None):
    """Returns the logits of one text, (T, V). `model_state` contains the biases of routers."""
    params = full_matrices(
        merge(jax.tree.map(np.float64, params), jax.tree.map(np.float64, model_state or {}))
    )
    x = params["token_embedding"][tokens_T]
    if config.smear:  # x_t + λ·σ(w·x_t)·x_(t−1)
        gates = params["smear"]["strength"] / (1 + np.exp(-x @ params["smear"]["gate"]))
        x = x + gates[:, None] * np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    if config.position == "learned":
        x = x + params["position_embedding"][: len(tokens_T)]
    trunk = params["trunk"]
    if config.architecture == "gpt":
        x = plain_blocks(config, trunk["blocks"], x, tokens_T)
    elif config.architecture == "pgpt":
        paths = []
        for p in range(config.num_paths):
            path = jax.tree.map(lambda w: w[p], trunk["paths"])
            h = x @ path["dense"]["kernel"] + path["dense"]["bias"]
            paths.append(plain_blocks(config, path["blocks"], h, tokens_T))
        weights = softmax(np.append(trunk.get("path_logits", []), 0.0))
        if config.path_weights == "equal":
            weights = np.full(config.num_paths, 1 / config.num_paths)
        x = sum(w * path for w, path in zip(weights, paths))
    else:
        for i in range(config.num_layers // config.blocks_per_stage):
            heads = config.num_heads // (2**i if config.stage_heads == "scaled" else 1)
            x = plain_blocks(
                config, trunk[f"stage_{i}"], x, tokens_T, heads, i * config.blocks_per_stage
            )
            if f"compress_{i}" in trunk:
                x = plain_compression(config, trunk[f"compress_{i}"], x)
    if config.norm_position == "pre" or getattr(config, "compress_last_stage", False):
        x = plain_norm(config, params["final_norm"], x)
    logits = x @ params["token_embedding" if config.tie_embeddings else "head"].T
    return (
        config.logit_softcap * np.tanh(logits / config.logit_softcap)
        if config.logit_softcap
        else logits
    )


def merge(tree, other):
    """Returns two trees of dicts as one."""
    return {
        name: merge(tree[name], other[name])
        if name in tree and name in other
        else {**other, **tree}[name]
        for name in {**tree, **other}
    }


def full_matrices(tree):
    """Returns the parameters with the product of two factors (PELA, arXiv 2310.10700) in place of
    the factors.
    """
    if not isinstance(tree, dict):
        return tree
    if "kernel_in" not in tree:
        return {name: full_matrices(x) for name, x in tree.items()}
    rest = {name: x for name, x in tree.items() if name not in ("kernel_in", "kernel_out")}
    return {**rest, "kernel": stacked_product(tree["kernel_in"], tree["kernel_out"])}


def stacked_product(first, second):
    """Returns the products of factors of shape (*stack, *inputs, r) and (*stack, r, *features).

    The axes of the stack are layers, or paths and layers.
    """
    stack = 2 if first.shape[:2] == second.shape[:2] and second.shape[2] == first.shape[-1] else 1
    products = [
        np.tensordot(a, b, axes=1)
        for a, b in zip(
            first.reshape(-1, *first.shape[stack:]), second.reshape(-1, *second.shape[stack:])
        )
    ]
    return np.reshape(products, (*first.shape[:stack], *products[0].shape))


def plain_compression(config, layer, x):
    """Returns the dense layer of LinearGPT, or the causal convolution of ConvGPT (arXiv 2404.14462,
    section 3.3).
    """
    kernels = layer["kernel"] if config.architecture == "cgpt" else [layer["kernel"]]
    y = np.tile(layer["bias"], (len(x), 1))
    for back, kernel in enumerate(reversed(list(kernels))):
        for t in range(back, len(x)):
            y[t] += x[t - back] @ kernel
    return y


def plain_layers(stack):
    """Returns the parameters of each block of a stack, from first to last."""
    if "mlp" in stack:
        length = len(jax.tree.leaves(stack["mlp"])[0])
        return [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(length)]
    parts = [plain_layers(stack[name]) for name in sorted(stack)]
    # Parts of equal length belong to a repeated sequence of blocks (a `Pattern`). The first part
    # contains the first block of every repetition, the second part the second block, and so on.
    if len({len(part) for part in parts}) == 1:
        return [part[i] for i in range(len(parts[0])) for part in parts]
    return [
        block for part in parts for block in part
    ]  # each part contains consecutive blocks with the same config


def plain_blocks(config, stack, x, tokens_T, num_heads=None, first=0):
    num_heads = num_heads or config.num_heads
    windows = config.attention_windows or (0,)
    depth = config.num_layers // getattr(config, "num_paths", 1)
    alpha = (2 * config.loops * depth) ** 0.25 if config.norm_position == "deepnorm" else 1
    x0 = x

    def add(name, x, f):
        """Returns the sum of x and f, with a norm and a Canon layer (arXiv 2512.17351: h +
        conv(h)).
        """
        h = plain_norm(config, block[f"{name}_norm"], x) if config.norm_position == "pre" else x
        if config.canon_taps:
            h = h + plain_short_convolution(block[f"{name}_canon"]["convolution"]["taps"], h)
        if config.norm_position == "pre":
            return x + f(h)
        return plain_norm(config, block[f"{name}_norm"], alpha * x + f(h))

    for number, block in [*enumerate(plain_layers(stack), start=first)] * config.loops:
        window = windows[number % len(windows)] or len(x)
        name = "attention" if "attention" in block else "mixer"
        s_mixer, s_mlp = block["residual_scales"] if config.residual_scales else (1, 1)
        if config.input_mix:
            x = block["input_mix"][0] * x + block["input_mix"][1] * x0

        def mixer(h):
            if name == "attention":
                table = (
                    config.value_embeddings
                    and config.value_embeddings[number % len(config.value_embeddings)]
                )
                assert bool(table) == ("value_embedding" in block["attention"])
                return s_mixer * plain_attention(
                    config, block["attention"], h, num_heads, window, tokens_T
                )
            (rule,) = (rule for name, rule in RECURRENT.items() if name in block["mixer"])
            return s_mixer * rule(config, block["mixer"], h)

        def mlp(h):
            return s_mlp * (plain_experts if config.mlp == "moe" else plain_mlp)(
                config, block["mlp"], h
            )

        x = add(name, x, (lambda h: mixer(h) + mlp(h)) if config.parallel_block else mixer)
        x = x if config.parallel_block else add("mlp", x, mlp)
    return x


def plain_attention(config, weights, h, num_heads, window, tokens_T):
    qkv, y = weights["qkv"]["kernel"], weights["out"].get("bias", 0)
    per_group = qkv.shape[2] - 2
    assert qkv.shape[1] * per_group == num_heads
    bias = weights["qkv"].get("bias", np.zeros(qkv.shape[1:]))
    for head in range(num_heads):
        group = head // per_group
        q, k, v = (
            h @ qkv[:, group, j] + bias[group, j]
            for j in (head % per_group, per_group, per_group + 1)
        )
        if "value_embedding" in weights:
            width = v.shape[1]
            v = v + weights["value_embedding"][tokens_T, group * width : (group + 1) * width]
        if config.qk_norm:
            q, k = (
                x
                / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + config.norm_epsilon)
                * weights[name]["scale"]
                for x, name in ((q, "q_norm"), (k, "k_norm"))
            )
        if config.position == "rope":
            q, k = plain_rope(q, config.rope_base), plain_rope(k, config.rope_base)
        scores = q @ k.T / math.sqrt(q.shape[1])
        for i, j in np.ndindex(scores.shape):
            if config.position == "alibi":
                scores[i, j] -= 2 ** (-8 * (head + 1) / num_heads) * abs(i - j)
            if (j > i and config.attention_mask == "causal") or abs(i - j) >= window:
                scores[i, j] = -np.inf
        o = softmax(scores, axis=1) @ v
        if config.attention_gate:  # arXiv 2505.06708, equation 5, with one gate per head
            o = o / (1 + np.exp(-h @ weights["gate"]["kernel"][:, [head]]))
        y = y + o @ weights["out"]["kernel"][head]
    return y


def plain_gated_deltanet(config, weights, h):
    """Returns the output of a Gated DeltaNet (arXiv 2412.06464, figure 1), one head at a time."""
    parts = [
        h @ flat(weights[name]["kernel"]) + weights[name].get("bias", np.zeros((1, 1))).reshape(-1)
        for name in ("query", "key", "value")
    ]
    heads, y = weights["A_log"].size, weights["out"].get("bias", 0)
    # One convolution has the channels of all heads: for each head, those of its query, its key and
    # its value.
    inputs = np.concatenate([part.reshape(len(h), heads, -1) for part in parts], axis=2)
    channels = plain_short_convolution(weights["convolution"]["taps"], inputs.reshape(len(h), -1))
    channels = ACTIVATIONS["silu"](channels).reshape(inputs.shape)
    key_width = weights["query"]["kernel"].shape[-1]
    for head in range(heads):
        q, k, v = np.split(channels[:, head], (key_width, 2 * key_width), axis=1)
        q, k = (x / np.sqrt(np.sum(x**2, axis=1, keepdims=True) + 1e-6) for x in (q, k))
        step = np.logaddexp(0, h @ weights["decay"]["kernel"][:, head] + weights["dt_bias"][head])
        alpha = np.exp(-np.exp(weights["A_log"][head]) * step)
        beta = 1 / (1 + np.exp(-h @ weights["beta"]["kernel"][:, head]))
        o = plain_gated_delta_rule(q / math.sqrt(key_width), k, v, alpha, beta)
        o = (
            o
            / np.sqrt(np.mean(o**2, axis=1, keepdims=True) + config.norm_epsilon)
            * weights["out_norm"]["scale"]
        )
        gate = (
            h @ weights["gate"]["kernel"][:, head]
            + weights["gate"].get("bias", np.zeros((heads, 1)))[head]
        )
        y = y + o * ACTIVATIONS["silu"](gate) @ weights["out"]["kernel"][head]
    return y


def plain_gated_delta_rule(q, k, v, alpha, beta, state=None):
    """Returns the outputs (T, V) of one head, token by token, in the words of arXiv 2412.06464.

    Equation 10: S_t = S_(t−1)·(α_t·(I − β_t·k_t·k_tᵀ)) + β_t·v_t·k_tᵀ, and o_t = S_t·q_t.
    """
    state, outputs = np.zeros((v.shape[1], k.shape[1])) if state is None else state, []
    for t in range(len(q)):
        erase = alpha[t] * (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t]))
        state = state @ erase + beta[t] * np.outer(v[t], k[t])
        outputs.append(state @ q[t])
    return np.array(outputs)


def plain_mamba2(config, weights, h):
    """Returns the output of a Mamba-2 (arXiv 2405.21060, figure 6), one head and token at a
    time.
    """
    heads, silu = weights["A_log"].size, ACTIVATIONS["silu"]
    x, z = (
        h @ flat(weights[name]["kernel"]) + weights[name].get("bias", np.zeros(1)).reshape(-1)
        for name in ("value", "gate")
    )
    x = silu(plain_short_convolution(weights["convolution"]["taps"], x)).reshape(len(h), heads, -1)
    b, c = np.split(
        silu(
            plain_short_convolution(
                weights["key_query_convolution"]["taps"],
                np.concatenate(
                    [h @ weights["key"]["kernel"], h @ weights["query"]["kernel"]], axis=1
                ),
            )
        ),
        2,
        axis=1,
    )
    y = np.zeros_like(x)
    for head in range(heads):
        steps = np.logaddexp(0, h @ weights["step"]["kernel"][:, head] + weights["dt_bias"][head])
        decays = np.exp(-np.exp(weights["A_log"][head]) * steps)
        y[:, head] = (
            plain_state_space(c, b, steps[:, None] * x[:, head], decays)
            + weights["D"][head] * x[:, head]
        )
    y = y.reshape(len(h), -1) * silu(z)
    y = (
        y
        / np.sqrt(np.mean(y**2, axis=1, keepdims=True) + config.norm_epsilon)
        * weights["out_norm"]["scale"]
    )
    return y @ weights["out"]["kernel"].reshape(y.shape[1], -1) + weights["out"].get("bias", 0)


def plain_gated_convolution(config, weights, h):
    """Returns C ⊙ conv(B ⊙ h̃) of the products B, C, h̃ of h, times a matrix (LFM2, arXiv
    2511.23404).
    """
    b, c, inner = (
        h @ weights[name]["kernel"] + weights[name].get("bias", 0)
        for name in ("input_gate", "output_gate", "value")
    )
    z = plain_short_convolution(weights["convolution"]["taps"], b * inner)
    return (c * z) @ weights["out"]["kernel"] + weights["out"].get("bias", 0)


# A parameter that only this mixer has → the mixer.
RECURRENT = {
    "beta": plain_gated_deltanet,
    "D": plain_mamba2,
    "output_gate": plain_gated_convolution,
}


def plain_state_space(c, b, v, decays):
    """Returns the outputs (T, P) of one head: h_t = a_t·h_(t−1) + b_t·v_tᵀ and y_t = c_tᵀ·h_t
    (equation 2).
    """
    state, outputs = np.zeros((b.shape[1], v.shape[1])), []
    for t in range(len(v)):
        state = decays[t] * state + np.outer(b[t], v[t])
        outputs.append(c[t] @ state)
    return np.array(outputs)


def plain_short_convolution(taps, x):
    """Returns y_t = Σ_j taps_j · x_(t − J + 1 + j) per channel, with 0 before the first
    position.
    """
    y = np.zeros_like(x)
    for t in range(len(x)):
        for back, tap in enumerate(reversed(list(taps))):
            if t >= back:
                y[t] += tap * x[t - back]
    return y


def flat(kernel):
    return kernel.reshape(len(kernel), -1)


def plain_rope(x_TxK, base):
    """Returns the rotary embedding of x. Each pair of entries is a complex number, multiplied by
    exp(i·t·θ).
    """
    half = x_TxK.shape[1] // 2
    points = x_TxK[:, :half] + 1j * x_TxK[:, half:]
    thetas = [base ** (-2 * i / x_TxK.shape[1]) for i in range(half)]
    points = points * np.exp(1j * np.outer(np.arange(len(x_TxK)), thetas))
    return np.concatenate([points.real, points.imag], axis=1)


def plain_mlp(config, weights, h):
    activation = ACTIVATIONS[config.activation]
    inner = {
        name: h @ layer["kernel"] + layer.get("bias", 0)
        for name, layer in weights.items()
        if name != "down"
    }
    inner = activation(inner["gate"]) * inner["up"] if "gate" in inner else activation(inner["up"])
    return inner @ weights["down"]["kernel"] + weights["down"].get("bias", 0)


def plain_experts(config, weights, h):
    """Returns DeepSeek-V3's mixture of experts, one token at a time (arXiv 2412.19437).

    The gates of several experts sum to 1 (equation 13). A single gate is the score itself: as a
    quotient, it would be the constant 1, and the router would learn nothing.
    """
    router, y = weights["router"], np.zeros_like(h)
    for t, u in enumerate(h):
        scores = 1 / (1 + np.exp(-u @ router["kernel"]))  # equation 15
        chosen = np.argsort(scores + router["bias"])[
            -config.experts_per_token :
        ]  # equation 16, for 14
        gates = scores[chosen] / (
            scores[chosen].sum() if config.experts_per_token > 1 else 1
        )  # equation 13
        for expert, gate in zip(chosen, gates):  # equation 12, as the next line
            matrices = {
                name: {"kernel": weights[name][expert]}
                for name in ("gate", "up", "down")
                if name in weights
            }
            y[t] += config.expert_scale * gate * plain_mlp(config, matrices, u)
    return y + plain_mlp(config, weights["shared"], h) if "shared" in weights else y


def plain_norm(config, norm, x):
    """Returns RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last axis."""
    if config.norm == "rms":
        return (
            x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + config.norm_epsilon) * norm["scale"]
        )
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt(x.var(axis=1, keepdims=True) + config.norm_epsilon) * norm[
        "scale"
    ] + norm.get("bias", 0)
