"""What a training step costs: this project's beside PyTorch's, in one run, in turns.

    pip install -e '.[bench]'
    python benchmarks/train_step.py
    python benchmarks/train_step.py --architectures=gpt,pgpt --sizes=256 --rounds=10
    python benchmarks/train_step.py --config=configs/gpt.py:quickstart --sizes=recipe --peer=none

Ours is the compiled step that `train` runs. The peer is `transformers`' GPT-2 of the same sizes, with
exact GELU and a head of its own, as our gpt has them; it also has biases. It takes the same AdamW step
with the same clipping, on a CPU eagerly, on a GPU with `torch.compile` and PyTorch's fused attention.
Both train on one device and one batch of random tokens, again and again: if the loss does not fall, that
is an error. A round is --steps steps without waiting in between, and the contenders take turns. Printed
are the median tokens/s over the rounds; their ratio to the peer's in the same round, median and range;
MFU where the chip's peak is known; memory, for ours what the compiled program plans, for PyTorch the most
it has allocated on a GPU (on a CPU it does not say); and the first and the last loss. Compiling counts in
no round: `compile s` is what it takes together with the first step. The last line of standard output is
the same as JSON.
"""

import importlib
import json
import math
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the GPU's memory
sys.path.insert(0, str(Path(__file__).parents[1]))  # recipes import configs/base.py

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from smallgpt_jax import cli, models, sharding
from smallgpt_jax.analysis import chips
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.data.packing import Rows
from smallgpt_jax.errors import UserError
from smallgpt_jax.program import build_program

CPU_SIZES = {  # blocks, heads of width 64, width
    "256": (8, 4, 256),
    "512": (8, 8, 512),
}
SIZES = (*CPU_SIZES, "recipe")
PEER = "transformers GPT-2"
WARM_UP_STEPS = 2

_CONFIG = cli.define_config()
_ARCHITECTURES = flags.DEFINE_list(
    "architectures", None, "Without --config: these recipes of configs/. Default: gpt, and unless on "
    "a CPU pgpt.")
_SIZES = flags.DEFINE_list(
    "sizes", None, f"{', '.join(CPU_SIZES)}: 8 blocks of that width, float32, context 256, vocabulary 8,192, "
    "whatever the config says of these. recipe: as the config says. Default: on a CPU all but recipe, "
    "else recipe.")
_PEER = flags.DEFINE_enum("peer", "hf", ["hf", "none"], "What is timed beside ours: transformers or nothing.")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Rows of a step. Default: 16, for the size recipe 32.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of a round.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds that are timed.", lower_bound=1)


def recipes() -> list[ConfigDict]:
    if _CONFIG.value is not None:
        return [_CONFIG.value]
    names = _ARCHITECTURES.value or (["gpt"] if jax.default_backend() == "cpu" else ["gpt", "pgpt"])
    if unknown := set(names) - set(models.ARCHITECTURES):
        raise UserError(f"--architectures={', '.join(unknown)}: choose from "
                        f"{', '.join(models.ARCHITECTURES)}")
    return [importlib.import_module(f"configs.{name}").get_config() for name in names]


def of_size(recipe: ConfigDict, size: str) -> ConfigDict:
    """The recipe at this size, its learning rate constant: training that is timed has no course."""
    config = recipe.copy_and_resolve_references()
    with config.unlocked():
        if size != "recipe":
            config.model.num_layers, config.model.num_heads, config.model.d_model = CPU_SIZES[size]
            config.model.vocab_size, config.model.context_length = 8192, 256
            config.model.dtype = "float32"
        config.train.batch_size = _BATCH_SIZE.value or (32 if size == "recipe" else 16)
        config.train.microbatches = 1
        config.mesh.update(data=1, fsdp=1, tensor=1, path=1)
        config.optimizer.update(learning_rate=3e-4, final_learning_rate=3e-4, warmup_steps=0, decay_steps=1)
    return config


def as_gpt(config: ConfigDict) -> models.LanguageModel:
    """The gpt of the same sizes, which is the model that the peer has."""
    shared = {name: value for name, value in config.model.items() if name in models.field_names("gpt")}
    return models.build(**{**shared, "architecture": "gpt"})


