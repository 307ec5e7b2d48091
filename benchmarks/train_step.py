"""Compares the training throughput of this project with that of PyTorch.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/train_step.py
    python benchmarks/train_step.py --architectures=gpt,pgpt --sizes=256 --rounds=10 --dtypes=float32,bfloat16
    python benchmarks/train_step.py --config=configs/gpt.py:quickstart --sizes=recipe --peer=none
    python benchmarks/train_step.py --ledger

--ledger measures gpt at the quickstart's size and at width 256, in float32 and bfloat16, on an idle
CPU, and appends machine, versions and ratios to docs/results/speed.jsonl, from which
`python docs/tables.py` fills docs/speed.md.

The peer is `transformers`' GPT-2 of the same sizes, with exact GELU and an untied head as our gpt,
but with biases. It runs with `torch.compile`, on a CPU also eagerly, with PyTorch's fused attention
(SDPA) and fused AdamW; in bfloat16, with autocast. Each peer runs in a process of its own, because
our commands change how their process allocates memory (smallgpt_jax/devices/host_memory.py), and is
stopped (SIGSTOP) while others run. A peer that takes longer than --peer_seconds is left out.

All models train on one device, with the same AdamW, gradient clipping and batch of random tokens.
They are timed in turn: in each round, each runs --steps steps without waiting between steps. The
benchmark fails if a loss does not fall.

Columns of the table:

- compile s: seconds for compilation and the first step; neither is part of a round
- tokens/s: median over rounds
- ours/PyTorch's: the model's tokens/s divided by those of the faster peer, median and range over
  rounds
- MFU, if the chip's peak is known
- of roofline: tokens/s relative to the estimate of `plan --topology=h100:1` for the compiled
  program, on GPUs that `plan` knows
- memory MB: for our models, the memory of the compiled program; for a peer, the peak allocation (on
  GPUs only)
- loss: first and last loss
"""

import contextlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import sys
import time
from importlib import metadata
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves GPU memory for PyTorch

import jax
import numpy as np
import speed_ledger
from absl import flags
from measuring import PAUSE, Training, require_known, table, table_row
from ml_collections import ConfigDict

from smallgpt_jax import cli, models
from smallgpt_jax.config.recipes import load_config
from smallgpt_jax.devices import chips, host_memory
from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.planning.gpus import find_gpu
from smallgpt_jax.planning.hlo import HloModule
from smallgpt_jax.planning.roofline import Roofline

CPU_SIZES = {  # --sizes → (blocks, heads, width of the model); the head width is 64
    "256": (8, 4, 256),
    "512": (8, 8, 512),
}
SIZES = (*CPU_SIZES, "recipe")
PEERS = {"PyTorch": False, "PyTorch, compiled": True}  # name → whether torch.compile is used
DTYPES = ("float32", "bfloat16")
PLAIN_GPT = dict(
    architecture="gpt",
    norm="layer",
    norm_position="pre",
    mlp="dense",
    activation="gelu",
    position="learned",
    num_kv_heads=0,
    qk_norm=False,
    attention_windows=(),
)
WARM_UP_STEPS = 2
# What --ledger measures: (recipe, size, batch size, steps per round).
LEDGER_SETTINGS = (("gpt:quickstart", "recipe", 8, 50), ("gpt", "256", 16, 5))

_CONFIG = cli.define_config()
_ARCHITECTURES = flags.DEFINE_list(
    "architectures",
    None,
    "Recipes in configs/ to measure if --config is not set. Default: gpt on a CPU, gpt and pgpt "
    "on accelerators.",
)
_SIZES = flags.DEFINE_list(
    "sizes",
    None,
    f"Sizes of the models. {', '.join(CPU_SIZES)}: 8 blocks of this width, context 256, vocabulary "
    "8,192. recipe: the sizes in the config. Default: recipe on accelerators, the other sizes on "
    "a CPU.",
)
_DTYPES = flags.DEFINE_list(
    "dtypes",
    None,
    f"Compute dtypes: {', '.join(DTYPES)}. Default: float32 with the sizes "
    f"{', '.join(CPU_SIZES)}, the config's dtype with --sizes=recipe.",
)
_PEER = flags.DEFINE_enum(
    "peer", "hf", ["hf", "none"], "The model to compare with: hf (transformers' GPT-2) or none."
)
_PEER_SECONDS = flags.DEFINE_float(
    "peer_seconds",
    900,
    "Seconds that a peer may take for its compilation, and for a round.",
    lower_bound=1,
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    None,
    "Sequences per step. Default: 32 with --sizes=recipe, 16 with the other sizes.",
    lower_bound=1,
)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps per round.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds.", lower_bound=1)
_LEDGER = flags.DEFINE_bool(
    "ledger", False, "Measure what docs/speed.md has, and append it to docs/results/speed.jsonl."
)


