"""The config of a run, and its group `train`. The other groups are beside their components."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.config.group import (
    AT_START,
    AUTO,
    NOT_COMPILED,
    STEPS_LIMIT,
    ConfigGroup,
    at_start,
    free,
    not_compiled,
)
from smallgpt_jax.data.config import DataConfig, embedding_rows, stated_entries
from smallgpt_jax.devices.sharding import MeshConfig
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models import ModelConfig
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.run.sizing import with_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(ConfigGroup):
    GROUP: ClassVar[str] = "train"

    # size of the recipe: active parameters, such as 30M (30M@40: for 40 training tokens per
    # parameter, instead of 20), or a budget of training FLOPs, such as 1e17; "": none. With a size,
    # the value -1 of steps, batch_size, learning_rate, weight_decay and fields of the model's shape
    # means the value that follows from it (docs/sizes.md)
    size: str = dataclasses.field(default="", metadata=NOT_COMPILED)
    # number of training steps
    steps: int = free(19_073, **NOT_COMPILED)
    # sequences per step, over all devices
    batch_size: int = 512
    # each batch is split into this many parts, computed one after another, also in evaluation; 0:
    # the fewest that fit into the memory of a device; a resumed run keeps its number
    microbatches: int = free(8)  # a change also changes the dropout masks
    # parts of each sequence, whose logits are computed one after another; must divide
    # context_length
    loss_chunks: int = free(4)
    # weight of the z-loss, the mean of (log Σ exp(logits))², in training only; 0: none. A common
    # weight is 1e-4
    z_loss: float = 0.0
    # decay rate per step of a moving average of the weights, such as 0.999; 0: no average.
    # Validation, and all commands that read the run, use the average. At step t, the rate is at
    # most (1 + t)/(10 + t)
    ema: float = 0.0
    # workdir of a trained model of the same architecture and sizes; "": none. With a teacher, the
    # distance between the outputs of both models' blocks is added to the training loss
    # (docs/conversion.md)
    teacher: str = ""
    # step of the teacher's checkpoint; -1: the newest one when the run starts
    teacher_step: int = at_start(AT_START)
    # weight of the distance to the teacher's features
    feature_weight: float = 0.1
    # training objective: "causal" (the next token) | "prefix" (the next token, after a random
    # prefix of each text that attention sees in both directions) | "masked" (tokens hidden in the
    # text, with attention in both directions). docs/objectives.md |
    # package.module:function (docs/your-own.md)
    objective: str = "causal"
    # "masked": fraction of the tokens to predict
    mask_rate: float = 0.3
    # number of further tokens that heads predict in training, beside the objective; 0: none. The
    # heads are not part of the trained model (docs/objectives.md)
    future_tokens: int = 0
    # kind of these heads: "mtp" (DeepSeek-V3's, one module per token) | "ftp" (a decoder that reads
    # a pseudo-sequence) | package.module:function
    future_head: str = "mtp"
    # weight of their loss
    future_weight: float = 0.3
    # "ftp": length of the pseudo-sequence
    pseudo_length: int = 12
    # "ftp": factor on the weight of each token, compared with the one before
    future_discount: float = 0.8
    # seed of weights, data order and dropout; 0 to 2^32 - 1
    seed: int = not_compiled(1337)
    # steps between log lines
    log_every: int = free(10, **NOT_COMPILED)
    # steps between evaluations
    eval_every: int = free(250, **NOT_COMPILED)
    # batches per evaluation; 0: the whole validation split
    eval_steps: int = free(20, **NOT_COMPILED)
    # evaluations also log loss_of_repeats, over the targets that follow their pair of tokens as when
    # the pair last occurred in the row: it falls when a model learns to copy. Takes a second pass
    # over the logits
    eval_repeats: bool = free(False)
    # JSON lines with multiple-choice examples, in the format of `evaluate --examples`; "": none.
    # Evaluations also log accuracy, answer_bits_per_byte and answer_margin (docs/evaluation.md)
    eval_examples: str = free("", **NOT_COMPILED)
    # steps between checkpoints; the last step is always saved
    checkpoint_every: int = free(1000, **NOT_COMPILED)
    # number of newest checkpoints to keep
    keep_checkpoints: int = free(3, **NOT_COMPILED)
    # steps whose checkpoints are also saved, and never removed
    kept_steps: tuple[int, ...] = free((), **NOT_COMPILED)
    # workdir of a run with the same config and more steps; "": none. With "wsd" and "wsd_linear", a
    # run without a checkpoint starts from the trunk's checkpoint at the start of its own decay,
    # instead of from step 0 (docs/runs.md)
    trunk: str = free("", **NOT_COMPILED)
    # if loss or gradient are not finite: "stop" the run | "skip" the update. Non-finite weights
    # always stop the run
    on_nonfinite: str = free("stop", **NOT_COMPILED)
    # with "skip": the run stops after this number of consecutive non-finite updates
    max_nonfinite: int = free(10, **NOT_COMPILED)
    # experiment tracker that also gets the metrics: "" (none) | "wandb" | "trackio"
    tracker: str = free("", **NOT_COMPILED)
    # first step of a trace for xprof; 0: no trace. The first steps after a start or resumption are
    # not typical
    profile_from: int = free(0, **NOT_COMPILED)
    # number of steps in the trace
    profile_steps: int = free(5, **NOT_COMPILED)
    # GPUs: compile steps whose sums have a fixed order, so that a rerun on the same kind of GPU has
    # the same bits; they are slower (docs/gpu.md). Without it, kernels add with atomics, and are
    # chosen by a measurement. On CPUs and TPUs, it changes nothing: orders are fixed there
    deterministic: bool = free(False)
    # say once if the first losses are outside of the band of other seeds of this recipe, where the
    # package has one (docs/reliability.md)
    check_loss: bool = free(True, **NOT_COMPILED)
    # if no step finishes for this time, the run ends with status 124; 0: no limit. Starting, saving
    # and evaluating may each take four times as long
    stall_seconds: float = free(1800.0, **NOT_COMPILED)

    def validate(self) -> None:
        self.validate_range(
            "steps",
            "batch_size",
            "loss_chunks",
            "log_every",
            "eval_every",
            "checkpoint_every",
            "keep_checkpoints",
            "max_nonfinite",
            "profile_steps",
            "pseudo_length",
            least=1,
        )
        self.validate_range(
            "microbatches",
            "eval_steps",
            "profile_from",
            "z_loss",
            "feature_weight",
            "stall_seconds",
            "future_tokens",
            "future_weight",
        )
        self.validate_fraction("mask_rate", above=True)
        self.validate_fraction("future_discount", above=True, below=False)
        self.validate_fraction("ema")
        if self.steps >= STEPS_LIMIT:
            self.refuse("steps", "must be below 2^31")
        if not all(type(step) is int and step >= 1 for step in self.kept_steps):
            self.refuse("kept_steps", "must be integers, at least 1")
        if not 0 <= self.seed < 2**32:
            self.refuse("seed", "must be at least 0 and below 2^32")
        self.validate_choice("on_nonfinite", ("stop", "skip"))
        if self.eval_repeats and self.objective != "causal":
            self.refuse("eval_repeats", "must be False without config.train.objective='causal'")
        if self.teacher_step != AT_START and not self.teacher:
            self.refuse("teacher_step", "needs config.train.teacher")

    def saves(self, step: int) -> bool:
        return step >= self.steps or step % self.checkpoint_every == 0 or step in self.kept_steps

    def evaluates(self, step: int) -> bool:
        return step >= self.steps or step % self.eval_every == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a run, with all values determined, except `train.teacher_step`."""

    model: ModelConfig
    data: DataConfig
    mesh: MeshConfig
    optimizer: OptimizerConfig
    train: TrainConfig

    @classmethod
    def of(cls, config: "Mapping | ConfigDict | Config", saved: "Config | None" = None) -> "Config":
        """Returns the config of a recipe or of its fields. What is determined when a run starts is
        kept from `saved`, the config of the run that is resumed. Raises UserError for invalid
        fields and values.
        """
        if isinstance(config, Config):
            if saved is None:
                return config
            config = config.to_dict()
        if "compare" in config:
            raise UserError(
                "--config: is a comparison, and not a run; train it with smallgpt_jax.compare"
            )
        for name in config:
            if name not in GROUPS:
                raise UserError(f"config.{name}: no such group; choose from {', '.join(GROUPS)}")
        groups = {name: dict(config.get(name, {})) for name in GROUPS}
        if "train" in config:  # a config.json of an imported model has only the group model
            _set_attention_mask(groups["model"], groups["train"].get("objective", "causal"))
        if saved:
            _keep_start_values(groups, saved)
        # Before the fields are validated: AT_START is no number of steps.
        groups = with_sizes(groups, saved.to_dict() if saved else None)
        data = DataConfig.from_fields(groups["data"])
        mesh = MeshConfig.from_fields(groups["mesh"])
        optimizer = OptimizerConfig.from_fields(groups["optimizer"])
        train = TrainConfig.from_fields(groups["train"])
        return cls(
            optimizer=optimizer.started(train.steps),
            model=models.make_config(**groups["model"]),
            data=data,
            mesh=mesh,
            train=train,
        )

    @property
    def data_seed(self) -> int:
        """The seed of the order of the batches."""
        return self.train.seed if self.data.seed == -1 else self.data.seed

    @property
    def inputs_per_step(self) -> int:
        """The tokens of a batch, with padding."""
        return self.train.batch_size * self.model.context_length

    def replace(self, **groups: Mapping) -> Self:
        changed = {name: getattr(self, name).replace(**fields) for name, fields in groups.items()}
        return dataclasses.replace(self, **changed)

    def compiled_part(self) -> Self:
        """Returns the part that is compiled: runs that have it in common share their steps."""
        compiled = {name: getattr(self, name).compiled_part() for name in GROUPS}
        return dataclasses.replace(self, **compiled)

    def to_dict(self) -> dict[str, dict]:
        return dataclasses.asdict(self)

    def flat(self) -> dict:
        return flatten(self.to_dict())