class Ours:
    """One of this project's models on one device, and the step that `train` compiles for it."""

    def __init__(self, config: ConfigDict, tokens_BxT1):
        program = build_program(config, jax.devices()[:1])
        self.parameters = models.num_parameters(program.model)
        self.flops_per_token = train_flops_per_token(program.model)
        self.state = program.initial_state()
        self.batch = Rows(jax.device_put(tokens_BxT1, sharding.batch_sharding(program.mesh)))
        started = time.perf_counter()
        self.step = program.compile_train_step()
        self.first_loss = self.run(1)
        self.compile_seconds = time.perf_counter() - started

    def run(self, steps: int) -> float:
        """Takes so many steps and waits for their end; the loss of the last one."""
        for _ in range(steps):
            self.state, values = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(values["loss"])

    def memory_bytes(self) -> int:
        """Of this program alone: the device's own peak would be that of all that ran so far."""
        plan = self.step.memory_analysis()
        return (plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
                + plan.temp_size_in_bytes)


class Transformers:
    """`transformers`' GPT-2 and PyTorch's AdamW on one device."""

    def __init__(self, config: ConfigDict, tokens_BxT1):
        import torch
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        c, self.torch, self.on_gpu = config.model, torch, jax.default_backend() == "gpu"
        device = "cuda" if self.on_gpu else "cpu"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        # "sdpa" by a name for which no mask is made: PyTorch is then told that the attention is causal.
        # A compiled model hands "sdpa" a mask, which rules out its fastest kernel.
        transformers.AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        torch.manual_seed(config.train.seed)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c.vocab_size, n_positions=c.context_length, n_embd=c.d_model, n_layer=c.num_layers,
            n_head=c.num_heads, n_inner=c.mlp_width, activation_function="gelu",
            embd_pdrop=c.dropout, resid_pdrop=c.dropout, attn_pdrop=0.0, use_cache=False,
            tie_word_embeddings=c.tie_embeddings, bos_token_id=None, eos_token_id=None,
            attn_implementation="sdpa_without_mask" if self.on_gpu else "eager")).to(device).train()
        self.params = list(model.parameters())
        self.parameters = sum(p.numel() for p in self.params)
        self.flops_per_token = train_flops_per_token(as_gpt(config))

        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for p in self.params if p.ndim > 1], "weight_decay": o.weight_decay},
             {"params": [p for p in self.params if p.ndim == 1], "weight_decay": 0.0}],
            lr=o.learning_rate, betas=(o.beta1, o.beta2), fused=True)
        self.clip_norm = o.clip_norm or math.inf
        tokens_BxT1 = torch.tensor(tokens_BxT1, dtype=torch.int64, device=device)
        inputs_BxT, targets_R = tokens_BxT1[:, :-1].contiguous(), tokens_BxT1[:, 1:].flatten()

        def loss():
            with torch.autocast(device, dtype=torch.bfloat16, enabled=c.dtype == "bfloat16"):
                logits_RxV = model(inputs_BxT).logits.flatten(0, 1)
                return torch.nn.functional.cross_entropy(logits_RxV, targets_R)

        self.loss = torch.compile(loss) if self.on_gpu else loss
        started = time.perf_counter()
        self.first_loss = self.run(1)
        self.compile_seconds = time.perf_counter() - started

    def run(self, steps: int) -> float:
        """Takes so many steps and waits for their end; the loss of the last one."""
        for _ in range(steps):
            loss = self.loss()
            loss.backward()
            self.torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.on_gpu:
            self.torch.cuda.synchronize()
        return loss.item()

    def memory_bytes(self) -> int | None:
        return self.torch.cuda.max_memory_allocated() if self.on_gpu else None


