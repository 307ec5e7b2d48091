"""Compares the decoding speed of this project with llama.cpp's, on a CPU, at batch size 1.

    pip install -c constraints.txt -e '.[llama-cpp]'
    python benchmarks/llama_cpp.py

The model is configs/llama.py of the given --size, with random float32 weights. It is exported with
`convert --to=gguf`, and llama.cpp runs the file. All programs use the first --threads cores of the
machine. For each length of the prompt, they take turns, and each number is the median of --repeats
timings:

- prefill: milliseconds for the prompt and the first new token
- decode: speed of the following --new_tokens − 1 greedy steps, in tokens/s
- ratio: decoding speed divided by that of llama.cpp with its defaults
- same tokens: whether the program generates the same tokens as this project

"llama.cpp" has its defaults, a float16 cache and flash attention. "llama.cpp, float32" computes as
this project does. Its server measures the times itself, without those of the requests. The wheels
of xllamacpp run on many CPUs; llama.cpp may be faster if it is built for the machine (`system` in
the JSON names the instructions that are used). Run this benchmark on an idle machine: llama.cpp's
threads wait for each other, so it slows down more than this project does.
"""

import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path

import jax
import numpy as np
from absl import flags
from measuring import PAUSE, generate, in_turn, table, table_row

from configs import llama
from smallgpt_jax import cli, models
from smallgpt_jax.conversion import gguf_export
from smallgpt_jax.data.special_tokens import END_OF_TEXT
from smallgpt_jax.data.tokenizers import gpt2_bytes
from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.inference import TrainedModel, layout

_SIZE = flags.DEFINE_enum(
    "size", "paper", ["paper", "quickstart", "tiny"], "Size of configs/llama.py."
)
_PROMPTS = flags.DEFINE_list("prompts", ["96", "900"], "Lengths of the prompts, in tokens.")
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 64, "Tokens to generate per timing.", lower_bound=2
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timings per program and prompt.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 2, "Cores that each program uses.", lower_bound=1)


class NumberedTokens:
    """A tokenizer in GPT-2's format in which all tokens but those of bytes have numbers as their
    names.
    """

    kind = "gpt2"

    def __init__(self, vocab_size: int):
        self.vocab_size, self.end_of_text = vocab_size, vocab_size - 1
        self.begin_of_text = self.end_of_text

    def files(self) -> dict[str, bytes]:
        names = [*gpt2_bytes(), *map(str, range(1000, 1000 + self.vocab_size - 257)), END_OF_TEXT]
        return {
            "vocab.json": json.dumps({name: i for i, name in enumerate(names)}).encode(),
            "merges.txt": b"1 0",
        }


class Ours:
    def __init__(self, model: models.LanguageModel, params):
        self.model, self.weights = model, layout.pack(model, params)

    def run(self, prompt: list[int], new_tokens: int):
        """Returns (seconds for the first token, seconds for the others, tokens without those of the
        last call).
        """
        found = generate(self.model, self.weights, [prompt], new_tokens)
        return found.prefill_seconds, found.decode_seconds, found.session.ids[0][len(prompt) :]


class LlamaCpp:
    def __init__(self, path: Path, context: int, is_float32: bool):
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path, settings.n_ctx, settings.n_parallel = str(path), context, 1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = _THREADS.value
        settings.verbosity = 0
        if is_float32:
            settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            settings.flash_attn_type = (
                xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
        self._server = xllamacpp.Server(settings)

    def run(self, prompt: list[int], new_tokens: int):
        """Returns the same as `Ours.run`, with all tokens. The time of the first token is part of
        `prompt_ms`.
        """
        content = dict(
            prompt=prompt,
            n_predict=new_tokens,
            temperature=0,
            ignore_eos=True,
            cache_prompt=False,
            return_tokens=True,
        )
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        return (
            found["timings"]["prompt_ms"] / 1000,
            found["timings"]["predicted_ms"] / 1000,
            found["tokens"],
        )


def random_model(context: int):
    """Returns the model and its parameters. The end-of-text token is never the most likely one."""
    fields = llama.get_config(_SIZE.value).model
    model = models.build(
        **{
            **fields,
            "vocab_size": fields.vocab_size or 512,
            "context_length": context,
            "dtype": "float32",
            "dropout": 0.0,
        }
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: jax.device_put(
            1 + np.zeros(p.shape, np.float32)
            if p.name == "scale"
            else 0.1 * rng.standard_normal(p.shape, np.float32)
        ),
        models.abstract_params(model),
    )
    return model, {**params, "head": params["head"].at[-1].set(0.0)}


def measure(programs: dict, lengths: list[int], vocab_size: int) -> list[dict]:
    rows = []
    for length in lengths:
        prompt = np.random.default_rng(length).integers(0, vocab_size - 1, length).tolist()
        timings = in_turn(
            {
                name: functools.partial(program.run, prompt, _NEW_TOKENS.value)
                for name, program in programs.items()
            },
            _REPEATS.value,
            PAUSE,
        )
        speeds = {
            name: (_NEW_TOKENS.value - 1)
            / statistics.median(seconds for _, seconds, _ in timings[name])
            for name in programs
        }
        ours = timings["smallgpt_jax"][-1][2]
        for name in programs:
            rows.append(
                {
                    "program": name,
                    "prompt": length,
                    "prefill_ms": 1000
                    * statistics.median(prefill for prefill, _, _ in timings[name]),
                    "decode_tokens_per_second": speeds[name],
                    "ratio": speeds[name] / speeds["llama.cpp"],
                    "same_tokens": timings[name][-1][2][: len(ours)] == ours,
                }
            )
            print(table_row(cells(rows[-1])), file=sys.stderr, flush=True)
    return rows


def cells(row: dict) -> tuple:
    return (
        row["program"],
        row["prompt"],
        f"{row['prefill_ms']:,.1f}",
        f"{row['decode_tokens_per_second']:,.1f}",
        f"{row['ratio']:.2f}",
        "yes" if row["same_tokens"] else "no",
    )


def main() -> None:
    try:
        import gguf  # noqa: F401
        import xllamacpp
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed; run {install_command('llama-cpp')}"
        ) from None
    if hasattr(os, "sched_setaffinity"):  # before JAX starts its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _THREADS.value])
    lengths = list(map(int, _PROMPTS.value))
    context = max(lengths) + _NEW_TOKENS.value
    model, params = random_model(context)
    vocab_size = model.config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        gguf_export.write(
            path, "random", TrainedModel(model, params, {}, NumberedTokens(vocab_size), 0)
        )
        rows = measure(
            {
                "smallgpt_jax": Ours(model, params),
                "llama.cpp": LlamaCpp(path, context, False),
                "llama.cpp, float32": LlamaCpp(path, context, True),
            },
            lengths,
            vocab_size,
        )
    print(
        table(
            ["program", "prompt", "prefill ms", "decode tokens/s", "ratio", "same tokens"],
            map(cells, rows),
        )
    )
    print(
        json.dumps(
            {
                "size": _SIZE.value,
                "parameters": models.num_parameters(model),
                "threads": _THREADS.value,
                "new_tokens": _NEW_TOKENS.value,
                "machine": platform.processor() or platform.machine(),
                "jax": jax.__version__,
                "xllamacpp": xllamacpp.__version__,
                "system": xllamacpp.get_system_info(),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    cli.run(main)