def _keep_start_values(groups: dict[str, dict], saved: Config) -> None:
    """Sets the fields that are determined when a run starts, unless the user has set them."""
    is_same_teacher = groups["train"].get("teacher", "") == saved.train.teacher
    for name, group in GROUPS.items():
        for field in group.field_names(at_start=True):
            is_unset = groups[name].get(field, AT_START) in (AT_START, AUTO)
            # a step of the old teacher says nothing of another one
            if is_unset and (field != "teacher_step" or is_same_teacher):
                groups[name][field] = getattr(getattr(saved, name), field)
    # Recipes did not always follow the tokenizer; their runs keep the rows of their embedding.
    entries = stated_entries(str(groups["data"].get("tokenizer")))
    if entries and groups["model"].get("vocab_size") == embedding_rows(entries):
        groups["model"]["vocab_size"] = saved.model.vocab_size
    # another number would draw other dropout masks
    if groups["train"].get("microbatches") == 0:
        groups["train"]["microbatches"] = saved.train.microbatches


def _set_attention_mask(model: dict, objective: str) -> None:
    # refuses another mask, with which the weights may have been trained
    mask = ATTENTION_MASK_OF.get(str(objective), "causal")
    default = ModelConfig.attention_mask
    if model.get("attention_mask", default) not in (mask, default):
        raise UserError(
            f"config.model.attention_mask={short_repr(model['attention_mask'])}: does not belong to "
            f"config.train.objective={short_repr(objective)}; set another objective, or "
            f"--config.model.attention_mask={mask}"
        )
    if mask != default:
        model["attention_mask"] = mask


# config.train.objective → config.model.attention_mask, if not causal
ATTENTION_MASK_OF = {"prefix": "prefix", "masked": "bidirectional"}

GROUPS: dict[str, type[ConfigGroup]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "mesh": MeshConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
}


def flatten(groups: Mapping[str, Mapping]) -> dict:
    """Returns {"group.field": value}."""
    return {
        f"{group}.{field}": value
        for group, fields in groups.items()
        for field, value in fields.items()
    }


def unflatten(fields: Mapping[str, Any]) -> dict[str, dict]:
    """Returns {group: {field: value}} of {"group.field": value}."""
    groups: dict[str, dict] = {}
    for path, value in fields.items():
        group, _, field = path.partition(".")
        groups.setdefault(group, {})[field] = value
    return groups
