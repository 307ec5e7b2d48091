"""Messages at the start of a run about its size and learning rate."""

from smallgpt_jax.config import sizes
from smallgpt_jax.config.sizes import Size
from smallgpt_jax.models import (
    LanguageModel,
    ModelConfig,
    custom_classes,
    num_active_parameters,
)
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.optim.learning_rate import DECAYS, decay_start
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.sizing import block_parameters, usual_rate

_SHOWN_ERROR = 0.03  # of parameters, FLOPs and tokens per parameter
_SHOWN_BUDGET_ERROR = 0.1  # of the tokens per parameter, which follow from FLOPs only roughly
_TOO_HIGH = 4.0  # times the rule's learning rate
_LARGE_BATCH = 8.0  # times the rule's batch


def _shape(model: ModelConfig) -> str:
    shape = f"{model.num_layers} × {model.d_model}"
    for field, count in (("num_paths", "paths"), ("num_stages", "stages")):
        if hasattr(model, field):
            shape += f" in {getattr(model, field)} {count}"
    shape += f", {model.num_heads} heads, MLP {model.mlp_width}"
    if model.mlp == "moe":
        used = model.experts_per_token + model.num_shared_experts
        shape += f" × {model.num_experts + model.num_shared_experts} experts, {used} per token"
    return shape


def size_messages(config: Config) -> list[str]:
    if not config.train.size:
        return _rate_messages(config)
    model, train, optimizer = config.model, config.train, config.optimizer
    batch = config.inputs_per_step
    ratio = train.steps * batch / num_active_parameters(LanguageModel(model))
    warmup = "1 step" if optimizer.warmup_steps == 1 else f"{optimizer.warmup_steps:,} steps"
    schedule = f"rate {optimizer.learning_rate:.3g} after {warmup}"
    if optimizer.schedule in DECAYS:
        schedule += f", decay over the last {optimizer.decay_steps - decay_start(optimizer):,}"
        if optimizer.decay_steps != train.steps:
            schedule += f" before step {optimizer.decay_steps:,}"
    lines = [
        f"size {train.size}: {_shape(model)}; {train.steps:,} steps of {batch:,} tokens, "
        f"{_short(ratio)} per parameter; {schedule}; weight decay {optimizer.weight_decay:.3g}"
    ]
    if departures := _departures(config, ratio):
        reason = "because of fields that were set or of coarse shapes"
        if custom_classes(model):  # whose parameters may have no widths near the size
            reason += (
                ", or of custom modules that the rule cannot fit (`shape` in docs/your-own.md)"
            )
        lines.append(f"the run has {' and '.join(departures)}, {reason}")
    return [*lines, *_rate_messages(config)]


def _departures(config: Config, tokens_per_parameter: float) -> list[str]:
    """Returns what is not as the size says."""
    size = Size.parse(config.train.size, "config.train.size")
    language_model = LanguageModel(config.model)
    parameters = num_active_parameters(language_model)
    departures = []
    if size.parameters and not _is_close(parameters, size.parameters):
        asked = size.text.partition("@")[0]
        departures.append(f"{parameters:,} active parameters instead of {asked}")
    per_token = train_flops_per_token(language_model) if size.flops else None
    if per_token:  # else unknown, of custom code
        flops = tokens_per_parameter * parameters * per_token
        if not _is_close(flops, size.flops):
            departures.append(f"{flops:.3g} training FLOPs instead of {size.flops:.3g}")
    shown_error = _SHOWN_ERROR if size.parameters else _SHOWN_BUDGET_ERROR
    if not _is_close(tokens_per_parameter, size.tokens_per_parameter, shown_error):
        departures.append(
            f"{_short(tokens_per_parameter)} tokens per parameter instead of "
            f"{_short(size.tokens_per_parameter)}"
        )
    return departures


def _is_close(value: float, asked: float, error: float = _SHOWN_ERROR) -> bool:
    return abs(value / asked - 1) <= error


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _rate_messages(config: Config) -> list[str]:
    """Returns that the rule's learning rate may not suit, or that the rate is far above it."""
    batch = config.inputs_per_step
    rate, chosen = usual_rate(config.model, batch), config.optimizer.learning_rate
    follows = bool(config.train.size) and chosen == rate
    if field := _field_beyond_the_rule(config):
        message = (
            f"{field}: the rule of sizes is for adamw and muon, from scratch and without muP; set "
            f"config.optimizer.learning_rate, which is {rate:.2g}"
        )
        return [message] if follows else []
    usual = sizes.reference_batch(block_parameters(config.model), sizes.TOKENS_PER_PARAMETER)
    if follows and batch > _LARGE_BATCH * usual:
        return [
            f"a batch has {batch:,} tokens, {batch / usual:.0f} times as many as the rule's; it was not "
            f"measured whether the learning rate then grows with their root, here to {rate:.2g}"
        ]
    if chosen < _TOO_HIGH * rate:
        return []
    return [
        f"config.optimizer.learning_rate={chosen:g}: the rule of sizes would choose {rate:.2g} for "
        "this model and batch (docs/sizes.md)"
    ]


def _field_beyond_the_rule(config: Config) -> str:
    """Returns a field with its value, or "". Muon has AdamW's rates."""
    optimizer = config.optimizer
    if optimizer.name not in ("adamw", "muon"):
        return f"config.optimizer.name={optimizer.name!r}"
    for name in ("base_width", "lora_rank"):
        if value := getattr(optimizer, name):
            return f"config.optimizer.{name}={value}"
    return ""