class Setting(NamedTuple):
    """Models of one size, and how many of their steps make a round."""

    configs: list[ConfigDict]
    steps: int


def recipes() -> list[ConfigDict]:
    if _CONFIG.value is not None:
        return [_CONFIG.value]
    names = _ARCHITECTURES.value or (["gpt"] if jax.default_backend() == "cpu" else ["gpt", "pgpt"])
    require_known("--architectures", names, models.ARCHITECTURES)
    return [importlib.import_module(f"configs.{name}").get_config() for name in names]


def resized(recipe: ConfigDict, size: str, dtype: str | None, batch_size: int | None) -> ConfigDict:
    """Returns a copy of the recipe for one device and a constant learning rate. `size` is one of
    SIZES.
    """
    config = recipe.copy_and_resolve_references()
    with config.unlocked():
        if size != "recipe":
            config.model.num_layers, config.model.num_heads, config.model.d_model = CPU_SIZES[size]
            config.model.vocab_size, config.model.context_length = 8192, 256
            config.model.dtype = "float32"
        config.model.dtype = dtype or config.model.dtype
        config.train.batch_size = batch_size or (32 if size == "recipe" else 16)
        config.train.microbatches = 1
        config.mesh.update(data=1, fsdp=1, tensor=1, path=1)
        config.optimizer.update(
            learning_rate=3e-4, final_learning_rate=3e-4, warmup_steps=0, decay_steps=1
        )
    return config


def as_gpt(config: ConfigDict) -> models.LanguageModel:
    """Returns a plain gpt with the config's sizes. The peer takes its sizes and its FLOPs per token
    from this gpt.
    """
    shared = {
        name: value for name, value in config.model.items() if name in models.field_names("gpt")
    }
    return models.build(**{**shared, **PLAIN_GPT})


class CompiledModel:
    def __init__(self, config: ConfigDict):
        self.training = Training(config)
        model = self.training.program.model
        self.parameters, self.flops_per_token = (
            models.num_parameters(model),
            train_flops_per_token(model),
        )
        started = time.perf_counter()
        self.first_loss = self.run(1)
        self.compile_seconds = self.training.compile_seconds + time.perf_counter() - started
        gpu = find_gpu(jax.devices()[0].device_kind)
        self.roofline_seconds = (
            gpu and Roofline(HloModule(self.training.compiled.as_text()), gpu, 1).clock().total
        )

    def run(self, steps: int) -> float:
        return float(self.training.run(steps)["loss"])

    def memory_bytes(self) -> int:
        """Returns those of the compiled program. The device's peak would include the programs that
        ran before.
        """
        plan = self.training.compiled.memory_analysis()
        return (
            plan.argument_size_in_bytes
            + plan.output_size_in_bytes
            - plan.alias_size_in_bytes
            + plan.temp_size_in_bytes
        )


class PeerProcess:
    """`Transformers` in a process of its own."""

    roofline_seconds = None

    def __init__(self, config: ConfigDict, tokens_BxT1, is_compiled: bool):
        context = multiprocessing.get_context("spawn")
        self.connection, connection = context.Pipe()
        arguments = (connection, config, tokens_BxT1, jax.default_backend() == "gpu", is_compiled)
        self.process = context.Process(target=serve_peer, args=arguments, daemon=True)
        self.process.start()
        connection.close()  # so that `receive` notices the end of the process
        self.parameters, self.flops_per_token, self.first_loss, self.compile_seconds = (
            self.receive()
        )
        self.stop()

    def stop(self) -> None:
        """Stops all threads of the process, so that none disturbs the others' rounds."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGSTOP)

    def proceed(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        # A stopped process would not end by SIGTERM, for which Python would wait at its end.
        self.process.kill()
        self.process.join()

    def receive(self):
        """Returns the peer's next answer. Raises TimeoutError after --peer_seconds."""
        if not self.connection.poll(_PEER_SECONDS.value):
            self.process.kill()
            raise TimeoutError
        try:
            return self.connection.recv()
        except EOFError:
            raise UserError(
                "the process of PyTorch has ended; the reason is in its output above"
            ) from None

    def run(self, steps: int) -> float:
        self.connection.send(steps)
        try:
            return self.receive()[0]
        finally:
            self.stop()

    def memory_bytes(self) -> int | None:
        self.proceed()
        self.connection.send(0)
        return self.receive()[1]