def check_peer(configs: list[ConfigDict]) -> None:
    """Raises UserError, before anything is compiled, if there is nothing to compare with."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError:
        raise UserError("PyTorch or transformers is missing: pip install -e '.[bench]', or run with "
                        "--peer=none") from None
    backend = jax.default_backend()
    if backend != "cpu" and not (backend == "gpu" and torch.cuda.is_available()):
        raise UserError(f"PyTorch cannot use the {jax.devices()[0].device_kind} here: run with --peer=none")
    if any(config.optimizer.name != "adamw" for config in configs):
        raise UserError("PyTorch takes AdamW steps: --config.optimizer.name=adamw, or run with --peer=none")


def measure(configs: list[ConfigDict]) -> list[dict]:
    """A row for each config's model and, if there is one, the peer's; they have the same sizes."""
    c, batch = configs[0].model, configs[0].train.batch_size
    tokens_BxT1 = np.random.default_rng(0).integers(
        0, c.vocab_size, (batch, c.context_length + 1), dtype=np.int32)
    contenders = {config.model.architecture: Ours(config, tokens_BxT1) for config in configs}
    if _PEER.value != "none":
        contenders[PEER] = Transformers(configs[0], tokens_BxT1)
    seconds, losses = {name: [] for name in contenders}, {}
    for round_ in range(_ROUNDS.value + 1):  # the first one warms up
        for name, contender in contenders.items():
            time.sleep(0.3)  # PyTorch's idle threads keep spinning for a while
            started = time.perf_counter()
            losses[name] = contender.run(_STEPS.value if round_ else WARM_UP_STEPS)
            if round_:
                seconds[name].append(time.perf_counter() - started)
    here, rows = chips.chip(jax.devices()[0].device_kind), []
    for name, contender in contenders.items():
        if not losses[name] < contender.first_loss:  # NaN is not, either
            raise UserError(f"{name} does not train: loss {contender.first_loss} → {losses[name]}")
        speeds = [_STEPS.value * batch * c.context_length / s for s in seconds[name]]
        speed = statistics.median(speeds)
        ratios = [theirs / ours for theirs, ours in zip(seconds.get(PEER, []), seconds[name])]
        rows.append({
            "model": name, "blocks": c.num_layers, "width": c.d_model, "batch": batch,
            "context": c.context_length, "vocabulary": c.vocab_size, "dtype": c.dtype,
            "parameters": contender.parameters, "compile_seconds": contender.compile_seconds,
            "tokens_per_second": speed, "tokens_per_second_of_rounds": speeds,
            "mfu": speed * contender.flops_per_token / here.flops if here else None,
            "memory_bytes": contender.memory_bytes(),
            "ratio": statistics.median(ratios) if ratios and name != PEER else None,
            "ratio_of_rounds": ratios if name != PEER else [],
            "first_loss": contender.first_loss, "last_loss": losses[name]})
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def line(row: dict) -> str:
    def shown(key: str, text) -> str:
        return "–" if row[key] is None else text(row[key])

    ratio = shown("ratio", lambda ratio: f"{ratio:.2f} ({min(row['ratio_of_rounds']):.2f} to "
                                         f"{max(row['ratio_of_rounds']):.2f})")
    return (f"| {row['model']} | {row['width']} × {row['blocks']} | {row['parameters']:,} "
            f"| {row['batch']} × {row['context']} | {row['compile_seconds']:.1f} "
            f"| {row['tokens_per_second']:,.0f} | {ratio} | {shown('mfu', '{:.1%}'.format)} "
            f"| {shown('memory_bytes', lambda size: f'{size / 1e6:,.0f}')} "
            f"| {row['first_loss']:.3f} → {row['last_loss']:.3f} |")


def table(rows: list[dict]) -> str:
    head = ("| model | width × blocks | parameters | batch | compile s | tokens/s | ours/PyTorch's (range) "
            "| MFU | memory MB | loss |\n|---|---|---|---|---|---|---|---|---|---|")
    return "\n".join([head, *map(line, rows)])


def hardware() -> dict:
    """What it ran on, in words."""
    return {"device": chips.name(jax.devices()[0]), "cores": os.cpu_count(), "machine": platform.machine()}


def versions() -> dict:
    names = ["jax", "flax"] + ([] if _PEER.value == "none" else ["torch", "transformers"])
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def main() -> None:
    # The seconds of compiling are to be those of the first time.
    jax.config.update("jax_enable_compilation_cache", False)
    sizes = _SIZES.value or (list(CPU_SIZES) if jax.default_backend() == "cpu" else ["recipe"])
    if unknown := set(sizes) - set(SIZES):
        raise UserError(f"--sizes={', '.join(unknown)}: choose from {', '.join(SIZES)}")
    configs_of_sizes = [[of_size(recipe, size) for recipe in recipes()] for size in sizes]
    if _PEER.value != "none":
        check_peer(configs_of_sizes[0])
    rows = [row for configs in configs_of_sizes for row in measure(configs)]
    print(table(rows))
    print(json.dumps({**hardware(), "versions": versions(), "steps": _STEPS.value, "rows": rows}))


if __name__ == "__main__":
    cli.run(main)
