"""Checks of values that are wrong only together: of config groups, mesh, text and processes."""

from pathlib import Path

import jax

from smallgpt_jax import models
from smallgpt_jax.data.config import DataConfig, is_synthetic
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.devices import distributed, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.optim.learning_rate import SCHEDULES, learning_rate_schedule
from smallgpt_jax.run.config import Config, TrainConfig
from smallgpt_jax.run.provenance import package_versions, source_digest
from smallgpt_jax.run.trackers import TRACKERS


def require_32_bits() -> None:
    if jax.config.jax_enable_x64:
        raise UserError(
            "JAX_ENABLE_X64: training needs JAX's 32-bit numbers; unset it, or call "
            'jax.config.update("jax_enable_x64", False)'
        )


def check_processes(workdir: Path) -> None:
    """Raises UserError if processes differ in workdir, devices or software (collective)."""
    if distributed.is_single_process():
        return
    # Processes that differ in these would run other programs, and hang in the first collective.
    distributed.require_equal("--workdir", str(workdir))
    distributed.require_equal("the number of its devices", f"{jax.local_device_count()}")
    for package, version in package_versions().items():
        distributed.require_equal(f"the version of {package}", version)
    distributed.require_equal("the source code of smallgpt_jax", source_digest())


def check_config(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError for values of one group that do not fit another group or the mesh."""
    train, model = config.train, config.model
    batch_shards, path_shards = sharding.num_batch_shards(mesh), mesh.shape["path"]
    train.validate_choice("tracker", ("", *TRACKERS))
    learning_rate_schedule(config.optimizer)  # raises for an invalid schedule
    if train.objective != "causal" and is_synthetic(config.data):
        train.refuse("objective", "must be 'causal' with a probe, whose answers are next tokens")
    if train.eval_examples and (train.objective == "masked" or is_synthetic(config.data)):
        train.refuse("eval_examples", "needs text, and a model that predicts the next token")
    if train.objective != "causal" and config.data.format != "text":
        _check_tuning(train, config.data)
    if train.future_tokens and (config.optimizer.base_width or config.optimizer.base_depth):
        train.refuse(
            "future_tokens",
            "must be 0 with config.optimizer.base_width or base_depth, which have no rules "
            "for its heads",
        )
    if train.ema and config.optimizer.lora_rank:
        train.refuse(
            "ema", "must be 0 with config.optimizer.lora_rank, which does not train the weights"
        )
    divisor = batch_shards * max(1, train.microbatches)
    if train.batch_size % divisor:
        train.refuse(
            "batch_size",
            f"must be a multiple of {divisor}, which is {batch_shards} devices "
            f"(config.mesh.data × fsdp) × {max(1, train.microbatches)} microbatches",
        )
    if model.context_length % train.loss_chunks:
        train.refuse(
            "loss_chunks", f"must divide config.model.context_length={model.context_length}"
        )
    if path_shards != 1:
        paths = getattr(model, "num_paths", None)
        if paths is None:
            raise UserError(f"config.mesh.path={path_shards}: {model.architecture} has no paths")
        if paths % path_shards:
            raise UserError(
                f"config.mesh.path={path_shards}: must divide config.model.num_paths={paths}"
            )


def require_learning_rate(config: Config) -> None:
    """Raises UserError if the run has steps after a decay to zero, which would train nothing."""
    optimizer, train = config.optimizer, config.train
    has_decay = optimizer.schedule in SCHEDULES and optimizer.schedule != "constant"
    is_beyond = train.steps > optimizer.decay_steps
    if has_decay and is_beyond and not optimizer.final_learning_rate:
        train.refuse(
            "steps",
            f"the learning rate is 0 from step {optimizer.decay_steps} on, where its decay ends, so "
            "that further steps would change nothing; train a new run in another --workdir, with "
            f"--config.optimizer.decay_steps={train.steps}, or import this one and train that "
            "further (docs/runs.md#train-longer)",
        )


def _check_tuning(train: TrainConfig, data: DataConfig) -> None:
    """Raises UserError if prompts with answers do not suit the objective, which is not causal."""
    if data.format != "completion":
        train.refuse("objective", f"must be 'causal' with config.data.format={data.format!r}")
    if train.objective != "prefix":
        train.refuse(
            "objective",
            "must be 'causal' or 'prefix' with config.data.format='completion', whose answers "
            "are next tokens",
        )
    if not data.separate_documents:
        data.refuse(
            "separate_documents",
            "must be True with config.train.objective='prefix' and prompts, each of "
            "which is a prefix",
        )


def require_mask_token(model: models.ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError unless the embedding's last row, the mask token, is no token of the text."""
    if model.vocab_size == tokenizer.vocab_size:
        model.refuse(
            "vocab_size",
            "config.train.objective='masked' uses the embedding's last row as the mask token, "
            f"but the tokenizer uses all {tokenizer.vocab_size:,}; increase it by 1 or more",
        )
