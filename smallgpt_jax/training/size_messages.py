"""Messages at the start of a run about its size and learning rate."""

from smallgpt_jax.config.sizes import Size
from smallgpt_jax.models import LanguageModel, num_active_parameters
from smallgpt_jax.optim.learning_rate import DECAYS, decay_start
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.sizing import usual_rate

_SHOWN_ERROR = 0.03  # of the number of parameters
_TOO_HIGH = 4.0  # times the rule's learning rate


def size_messages(config: Config) -> list[str]:
    if not config.train.size:
        return _rate_messages(config)
    model, train, optimizer = config.model, config.train, config.optimizer
    batch = train.batch_size * model.context_length
    parameters = num_active_parameters(LanguageModel(model))
    schedule = f"rate {optimizer.learning_rate:.3g} after {optimizer.warmup_steps:,} steps"
    if optimizer.schedule in DECAYS:
        schedule += f", decay over the last {optimizer.decay_steps - decay_start(optimizer):,}"
    lines = [
        f"size {train.size}: {model.num_layers} × {model.d_model}, {model.num_heads} heads, MLP "
        f"{model.mlp_width}; {train.steps:,} steps of {batch:,} tokens, "
        f"{train.steps * batch / parameters:.3g} per parameter; {schedule}; weight decay "
        f"{optimizer.weight_decay:.3g}"
    ]
    target = Size.parse(train.size, "config.train.size").parameters
    if target and abs(parameters / target - 1) > _SHOWN_ERROR:
        lines.append(
            f"the model has {parameters:,} active parameters instead of {train.size}, because of "
            "fields that were set; what was not set follows from these parameters"
        )
    return [*lines, *_rate_messages(config)]


def _rate_messages(config: Config) -> list[str]:
    """Returns what the rule would choose, if the rate is far too high for the model."""
    optimizer = config.optimizer
    # The rules are those of AdamW from scratch; muon has adamw's rates.
    if optimizer.base_width or optimizer.lora_rank or optimizer.name not in ("adamw", "muon"):
        return []
    rate = usual_rate(config.model, config.train.batch_size * config.model.context_length)
    if optimizer.learning_rate < _TOO_HIGH * rate:
        return []
    return [
        f"config.optimizer.learning_rate={optimizer.learning_rate:g}: the rule of sizes would "
        f"choose {rate:.2g} for this model and batch (docs/sizes.md)"
    ]
