"""Measures prefill, decoding speed and memory of the four architectures at one size.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/inference.py --output=docs/inference

The models are gpt, pgpt (once with all paths, once with one path), lgpt, cgpt, and `transformers`'
GPT-2 with its key-value cache. All have the same numbers of layers and heads and the same width.
For each batch size and context length, the table has these columns:

- prefill: milliseconds for the prompt and the first new token. The prompt is --new_tokens shorter
  than the context.
- decode: speed of greedy decoding at the end of the context, in tokens/s; timed by the code that
  `compare` uses
- weights and cache: size in MB. For this project's models, the whole allocated cache is counted.
  For transformers, only its filled part is counted.
- bandwidth: the share of the machine's memory bandwidth that decoding uses to read weights and
  cache. The memory bandwidth is measured by summing a 1 GiB array.

Weights are random, which does not affect speed. The models are timed in turn, and each number is
the median of --repeats timings.

Writes OUTPUT.md (the table), OUTPUT-latency.png and OUTPUT-memory.png.
"""

import functools
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import measuring
from absl import flags

from smallgpt_jax import cli, models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import layout
from smallgpt_jax.models.pgpt import with_paths

SIZES = {  # --size → (layers, heads, width, vocabulary)
    "10M": (8, 8, 256, 8192),
    "124M": (12, 12, 768, 50_304),
}

_SIZE = flags.DEFINE_enum(
    "size", "10M", list(SIZES), "Layers, heads, width and vocabulary of all models."
)
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "32"], "Batch sizes.")
_CONTEXTS = flags.DEFINE_list(
    "contexts",
    ["128", "512", "1024"],
    "Context lengths; a context consists of the prompt and the new tokens.",
)
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 32, "Tokens to generate per timing.", lower_bound=2
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Timings per model, batch size and context length.", lower_bound=1
)
_ONLY = flags.DEFINE_list("only", None, "Names of the models to measure. Default: all.")
_OUTPUT = flags.DEFINE_string(
    "output", None, "Path prefix of the table and the plots. Default: no files."
)


STAGES = {"blocks_per_stage": 2, "compress_last_stage": True, "stage_heads": "fixed"}
FIELDS = {
    "gpt": {},
    "pgpt": {"num_paths": 2, "path_weights": "learned"},
    "lgpt": STAGES,
    "cgpt": STAGES | {"conv_kernel": 3},
}


def build_model(architecture: str, context: int) -> models.LanguageModel:
    layers, heads, width, vocabulary = SIZES[_SIZE.value]
    if architecture in ("lgpt", "cgpt"):
        heads = min(heads, width // 2 ** (layers // 2 - 1))
    return models.build(
        architecture=architecture,
        num_layers=layers,
        num_heads=heads,
        d_model=width,
        mlp_ratio=4,
        vocab_size=vocabulary,
        context_length=context,
        dropout=0.0,
        use_bias=False,
        tie_embeddings=False,
        dtype="float32",
        scan_layers=True,
        **FIELDS[architecture],
    )


class DecodingModel:
    def __init__(self, architecture: str, context: int, paths=None):
        model = build_model(architecture, context)
        params = measuring.random_params(model)
        if paths is not None:
            config, params, _ = with_paths(model.config, params, {}, paths)
            model = models.LanguageModel(config)
        self.model, self.weights = model, layout.pack(model, params)
        self.weight_bytes = layout.num_bytes(self.weights)
        # The embeddings are not counted, because a decoding step reads only one row of each per
        # sequence.
        self.read_bytes = self.weight_bytes - sum(
            self.weights["params"][name].nbytes
            for name in ("token_embedding", "position_embedding")
        )

    def run(self, prompts_BxT, new_tokens: int):
        """Generates tokens. Returns (seconds for the first, seconds for the others, bytes of the
        cache).
        """
        found = measuring.generate(self.model, self.weights, prompts_BxT.tolist(), new_tokens)
        return found.prefill_seconds, found.decode_seconds, found.session.cache_bytes()


class Transformers:
    """`transformers`' GPT-2 with its key-value cache, in eager PyTorch."""

    def __init__(self, context: int):
        import torch
        import transformers

        layers, heads, width, vocabulary = SIZES[_SIZE.value]
        if jax.default_backend() != "cpu":
            raise UserError(
                "transformers GPT-2 is measured only on a CPU; set JAX_PLATFORMS=cpu, or set "
                "--only to a list of other models"
            )
        self.torch = torch
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=vocabulary,
                n_positions=context,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
            )
        ).eval()
        self.weight_bytes = sum(x.numel() * 4 for x in self.model.parameters())
        # The token embedding is counted, because it is also the weight of the head. The position
        # embedding is not.
        self.read_bytes = self.weight_bytes - 4 * width * context

    def run(self, prompts_BxT, new_tokens: int):
        with self.torch.inference_mode():
            tokens = self.torch.tensor(prompts_BxT)
            started = time.perf_counter()
            result = self.model(tokens, use_cache=True, logits_to_keep=1)
            sampled = result.logits[:, -1].argmax(-1, keepdim=True)
            prefilled = time.perf_counter()
            for _ in range(new_tokens - 1):
                result = self.model(sampled, past_key_values=result.past_key_values, use_cache=True)
                sampled = result.logits[:, -1].argmax(-1, keepdim=True)
            seconds = time.perf_counter() - prefilled
        batch, length = prompts_BxT.shape
        c = self.model.config
        return (
            prefilled - started,
            seconds,
            2 * 4 * c.n_layer * c.n_embd * batch * (length + new_tokens - 1),
        )