def serve_peer(
    connection, config: ConfigDict, tokens_BxT1, on_gpu: bool, is_compiled: bool
) -> None:
    """Runs the peer in its process. Sends size and first loss; then answers each number of steps to
    run with the last loss and the memory in use.
    """
    jax.config.update("jax_platforms", "cpu")  # JAX only counts the FLOPs here
    peer, loss = Transformers(config, tokens_BxT1, on_gpu, is_compiled), None
    connection.send((peer.parameters, peer.flops_per_token, peer.first_loss, peer.compile_seconds))
    with contextlib.suppress(EOFError):  # the benchmark has ended
        while True:
            if steps := connection.recv():
                loss = peer.run(steps)
            connection.send((loss, peer.memory_bytes()))


class Transformers:
    """`transformers`' GPT-2 and PyTorch's AdamW on one device."""

    def __init__(self, config: ConfigDict, tokens_BxT1, on_gpu: bool, is_compiled: bool):
        import torch
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain_gpt = as_gpt(config)
        c, self.torch, self.on_gpu = plain_gpt.config, torch, on_gpu
        device = "cuda" if self.on_gpu else "cpu"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        # For an attention with the name "sdpa", a compiled model builds a mask, and a mask rules
        # out the fastest kernel. Under a new name, the same attention gets no mask and uses its
        # argument is_causal.
        transformers.AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        torch.manual_seed(config.train.seed)
        model = (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=c.vocab_size,
                    n_positions=c.context_length,
                    n_embd=c.d_model,
                    n_layer=c.num_layers,
                    n_head=c.num_heads,
                    n_inner=c.mlp_width,
                    activation_function="gelu",
                    embd_pdrop=c.dropout,
                    resid_pdrop=c.dropout,
                    attn_pdrop=0.0,
                    use_cache=False,
                    tie_word_embeddings=c.tie_embeddings,
                    bos_token_id=None,
                    eos_token_id=None,
                    attn_implementation="sdpa_without_mask",
                )
            )
            .to(device)
            .train()
        )
        self.params = list(model.parameters())
        self.parameters = sum(p.numel() for p in self.params)
        self.flops_per_token = train_flops_per_token(plain_gpt)

        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.params if p.ndim > 1], "weight_decay": o.weight_decay},
                {"params": [p for p in self.params if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=o.learning_rate,
            betas=(o.beta1, o.beta2),
            fused=True,
        )
        self.clip_norm = o.clip_norm or math.inf
        tokens_BxT1 = torch.tensor(tokens_BxT1, dtype=torch.int64, device=device)
        inputs_BxT, targets_R = tokens_BxT1[:, :-1].contiguous(), tokens_BxT1[:, 1:].flatten()

        def loss():
            with torch.autocast(device, dtype=torch.bfloat16, enabled=c.dtype == "bfloat16"):
                logits_RxV = model(inputs_BxT).logits.flatten(0, 1)
                return torch.nn.functional.cross_entropy(logits_RxV, targets_R)

        self.loss = torch.compile(loss) if is_compiled else loss
        started = time.perf_counter()
        self.first_loss = self.run(1)
        self.compile_seconds = time.perf_counter() - started

    def run(self, steps: int) -> float:
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
    """Raises UserError if `transformers`' GPT-2 cannot be run with these configs on this machine.
    Compiles nothing.
    """
    # Not imported here, but in the processes of the peers: its threads could disturb ours.
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        raise UserError(
            f"PyTorch or transformers is not installed; run {install_command('bench')}, or use "
            "--peer=none"
        )
    backend = jax.default_backend()
    if backend != "cpu" and not (backend == "gpu" and _pytorch_finds_gpu()):
        raise UserError(
            f"PyTorch cannot use the {jax.devices()[0].device_kind}; run with --peer=none"
        )
    if backend == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError("torch.compile needs a C++ compiler; install g++, or run with --peer=none")
    if any(config.optimizer.name != "adamw" for config in configs):
        raise UserError(
            "config.optimizer.name: only adamw can be compared with PyTorch; change it, or run "
            "with --peer=none"
        )


def _peers() -> dict[str, bool]:
    if _PEER.value == "none":
        return {}
    # Models keep their memory while others run: on an H100, 25 GiB of ours and 37 of the eager peer
    # left too little for the compiled one.
    on_cpu = jax.default_backend() == "cpu"
    return {name: is_compiled for name, is_compiled in PEERS.items() if is_compiled or on_cpu}


def _pytorch_finds_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def measure(configs: list[ConfigDict], steps: int) -> list[dict]:
    """Returns one row of results per model and peer. The models have the same sizes."""
    c, batch = configs[0].model, configs[0].train.batch_size
    contenders = {config.model.architecture: CompiledModel(config) for config in configs}
    tokens_BxT1 = np.asarray(contenders[c.architecture].training.batch.tokens_BxT1)
    with contextlib.ExitStack() as peers:
        for name, is_compiled in _peers().items():
            with left_out(name, contenders):
                contenders[name] = PeerProcess(configs[0], tokens_BxT1, is_compiled)
                peers.callback(contenders[name].close)
        seconds, losses = time_in_turn(contenders, steps)
        memory_bytes = {name: contender.memory_bytes() for name, contender in contenders.items()}
    chip = chips.find_chip(jax.devices()[0].device_kind)
    best_peer = min(
        PEERS.keys() & contenders, key=lambda name: statistics.median(seconds[name]), default=None
    )
    rows = []
    for name, contender in contenders.items():
        if not losses[name] < contender.first_loss:  # also true for NaN
            raise UserError(
                f"{name}: the loss does not fall: {contender.first_loss} at the first step, "
                f"{losses[name]} at the last"
            )
        speeds = [steps * batch * c.context_length / s for s in seconds[name]]
        speed = statistics.median(speeds)
        roofline = (
            contender.roofline_seconds and batch * c.context_length / contender.roofline_seconds
        )
        ratios = (
            []
            if name in PEERS
            else [of_peer / own for of_peer, own in zip(seconds.get(best_peer, []), seconds[name])]
        )
        rows.append(
            {
                "model": name,
                "blocks": c.num_layers,
                "width": c.d_model,
                "batch": batch,
                "context": c.context_length,
                "vocabulary": c.vocab_size,
                "dtype": c.dtype,
                "parameters": contender.parameters,
                "compile_seconds": contender.compile_seconds,
                "tokens_per_second": speed,
                "tokens_per_second_of_rounds": speeds,
                "mfu": chip and speed * contender.flops_per_token / chip.flops,
                "roofline_tokens_per_second": roofline,
                "of_roofline": roofline and speed / roofline,
                "memory_bytes": memory_bytes[name],
                "best_peer": best_peer,
                "ratio": statistics.median(ratios) if ratios else None,
                "ratio_of_rounds": ratios,
                "first_loss": contender.first_loss,
                "last_loss": losses[name],
            }
        )
        print(table_row(cells(rows[-1])), file=sys.stderr, flush=True)
    return rows


def time_in_turn(contenders: dict, steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns {name: seconds of each round} and {name: last loss}. Removes peers that time out from
    `contenders`.
    """
    seconds, losses = {name: [] for name in contenders}, {}
    for round_ in range(_ROUNDS.value + 1):  # the first round is a warm-up
        for name, contender in list(contenders.items()):
            time.sleep(PAUSE)
            if name in PEERS:
                contender.proceed()
            started = time.perf_counter()
            with left_out(name, contenders):
                losses[name] = contender.run(steps if round_ else WARM_UP_STEPS)
            if round_:
                seconds[name].append(time.perf_counter() - started)
    return seconds, losses


@contextlib.contextmanager
def left_out(name: str, contenders: dict):
    """Inside the context, a peer that times out is removed from `contenders`."""
    try:
        yield
    except TimeoutError:
        contenders.pop(name, None)
        print(
            f"{name}: left out; not finished after {_PEER_SECONDS.value:.0f} s",
            file=sys.stderr,
            flush=True,
        )


HEAD = (
    "model",
    "width × blocks",
    "dtype",
    "parameters",
    "batch",
    "compile s",
    "tokens/s",
    "ours/PyTorch's (range)",
    "MFU",
    "of roofline",
    "memory MB",
    "loss",
)


def cells(row: dict) -> tuple:
    def known(key: str, text) -> str:
        return "–" if row[key] is None else text(row[key])

    rounds = row["ratio_of_rounds"]
    return (
        row["model"],
        f"{row['width']} × {row['blocks']}",
        row["dtype"],
        f"{row['parameters']:,}",
        f"{row['batch']} × {row['context']}",
        f"{row['compile_seconds']:.1f}",
        f"{row['tokens_per_second']:,.0f}",
        known("ratio", lambda ratio: f"{ratio:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"),
        known("mfu", "{:.1%}".format),
        known("of_roofline", "{:.2f}".format),
        known("memory_bytes", lambda size: f"{size / 1e6:,.0f}"),
        f"{row['first_loss']:.3f} → {row['last_loss']:.3f}",
    )


def chosen_settings() -> list[Setting]:
    sizes = _SIZES.value or (list(CPU_SIZES) if jax.default_backend() == "cpu" else ["recipe"])
    require_known("--sizes", sizes, SIZES)
    require_known("--dtypes", _DTYPES.value or (), DTYPES)
    settings = []
    for size in sizes:
        for dtype in _DTYPES.value or [None]:
            configs = [resized(recipe, size, dtype, _BATCH_SIZE.value) for recipe in recipes()]
            settings.append(Setting(configs, _STEPS.value))
    return settings


def ledger_settings() -> list[Setting]:
    """Returns the same settings on all machines; raises UserError where they make no sense."""
    if jax.default_backend() != "cpu":
        raise UserError("--ledger: has the speeds of CPUs; set JAX_PLATFORMS=cpu")
    names = ("config", "architectures", "sizes", "dtypes", "batch_size", "steps")
    if others := [name for name in names if flags.FLAGS[name].present]:
        raise UserError(f"--ledger: has settings of its own; leave out --{others[0]}")
    if not host_memory.keeps_freed_memory():
        raise UserError("--ledger: freed memory is not kept; unset MALLOC_* and GLIBC_TUNABLES")
    settings = []
    for recipe, size, batch_size, steps in LEDGER_SETTINGS:
        config = ConfigDict(load_config(recipe, None))
        for dtype in DTYPES:
            settings.append(Setting([resized(config, size, dtype, batch_size)], steps))
    return settings


def ledger_row(rows: list[dict]) -> dict:
    """Returns what the ledger keeps of a model and its peers."""
    row = next(row for row in rows if row["model"] not in PEERS)
    kept = ("blocks", "width", "batch", "context", "dtype", "tokens_per_second", "ratio")
    return {
        **{name: row[name] for name in kept},
        "ratio_range": [min(row["ratio_of_rounds"]), max(row["ratio_of_rounds"])],
        "peers": {
            peer["model"]: peer["tokens_per_second"] for peer in rows if peer["model"] in PEERS
        },
    }


def main() -> None:
    # With the cache, programs of earlier runs would not be compiled again, and the compilation
    # times would be wrong.
    jax.config.update("jax_enable_compilation_cache", False)
    settings = ledger_settings() if _LEDGER.value else chosen_settings()
    if _PEER.value != "none":
        check_peer(settings[0].configs)
    elif _LEDGER.value:
        raise UserError("--ledger: needs the peer; leave out --peer=none")
    libraries = ["jax", "flax"] + ([] if _PEER.value == "none" else ["torch", "transformers"])
    versions = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in libraries},
    }
    if _LEDGER.value:
        load, stolen = speed_ledger.require_idle(), speed_ledger.stolen_seconds()
        machine = speed_ledger.describe_machine()
    tables = [measure(setting.configs, setting.steps) for setting in settings]
    rows = [row for rows_of_setting in tables for row in rows_of_setting]
    print(table(HEAD, map(cells, rows)))
    if _LEDGER.value:
        stolen_at_end = speed_ledger.stolen_seconds()
        entry = {
            "machine": machine,
            "versions": versions,
            "load": load,
            "stolen_seconds": None if stolen is None else stolen_at_end - stolen,
            "rounds": _ROUNDS.value,
            "rows": list(map(ledger_row, tables)),
        }
        speed_ledger.append(entry)
    result = {
        "device": chips.device_name(jax.devices()[0]),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": versions,
        "steps": settings[0].steps,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    cli.run(main)
