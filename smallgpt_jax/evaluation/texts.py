"""Measures the loss of finished runs on further texts and with longer contexts."""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from smallgpt_jax import inference
from smallgpt_jax.analysis.record import TextLoss
from smallgpt_jax.data import batches, tokenizer_folder, tokenizers
from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.corpus import Corpus, load_or_prepare
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.names import EVALUATION_FOLDER
from smallgpt_jax.run.training_text import identity_of, read_identity, text_changes
from smallgpt_jax.storage.atomic import atomic_folder, write_atomically
from smallgpt_jax.storage.cache import cache_folder
from smallgpt_jax.storage.json_files import read_json_or_none
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.paths import refuse_url
from smallgpt_jax.storage.typed_json import schema_of
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.validation import evaluate

OWN_TEXT = "own"  # in a record, the name of a run's training text
TEXTS_FILE = "texts.json"  # in a workdir's evaluations/


def parse_texts(texts: str) -> dict[str, str]:
    """Returns {name: source} for texts in the format "NAME=SOURCE,NAME=SOURCE"."""
    where = f"config.compare.texts={texts!r}"
    sources = {}
    for item in filter(None, texts.split(",")):
        name, separator, source = item.strip().partition("=")
        if not separator or not name or not source:
            raise UserError(
                f"{where}: {item.strip()!r} is not NAME=SOURCE; give each text a name and a source"
            )
        if name in (OWN_TEXT, *sources):  # OWN_TEXT is the runs' training text
            raise UserError(f"{where}: the name {name!r} is already used; use another name")
        refuse_url("config.compare.texts", source)  # accepts hf:NAME and tfds:NAME
        sources[name] = source
    return sources


def open_texts(config: Config, sources: dict[str, str]) -> dict[str, Corpus]:
    """Returns {name: corpus} of a run's text and of `sources`, all with the run's tokenizer."""
    own = load_or_prepare(config.data)
    corpora = {OWN_TEXT: own}
    if not sources:
        return corpora
    tokenizer = _shared_tokenizer(own)
    for name, source in sources.items():
        # the text alone: neither a store that the run has prepared nor its mixture
        data = config.data.replace(source=source, store="", mixture="", tokenizer=str(tokenizer))
        corpora[name] = load_or_prepare(data)
    return corpora


def _shared_tokenizer(corpus: Corpus) -> Path:
    """Returns a folder with the tokenizer, the same for all runs with equal tokenizers."""
    name = tokenizers.fingerprint(corpus.tokenizer)[:16]
    path = cache_folder() / "tokenizers" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # the lock, because several comparisons on this machine may want it at the same time
    with file_lock(path.with_suffix(".lock"), wait=True):
        if not path.exists():
            with atomic_folder(path) as folder:
                tokenizer_folder.save(corpus.tokenizer, folder)
    return path


