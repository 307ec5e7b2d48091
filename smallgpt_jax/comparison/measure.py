"""What is measured of a finished run: its loss on other texts and in longer contexts, and how fast it writes."""

import functools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from smallgpt_jax import data, inference, sharding, workdir
from smallgpt_jax.comparison.results import DECODING_FILE, OWN, TEXTS_FILE, read_json
from smallgpt_jax.data import batches, cache_folder, tokenizers
from smallgpt_jax.data.packing import Rows
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import appearing, local_path, locked, write_atomically
from smallgpt_jax.inference import decoder
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.program import build_program
from smallgpt_jax.train import mean_loss

NEW_TOKENS = 64  # that are timed


def named_sources(texts: str) -> dict[str, str]:
    """NAME=SOURCE,NAME=SOURCE → {name: source}. Raises UserError if it is not that."""
    found = {}
    for item in filter(None, texts.split(",")):
        name, is_there, source = item.strip().partition("=")
        if not is_there or not name or not source or name in {OWN, *found}:
            raise UserError(f"config.compare.texts={texts!r}: {item.strip()!r} is not NAME=SOURCE with a name of its "
                            f"own (and not {OWN!r})")
        local_path("config.compare.texts", source)  # or hf:NAME, tfds:NAME
        found[name] = source
    return found


def corpora(config: ConfigDict, texts: dict[str, str]) -> dict[str, data.Corpus]:
    """The texts to measure a run of this config on, its own first, all in its own tokenizer.

    Makes what is not there yet. Raises UserError for what cannot be read.
    """
    own = data.find_or_make(config.data)
    name = tokenizers.fingerprint(own.tokenizer)[:16]
    tokenizer = cache_folder() / "tokenizers" / name  # one place for all runs, so that they share a text's store
    if texts:
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        with locked(tokenizer.with_suffix(".lock"), wait=True):
            if not tokenizer.exists():
                with appearing(tokenizer) as folder:
                    tokenizers.save(own.tokenizer, folder)
    found = {OWN: own}
    for text, source in texts.items():
        theirs = config.data.copy_and_resolve_references()
        theirs.update(source=source, store="", mixture="", tokenizer=str(tokenizer))
        found[text] = data.find_or_make(theirs)
    return found


