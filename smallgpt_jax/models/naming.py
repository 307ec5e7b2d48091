"""The name of a model in messages. Several recipes have the architecture gpt."""

from smallgpt_jax.models.config import ModelConfig

_OF_GPT = {"mixers": "attention", "mlp": "dense", "norm": "layer", "position": "learned"}


def architecture_name(model: ModelConfig) -> str:
    """Returns, for example, "gpt (mlp gated, norm rms, position rope)"."""
    return model.architecture + variants(model)


def variants(model: ModelConfig) -> str:
    """Returns what the block has instead of GPT's parts, in brackets after a space, or ""."""
    block = {"mixers": " + ".join(dict.fromkeys(model.mixers))}
    block |= {field: getattr(model, field) for field in ("mlp", "norm", "position")}
    changed = [f"{field} {value}" for field, value in block.items() if value != _OF_GPT[field]]
    return f" ({', '.join(changed)})" if changed else ""
