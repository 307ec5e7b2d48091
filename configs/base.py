"""The config that all recipes start from.

Its fields, and their values at size `paper`, are declared and documented in

- `model`: smallgpt_jax/models/config.py; fields of one architecture: pgpt.py, lgpt.py, cgpt.py
  beside it
- `data`: smallgpt_jax/data/config.py
- `mesh`: smallgpt_jax/devices/sharding.py
- `optimizer`: smallgpt_jax/optim/config.py
- `train`: smallgpt_jax/run/config.py

A recipe (`gpt.py`, `pgpt.py`, `lgpt.py`, `cgpt.py`, or your own) changes some of them. In
`--config=configs/pgpt.py:quickstart`, the word after the colon is the size:

- `paper`: the full recipe of arXiv 2404.14462, with 10B tokens of FineWeb-Edu, for GPUs or TPUs.
- `quickstart`: a small model, trained on the source code of Python's standard library. Takes
  minutes on two CPU cores and downloads nothing.
- `tiny`: a smaller model, trained in seconds, for testing a change or a machine.
- a number of parameters such as `30M`, `30M@40` (for 40 tokens per parameter) or a budget of
  training FLOPs such as `1e17`: the shape of the model, steps, batch and learning rate follow
  (docs/sizes.md). In these recipes, -1 stands for a value that follows from the size and from the
  fields that are set.

With another data.tokenizer whose value says its size (sentencepiece:4096, bytes, gpt2),
model.vocab_size follows, unless it is set.
"""

from ml_collections import ConfigDict, config_dict

from smallgpt_jax import models
from smallgpt_jax.config import sizes
from smallgpt_jax.config.group import AT_START
from smallgpt_jax.config.sizes import Size
from smallgpt_jax.data.config import embedding_rows, stated_entries
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import GROUPS

SIZES = ("paper", "quickstart", "tiny")
# Sized recipes that train on more tokens than four epochs of the standard library use the paper's
# text.
STDLIB_TOKENS = 15e6
# The learning rate decays until the last step, to a tenth of its peak.
FOLLOW_STEPS = {"warmup_steps": -1, "decay_steps": -1, "final_learning_rate": -1.0}


def get_config(size: str, architecture: str = "gpt") -> ConfigDict:
    """Returns the fields of all groups, with the values of a size. `architecture` may have fields
    of its own.
    """
    groups = GROUPS | {"model": models.find_architecture(architecture).Config}
    config = ConfigDict({name: group.config_dict() for name, group in groups.items()})
    config.model.architecture = architecture
    if size == "quickstart":
        quickstart(config)
    elif size == "tiny":
        tiny(config)
    elif size != "paper":
        sized(config, parse_size(size))
    _follow_tokenizer(config)
    config.lock()
    config.model.unlock()  # a recipe may name another architecture and add its fields
    return config


def _follow_tokenizer(config: ConfigDict) -> None:
    """Lets model.vocab_size follow another tokenizer than the size's, if that one's value says its
    size. A value that a recipe or a flag sets replaces the reference.
    """
    usual, rows = config.data.tokenizer, config.model.vocab_size

    def follow(rows: int, tokenizer: str) -> int:
        entries = None if tokenizer == usual else stated_entries(str(tokenizer))
        return embedding_rows(entries) if entries else rows

    # Evaluated when it is read, after the flags that come after --config. References apply
    # functions only by this class, which has no public name.
    operation = config_dict._Op(follow, [config.data.get_ref("tokenizer")])
    config.model.vocab_size = config_dict.FieldReference(rows, op=operation)


def parse_size(size: str) -> Size:
    try:
        return Size.parse(size)
    except UserError as error:
        if size[:1].isdigit():
            raise
        raise UserError(
            f"--config: no size {size!r}; choose from {', '.join(SIZES)}, or a size such as "
            f"{sizes.EXAMPLES}"
        ) from error


def sized(config: ConfigDict, size: Size) -> None:
    """Text and tokenizer suit the size. What follows from it is AT_START."""
    parameters = size.estimated_parameters
    config.train.size = size.text
    config.model.vocab_size = sizes.vocabulary(parameters)
    config.model.context_length = sizes.context_length(parameters)
    config.model.num_layers = config.model.d_model = config.model.num_heads = AT_START
    config.model.mlp_ratio = float(AT_START)
    config.model.dtype = "auto"
    config.data.tokenizer = f"sentencepiece:{config.model.vocab_size}"
    config.data.store = ""
    if size.tokens_per_parameter * parameters <= STDLIB_TOKENS:
        config.data.source = "python_stdlib"
        config.data.validation_fraction = 0.1
    config.optimizer.learning_rate = config.optimizer.weight_decay = float(AT_START)
    # As in the records that the rules come from. Runs of several lengths share the steps before the
    # decay (train.trunk); after it, the rate is 0, and a longer run is a new one.
    config.optimizer.update(FOLLOW_STEPS, schedule="wsd", decay_fraction=0.2, final_fraction=0.0)
    config.train.steps = config.train.batch_size = AT_START
    config.train.microbatches = 0
    config.train.log_every = 25
    config.train.eval_every = config.train.checkpoint_every = 500
    config.train.eval_steps = 64


def quickstart(config: ConfigDict) -> None:
    config.model.vocab_size = 1024
    config.model.context_length = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.d_model = 128
    config.model.dtype = "float32"
    config.data.source = "python_stdlib"
    config.data.tokenizer = "sentencepiece:1024"
    config.data.validation_fraction = 0.1
    config.data.store = ""
    config.optimizer.learning_rate = 3e-3
    config.optimizer.update(FOLLOW_STEPS)
    config.train.steps = 2000
    config.train.batch_size = 8
    config.train.microbatches = 1
    config.train.loss_chunks = 4
    config.train.log_every = 25
    config.train.eval_every = 500
    config.train.eval_steps = 64
    config.train.checkpoint_every = 500


def tiny(config: ConfigDict) -> None:
    quickstart(config)
    config.model.vocab_size = 512
    config.model.context_length = 64
    config.model.d_model = 64
    config.model.scan_layers = True
    config.data.tokenizer = "bytes"
    config.optimizer.warmup_fraction = 0.125
    config.train.steps = 40
    config.train.log_every = 10
    config.train.eval_every = 20
    config.train.eval_steps = 4
    config.train.checkpoint_every = 20
