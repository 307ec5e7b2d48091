"""What is measured of a finished run: its loss on other texts and in longer contexts, and how fast it writes."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from smallgpt_jax import data, inference, models, sharding, train, workdir
from smallgpt_jax.comparison.results import DECODING_FILE, EVALUATIONS, TEXTS_FILE, read_json
from smallgpt_jax.data import batches
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import write_atomically
from smallgpt_jax.inference import decoder
from smallgpt_jax.inference.sampling import Sampling

OWN = "own"  # the name of the text that a run was trained on
NEW_TOKENS = 64  # that are timed


def named_sources(texts: str) -> dict[str, str]:
    """NAME=SOURCE,NAME=SOURCE → {name: source}. Raises UserError if it is not that."""
    found = {}
    for item in filter(None, texts.split(",")):
        name, is_there, source = item.strip().partition("=")
        if not is_there or not name or not source or name in {OWN, *found}:
            raise UserError(f"config.compare.texts={texts!r}: {item.strip()!r} is not NAME=SOURCE with a name of its "
                            f"own (and not {OWN!r})")
        found[name] = source
    return found


def measure_texts(folder: Path, texts: dict[str, str], contexts: Sequence[int], say=print) -> None:
    """Adds to evaluations/texts.json of a run what is not there yet: its loss on the validation split of each
    text, its own included, at each multiple of its context."""
    path = folder / EVALUATIONS / TEXTS_FILE
    rows = read_json(path) or []
    config = workdir.read_config(folder)
    model = models.build(**config.model)
    for name, source in {OWN: config.data.source, **texts}.items():
        for times in contexts:
            wanted = {"text": name, "source": source, "context_length": times * config.model.context_length}
            if any(wanted.items() <= row.items() for row in rows) or (name == OWN and times == 1):
                continue  # its own text at its own context: what training has validated on
            if times > 1 and model.config.position == "learned":
                continue  # such a model has no positions beyond its context
            rows.append({**wanted, **loss_on(folder, None if name == OWN else source, times)})
            say(f"{folder.name}: {name}, context {wanted['context_length']:,}: {rows[-1]['bits_per_byte']:.4f} "
                "bits per byte")
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(rows, indent=2) + "\n")


def loss_on(folder: Path, source: str | None, times: int = 1) -> dict[str, float]:
    """The loss of a run's newest checkpoint on the validation split of `source` (None: of its own text), in
    `times` its context: nats a token, bits per byte, and how many tokens that is.

    As many tokens as training validates on, in rows that are longer and fewer.
    """
    trained, config = inference.load_trained(folder), workdir.read_config(folder)
    if source is not None:
        config.data.update(source=source, store="", mixture="", tokenizer=str(folder / workdir.TOKENIZER_FOLDER))
    config.model.context_length *= times
    config.train.batch_size = max(1, config.train.batch_size // times)
    config.mesh.update(data=1, fsdp=1, tensor=1, path=1)
    config.train.microbatches = 1
    setup = train.set_up(config, jax.devices()[:1])
    corpus = data.find_or_make(config.data)
    texts = batches.Mixture(corpus.packed("validation", config.data.packing, config.data.separate_documents,
                                          config.model.context_length), corpus.weights)
    rows = list(batches.validation_batches(texts, config.train.batch_size, config.train.eval_steps))
    run_eval = train.compile_eval_step(setup, config)
    place = sharding.batch_sharding(setup.mesh)
    nats = train.mean_loss(run_eval, trained.params,
                           (jax.tree.map(lambda x: jax.device_put(x, place), batch) for batch in rows))
    return {"loss": nats, "bits_per_byte": nats / math.log(2) / corpus.bytes_per_token("validation"),
            "tokens": sum(int(batch.counts_BxT.sum()) for batch in rows)}


def measure_decoding(folder: Path, say=print) -> None:
    """Writes evaluations/decoding.json of a run, if it is not there: how fast it writes, one text at a time."""
    path = folder / EVALUATIONS / DECODING_FILE
    if path.exists():
        return
    text_model = inference.load(folder)
    count = min(NEW_TOKENS, text_model.model.config.context_length // 2)
    speed = max(decoding_speed(text_model, count) for _ in range(4))  # the first one compiles
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps({"tokens_per_second": speed, "batch": 1, "new_tokens": count}) + "\n")
    say(f"{folder.name}: writes {speed:,.0f} tokens/s")


def decoding_speed(text_model: inference.TextModel, count: int) -> float:
    """Tokens a second, after the first one. No text ends early: what is drawn is not looked at."""
    sampling = Sampling(temperature=0.0)
    text = decoder.Texts(text_model.model, text_model.params, text_model.tokenizer.vocab_size,
                         [[text_model.tokenizer.end_of_text]])
    text.reserve(count + 1)
    drawn_B = jax.block_until_ready(text.draw(sampling))
    started = time.perf_counter()
    for _ in range(count):
        text.ids[0].append(int(drawn_B[0]))
        drawn_B = text.draw(sampling)
    jax.block_until_ready(drawn_B)
    return count / (time.perf_counter() - started)