MODELS = {
    **{name: functools.partial(DecodingModel, name) for name in FIELDS},
    "pgpt (one path)": functools.partial(DecodingModel, "pgpt", paths=[0]),
    "transformers GPT-2": Transformers,
}


def memory_bandwidth() -> float:
    """Returns the memory bandwidth in bytes per second. It sums a 1 GiB array several times; the
    fastest sum counts.
    """
    x = jnp.ones(2**28, jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    return x.nbytes / min(measuring.seconds_of(lambda: total(x)) for _ in range(5))


def measure() -> list[dict]:
    names = _ONLY.value or list(MODELS)
    measuring.require_known("--only", names, list(MODELS))
    if min(map(int, _CONTEXTS.value)) <= _NEW_TOKENS.value:
        raise UserError(f"--contexts: each must be longer than --new_tokens={_NEW_TOKENS.value}")
    peak, rows = memory_bandwidth(), []
    for context in map(int, _CONTEXTS.value):
        compared = {name: MODELS[name](context) for name in names}
        for batch in map(int, _BATCHES.value):
            prompts_BxT = measuring.random_tokens(
                batch, context - _NEW_TOKENS.value, SIZES[_SIZE.value][3]
            )
            timings = measuring.in_turn(
                {
                    name: functools.partial(model.run, prompts_BxT, _NEW_TOKENS.value)
                    for name, model in compared.items()
                },
                _REPEATS.value,
                measuring.PAUSE,
            )
            for name, model in compared.items():
                prefills, decodes, (cache_bytes, *_) = zip(*timings[name])
                steps_per_second = (_NEW_TOKENS.value - 1) / statistics.median(decodes)
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "context": context,
                        "prefill_ms": 1000 * statistics.median(prefills),
                        "decode_tokens_per_second": batch * steps_per_second,
                        "weight_bytes": model.weight_bytes,
                        "cache_bytes": cache_bytes,
                        "bandwidth_share": (model.read_bytes + cache_bytes)
                        * steps_per_second
                        / peak,
                    }
                )
                print(measuring.table_row(cells(rows[-1])), file=sys.stderr, flush=True)
    return rows


def cells(row: dict) -> tuple:
    return (
        row["model"],
        row["batch"],
        row["context"],
        f"{row['prefill_ms']:,.1f}",
        f"{row['decode_tokens_per_second']:,.0f}",
        f"{row['weight_bytes'] / 1e6:,.1f}",
        f"{row['cache_bytes'] / 1e6:,.1f}",
        f"{row['bandwidth_share']:.0%}",
    )


def plot(rows: list[dict], path: Path, label: str, value) -> None:
    """Saves a plot of `value(row)` of each model against the context length, with one panel per
    batch size.
    """
    from matplotlib.figure import Figure

    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(4 * len(batches), 3.6))
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for panel, batch in zip(panels, batches):
        for name in dict.fromkeys(row["model"] for row in rows):
            points = [row for row in rows if (row["model"], row["batch"]) == (name, batch)]
            panel.plot(
                [row["context"] for row in points], [value(row) for row in points], "o-", label=name
            )
        panel.set(title=f"batch {batch}", xlabel="context", ylabel=label)
        panel.set_xticks(sorted({row["context"] for row in rows}))
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    rows = measure()
    results = measuring.table(
        [
            "model",
            "batch",
            "context",
            "prefill ms",
            "decode tokens/s",
            "weights MB",
            "cache MB",
            "bandwidth",
        ],
        map(cells, rows),
    )
    print(results)
    if _OUTPUT.value:
        output = Path(_OUTPUT.value)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_name(output.name + ".md").write_text(results + "\n")
        plot(
            rows,
            output.with_name(output.name + "-latency.png"),
            "ms per decoding step",
            lambda row: 1000 * row["batch"] / row["decode_tokens_per_second"],
        )
        plot(
            rows,
            output.with_name(output.name + "-memory.png"),
            "weights + cache, MB",
            lambda row: (row["weight_bytes"] + row["cache_bytes"]) / 1e6,
        )
    print(
        json.dumps(
            {
                "size": _SIZE.value,
                "device": jax.devices()[0].device_kind,
                "machine": platform.processor() or platform.machine(),
                "jax": jax.__version__,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    cli.run(main)