class Stretch:
    """Some tokens of a validation split, the same ones in rows of any multiple of the context.

    As many as training validates on, in stretches of the longest of the `contexts` (multiples), chosen at
    random; of a mixture by weight. Raises UserError if a split is shorter than one of them.
    """

    def __init__(self, corpus: data.Corpus, config: ConfigDict, contexts: Sequence[int], name: str):
        self._corpus, self._separate = corpus, config.data.separate_documents
        self.context_length = config.model.context_length
        self.longest = math.lcm(*contexts)
        self._stretches = self._rows(self.longest)
        if not all(packing.num_rows for packing in self._stretches.packings):
            raise UserError(f"the validation split of the text {name!r} is shorter than {self.longest} contexts, "
                            f"{self.longest * self.context_length:,} + 1 tokens (config.compare.contexts): use more "
                            "text, or shorter contexts")
        self.bytes_per_token = corpus.bytes_per_token("validation")
        wanted = config.train.eval_steps * config.train.batch_size
        self._chosen = batches.some_rows(self._stretches, -(-wanted // self.longest))

    def _rows(self, times: int) -> batches.Mixture:
        return batches.Mixture(self._corpus.packed("validation", "concat", self._separate, times * self.context_length),
                               self._corpus.weights)

    def batches(self, times: int, batch_size: int) -> Iterator[Rows]:
        """Batches of rows of `times` the context."""
        parts, rows = self.longest // times, self._rows(times)
        packing_of = self._stretches.packing_of(self._chosen)
        first_parts = rows.first_rows[packing_of] + parts * (self._chosen - self._stretches.first_rows[packing_of])
        order = (first_parts[:, None] + np.arange(parts)[None]).ravel()
        return iter(batches.counted_batches(rows, order, batch_size))


def measure_texts(folder: Path, texts: dict[str, str], contexts: Sequence[int], say=print) -> None:
    """Writes evaluations/texts.json of a run: its loss on the validation split of each text, its own included,
    at each multiple of its context. What is there of the same checkpoint and the same content is not measured
    again."""
    if not texts and set(contexts) == {1}:
        return
    path, config = folder / workdir.EVALUATION_FOLDER / TEXTS_FILE, workdir.read_config(folder)
    is_learned = config.model.position == "learned"  # such a model has no positions beyond its context
    found = corpora(config, texts)
    if not data.same_text(found[OWN].description, read_json(folder / workdir.STORE_FILE) or {}):
        raise UserError(f"{folder}: the text that it was trained on has changed since; it cannot be measured on it")
    common = {"step": config.train.steps, "contexts": list(contexts), "eval_steps": config.train.eval_steps}
    before, rows = read_json(path) or [], []
    for name, corpus in found.items():
        stretch = Stretch(corpus, config, contexts, name)
        for times in (1,) if is_learned else contexts:
            wanted = {**common, "text": name, "fingerprint": corpus.fingerprint("validation"),
                      "context_length": times * config.model.context_length}
            row = next((row for row in before if wanted.items() <= row.items()), None)
            if row is None:
                row = {**wanted, **loss_on(folder, stretch, times)}
                say(f"{folder.name}: {name}, context {row['context_length']:,}: {row['bits_per_byte']:.4f} bits "
                    "per byte")
            rows.append({**row, "source": texts.get(name, config.data.source)})
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(rows, indent=2) + "\n")


def loss_on(folder: Path, stretch: Stretch, times: int) -> dict[str, float]:
    """The loss of a run's newest checkpoint on a stretch of text, read in rows of `times` its context: nats a
    token, bits per byte, and of how many tokens."""
    trained, config = inference.load_trained(folder), workdir.read_config(folder)
    config.model.context_length *= times
    config.data.packing = "concat"  # as a Stretch is, whatever the run was trained on
    mesh = build_program(config).mesh
    parts = sharding.batch_parts(mesh)
    # Batches of as many tokens as a microbatch of training has: what could be trained can be measured.
    rows_per_device = config.train.batch_size // (config.train.microbatches * parts * times)
    config.train.batch_size, config.train.microbatches = max(1, rows_per_device) * parts, 1
    program = build_program(config)
    eval_step = program.runnable(program.compile_eval_step())
    params = jax.device_put(trained.params, program.shardings.params)
    place = sharding.batch_sharding(mesh)
    nats, targets = mean_loss(functools.partial(eval_step, params, trained.model_state), (
        jax.device_put(batch, place) for batch in stretch.batches(times, config.train.batch_size)))
    return {"loss": nats, "bits_per_byte": nats / math.log(2) / stretch.bytes_per_token,
            "tokens": targets}


def measure_decoding(folder: Path, say=print) -> None:
    """Writes evaluations/decoding.json of a run, if it is not there: how fast it writes, one text at a time."""
    path = folder / workdir.EVALUATION_FOLDER / DECODING_FILE
    if path.exists():
        return
    try:
        text_model = inference.load(folder)
    except UserError as error:  # an own architecture that cannot be decoded is compared all the same
        say(f"{folder.name}: decoding is not measured: {error}")
        return
    count = min(NEW_TOKENS, text_model.model.config.context_length // 2)
    speed = max(decoding_speed(text_model, count) for _ in range(4))  # the first one compiles
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps({"tokens_per_second": speed, "batch": 1, "new_tokens": count}) + "\n")
    say(f"{folder.name}: writes {speed:,.0f} tokens/s")


def decoding_speed(text_model: inference.TextModel, count: int) -> float:
    """Tokens a second, after the first one. No text ends early: what is drawn is not looked at."""
    sampling = Sampling(temperature=0.0)
    text = decoder.Texts(text_model.model, text_model.weights, text_model.tokenizer.vocab_size,
                         [[text_model.tokenizer.end_of_text]])
    text.reserve(count + 1)
    drawn_BxN, left = text.draw_ahead(sampling, 1), count
    started = time.perf_counter()
    while left:
        text.ids[0] += drawn_BxN[0].tolist()
        drawn_BxN = text.draw_ahead(sampling, left)
        left -= drawn_BxN.shape[1]
    return count / (time.perf_counter() - started)