class TextSample:
    """A random sample of a validation split, which can be cut into rows of several lengths with the
    same tokens.

    It consists of windows, whose length is a multiple of all row lengths: `contexts` times the
    config's context length. It has as many tokens as an evaluation during training. Raises
    UserError if the validation split of the text `name` is shorter than a window.
    """

    def __init__(self, corpus: Corpus, config: Config, contexts: Sequence[int], name: str):
        if max(contexts) > 1 and is_synthetic(config.data):
            raise UserError(
                f"config.compare.contexts={tuple(contexts)}: probes have no longer contexts; set "
                "further lengths in config.data.probe_test_lengths"
            )
        self._corpus, self._separate = corpus, config.data.separate_documents
        self.context_length = config.model.context_length
        self.window_multiple = math.lcm(*contexts)  # context lengths per window
        self._windows = self._rows(self.window_multiple)
        if not all(packing.num_rows for packing in self._windows.packings):
            raise UserError(
                f"config.compare.contexts={tuple(contexts)}: the validation split of the text "
                f"{name!r} is shorter than {self.window_multiple * self.context_length:,} + 1 "
                "tokens; use more text or shorter contexts"
            )
        self.bytes_per_token = corpus.bytes_per_token("validation")
        if math.isnan(self.bytes_per_token) and corpus.warning:
            raise UserError(f"config.compare: text {name!r}: {corpus.warning}")
        # rounded up to whole windows
        rows_of_evaluation = config.train.eval_steps * config.train.batch_size
        self._window_numbers = batches.sample_rows(
            self._windows, -(-rows_of_evaluation // self.window_multiple)
        )

    def _rows(self, multiple: int) -> batches.Mixture:
        """Returns the whole validation split in rows of `multiple` context lengths."""
        return self._corpus.pack(
            "validation", "concat", self._separate, multiple * self.context_length
        )

    def batches(self, multiple: int, batch_size: int) -> Iterator[Batch]:
        """Yields the sample in batches of rows of `multiple` context lengths."""
        rows_per_window, rows = self.window_multiple // multiple, self._rows(multiple)
        packing_of = self._windows.packing_of(self._window_numbers)
        # Window numbers within each packing. A window is rows_per_window rows of this length: with 2,
        # window 3 of the first packing is rows 6 and 7.
        windows = self._window_numbers - self._windows.first_rows[packing_of]
        first_rows = rows.first_rows[packing_of] + rows_per_window * windows
        row_numbers = (first_rows[:, None] + np.arange(rows_per_window)[None]).ravel()
        return iter(batches.masked_batches(rows, row_numbers, batch_size))


def measure_texts(
    folder: Path, sources: dict[str, str], contexts: Sequence[int], log=print
) -> None:
    """Writes evaluations/texts.json: a run's loss on the validation splits of its training text and
    of `sources`, {name: source}.

    The loss is measured at several row lengths, which `contexts` gives as multiples of the run's
    context length. Results in an existing file are reused if the checkpoint, the content of the
    text and the settings are the same.
    """
    if not sources and set(contexts) == {1}:
        return  # the evaluations of training have this loss
    config = read_config(folder)
    if config.train.objective == "masked" or config.data.format != "text":
        what = "masked tokens" if config.train.objective == "masked" else "answers"
        log(
            f"{folder.name}: further texts and contexts are not measured: its loss is that of "
            f"{what}"
        )
        return
    corpora = open_texts(config, sources)
    # a loss on a changed text could not be compared with those that training has logged
    if text_changes(read_identity(folder), identity_of(corpora[OWN_TEXT])):
        raise UserError(
            f"{folder}: the training text has changed since the run; restore the text to measure "
            "the run"
        )
    # With learned positions, rows cannot be longer than the context length.
    multiples = (1,) if config.model.position == "learned" else contexts
    path = folder / EVALUATION_FOLDER / TEXTS_FILE
    known = read_json_or_none(path, schema_of(tuple[TextLoss, ...])) or []
    rows = []
    for name, corpus in corpora.items():
        sample = TextSample(corpus, config, contexts, name)
        for multiple in multiples:
            settings = {
                "step": config.train.steps,
                "contexts": list(contexts),
                "eval_steps": config.train.eval_steps,
                "text": name,
                "fingerprint": corpus.fingerprint("validation"),
                "context_length": multiple * config.model.context_length,
            }
            row = _row_with(settings, known)
            if row is None:
                row = settings | measure_loss(folder, sample, multiple)
                log(
                    f"{folder.name}: {name}, context {row['context_length']:,}: "
                    f"{row['bits_per_byte']:.4f} bits per byte"
                )
            rows.append({**row, "source": sources.get(name, config.data.source)})
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(rows, indent=2) + "\n")


def _row_with(settings: dict[str, Any], rows: Sequence[dict]) -> dict[str, Any] | None:
    """Returns the first row with these settings, as an interrupted call has left it; or None."""
    return next((row for row in rows if settings.items() <= row.items()), None)


def measure_loss(folder: Path, sample: TextSample, multiple: int) -> dict[str, float]:
    """Returns "loss" (nats per token), "bits_per_byte" and "tokens" (targets)."""
    trained = inference.load_trained(folder)
    config = _measuring_config(read_config(folder), multiple)
    program = shared_program(config)  # compiled once for all runs of a comparison with this config
    params = jax.device_put(trained.params, program.shardings.params)
    model_state = jax.device_put(trained.model_state, program.shardings.model_state)
    batch_sharding = sharding.batch_sharding(program.mesh)
    batches_on_device = (
        jax.device_put(batch, batch_sharding)
        for batch in sample.batches(multiple, config.train.batch_size)
    )
    evaluation = evaluate(
        functools.partial(program.evaluate, params, model_state), batches_on_device
    )
    return {
        "loss": evaluation.loss,
        "bits_per_byte": evaluation.loss / math.log(2) / sample.bytes_per_token,
        "tokens": evaluation.targets,
    }


def _measuring_config(config: Config, multiple: int) -> Config:
    """Returns a run's config for evaluation at `multiple` context lengths."""
    # To fit in memory, a batch has at most as many tokens as a training microbatch, but at least one
    # row per device.
    shards = sharding.num_batch_shards(sharding.make_mesh(config.mesh))
    rows_per_device = config.train.batch_size // (config.train.microbatches * shards * multiple)
    return config.replace(
        model={"context_length": multiple * config.model.context_length},
        data={"packing": "concat"},  # the packing that TextSample uses
        optimizer={"lora_rank": 0, "train_only": ""},  # the loaded weights have them merged
        train={"batch_size": max(1, rows_per_device) * shards, "microbatches": 1},
    )
