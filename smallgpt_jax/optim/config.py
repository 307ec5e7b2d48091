"""The config group `optimizer`."""

import dataclasses
import math
import re
from typing import ClassVar, Self

from smallgpt_jax.config.group import (
    AT_START,
    IN_DECAY,
    NOT_COMPILED,
    STEPS_LIMIT,
    ConfigGroup,
    at_start,
    in_decay,
    not_compiled,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ConfigGroup):
    GROUP: ClassVar[str] = "optimizer"

    # adamw | lion | muon | package.module:function (docs/your-own.md). With muon, embeddings, head
    # and vectors are still updated by AdamW. Learning rates and weight decay that suit adamw also
    # suit muon (docs/optimizers.md)
    name: str = "adamw"
    # learning rate after the warmup: "cosine" | "linear": decay to final_learning_rate | "wsd":
    # constant, then a decay by 1 − √x over the last decay_fraction of the steps | "wsd_linear": the
    # same with a linear decay | "constant" | package.module:function (docs/your-own.md)
    schedule: str = not_compiled("cosine")
    # peak learning rate, at the end of the warmup
    learning_rate: float = not_compiled(6e-4)
    # steps of linear warmup from 0; -1: warmup_fraction of the decay_steps
    warmup_steps: int = at_start(715, **NOT_COMPILED)
    # with warmup_steps=-1: length of the warmup, as a fraction of decay_steps
    warmup_fraction: float = not_compiled(0.025)
    # step at which the decay ends; -1: train.steps when the run starts
    decay_steps: int = at_start(19_073, **IN_DECAY, **NOT_COMPILED)
    # with "wsd" and "wsd_linear": length of the decay, as a fraction of decay_steps
    decay_fraction: float = in_decay(0.1)
    # learning rate from decay_steps on; -1: final_fraction of the learning_rate
    final_learning_rate: float = at_start(6e-5, **NOT_COMPILED)
    # with final_learning_rate=-1: the final learning rate, as a fraction of the peak
    final_fraction: float = not_compiled(0.1)
    # applies to matrices, but not to biases, norms or path weights
    weight_decay: float = not_compiled(0.1)
    # AdamW: decay rate of the first moment. Lion: weight of the momentum in the update
    beta1: float = 0.9
    # AdamW: decay rate of the second moment. Lion: decay rate of the momentum
    beta2: float = 0.95
    # maximum norm of the gradient; 0: no clipping
    clip_norm: float = 1.0
    # muP: d_model of the base model, whose best learning rate is to be used for this model; 0: no
    # muP. The initial weights and the learning rates of matrices then depend on d_model /
    # base_width (docs/optimizers.md)
    base_width: int = 0
    # CompleteP: number of blocks in sequence of the base model; 0: no scaling by the depth. Blocks
    # then add to the residual stream in proportion to base_depth / (number of blocks in sequence)
    base_depth: int = 0

    # regular expression: only the parameters whose path it matches are trained; "": all. An example
    # is "path=1": of a pgpt, the path with number 1 (docs/tuning.md)
    train_only: str = ""
    # LoRA: rank of the matrices that are trained in place of the weights; 0: no LoRA. train_only
    # then selects the weights that get such matrices; "": all of attention, MLPs and dense layers;
    # "kernel|head": also the output head
    lora_rank: int = 0
    # LoRA: the product of the trained matrices is multiplied by lora_alpha / lora_rank
    lora_alpha: float = 16.0

    @property
    def lora_scale(self) -> float:
        return self.lora_alpha / self.lora_rank

    def validate(self) -> None:
        self.validate_range("learning_rate", "weight_decay", "clip_norm")
        self.validate_range("base_width", "base_depth", "lora_rank", "lora_alpha")
        try:
            re.compile(self.train_only)
        except re.error as error:
            self.refuse("train_only", f"not a regular expression ({error})")
        if self.lora_rank and (self.base_width or self.base_depth):
            rule = "cannot be combined with config.optimizer.base_width or base_depth"
            self.refuse("lora_rank", f"{rule}; set it to 0")
        self.validate_fraction("beta1", "beta2", "warmup_fraction", "final_fraction")
        self.validate_fraction("decay_fraction", above=True, below=False)

    def started(self, steps: int) -> Self:
        """Replaces each AT_START. Raises UserError for an invalid schedule."""
        end = steps if self.decay_steps == AT_START else self.decay_steps
        if end < 1:
            self.refuse("decay_steps", "must be at least 1; -1 means config.train.steps")
        if end >= STEPS_LIMIT:
            self.refuse("decay_steps", "must be below 2^31")
        warmup, final = self.warmup_steps, self.final_learning_rate
        if warmup == AT_START:
            warmup = math.floor(self.warmup_fraction * end)
        if final == AT_START:
            final = self.final_fraction * self.learning_rate
        # Until here, -1 was a valid value of these fields.
        group = self.replace(warmup_steps=warmup, decay_steps=end, final_learning_rate=final)
        group.validate_range("warmup_steps", "final_learning_rate")
        if end <= warmup:
            group.refuse("decay_steps", f"must be more than config.optimizer.warmup_steps={warmup}")
        return group
