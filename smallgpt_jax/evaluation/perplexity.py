"""Loss, perplexity and bits per byte of texts.

Each document begins and ends as in training: after a begin-of-text token (end-of-text, if the
tokenizer has no token of its own for it), and with an end-of-text token, which is scored too. The
bits per byte are thus those of `main`'s validation.
"""

import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.encoding import encode
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import report
from smallgpt_jax.evaluation.model_options import (
    ModelOptions,
    join_name_parts,
    name_hash,
    short_stem,
)
from smallgpt_jax.evaluation.progress import ScoringProgress
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence, split_with_stride
from smallgpt_jax.run.config_file import read_config

_WHOLE_FILE = 2**62  # characters; a plain text file is one document


@dataclasses.dataclass(frozen=True)
class TextFiles:
    # files, folders and globs, separated by commas, as in config.data.source
    source: str | Path
    _: dataclasses.KW_ONLY
    stride: int | None = None  # tokens between two windows; None: half the context length

    def score(
        self, workdir: Path, model: ModelOptions, limit: float | None, log_samples: bool
    ) -> tuple[str, dict, str]:
        """Returns the name of the files to write, the results, and a table of them."""
        if limit is not None or log_samples:
            flag = "log_samples" if log_samples else "limit"
            raise UserError(f"--{flag}: cannot be combined with --text")
        trained = model.load(workdir)
        context_length = trained.model.config.context_length
        stride = self._stride(context_length)
        data = read_config(workdir, model.trust_custom_code).data
        texts = _read_texts(self.source, data, trained.tokenizer)
        nats = _score_texts(texts, model.scorer(trained), context_length, stride)
        rows = [{"file": text.file, **measures([text], loss)} for text, loss in zip(texts, nats)]
        record = {
            "step": trained.step,
            "text": str(self.source),
            "context_length": context_length,
            "stride": stride,
            "dtype": trained.model.config.dtype,
            "is_whole": model.is_whole,
            "files": rows,
            "total": measures(texts, sum(nats)),
        }
        name = join_name_parts(
            "text",
            model.file_name(trained.step),
            short_stem(self.source),
            f"stride{stride}",
            name_hash(str(self.source)),
        )
        return name, record, report.texts_table(rows, record["total"])

    def _stride(self, context_length: int) -> int:
        if self.stride is None:
            return max(1, context_length // 2)
        if not 1 <= self.stride <= context_length:
            raise UserError(
                f"--stride={self.stride}: must be from 1 to {context_length:,}, the model's "
                "context length"
            )
        return self.stride


class Text(NamedTuple):
    file: str
    documents: list[np.ndarray]  # tokens, from begin-of-text to end-of-text
    text_bytes: int
    unencoded: int  # tokens for unknown characters, and characters without a token

    @property
    def num_scored(self) -> int:
        return sum(len(tokens) - 1 for tokens in self.documents)


def _read_texts(source: str | Path, data: DataConfig, tokenizer: Tokenizer) -> list[Text]:
    """Returns the texts of a source, one per file that is not empty. Raises UserError."""
    # Refused, not skipped as in training: a loss over a part would look like that of the whole.
    rules = Rules(
        data.text_field,
        invalid_utf8="refuse",
        invalid_items="refuse",
        max_document_bytes=data.max_document_bytes,
    )
    texts = []
    with _with_advice_of_this_command(str(source), data.text_field):
        for member in Source(str(source), data.text_endings).members:
            for part in member.parts(_WHOLE_FILE):
                documents = [str(text) for text, _read_fraction in part.read(rules) if text]
                if documents:
                    texts.append(encode_text(part.name, documents, tokenizer))
                else:
                    print(f"{part.name}: is empty; left out", file=sys.stderr)
    if not texts:
        raise UserError(f"--text={source}: contains no text; give another file")
    return texts


@contextlib.contextmanager
def _with_advice_of_this_command(source: str, text_field: str) -> Generator[None]:
    """Replaces advice to set fields of the config, which this command does not have."""
    try:
        yield
    except UserError as error:
        message = str(error)
        if "config.data." not in message:
            raise
        problem, _, advice = message.partition("; ")
        remedy = f"give UTF-8 text, or JSON lines with the text in the field {text_field!r}"
        if others := re.match(r"to read its [\d,]+ (\.\S+) files as text", advice):
            remedy = f"{others[0]}, give --text='{source.rstrip('/')}/**/*{others[1]}'"
        problem = problem.replace("config.data.source", "--text")
        raise UserError(f"{problem}; {remedy}") from None


def encode_text(file: str, documents: list[str], tokenizer: Tokenizer) -> Text:
    """Returns the text with its tokens: each document between the tokens that begin and end texts."""
    begin, end = [tokenizer.begin_of_text], [tokenizer.end_of_text]
    tokens = encode(documents, tokenizer)
    unknown = 0
    if tokenizer.unknown is not None:
        unknown = sum(int(np.count_nonzero(ids == tokenizer.unknown)) for ids in tokens)
    return Text(
        file,
        [np.concatenate([begin, ids, end]).astype(np.int32) for ids in tokens],
        sum(len(document.encode()) for document in documents),
        unknown + sum(map(tokenizer.count_dropped, documents)),
    )


def _score_texts(
    texts: Sequence[Text], scorer: Scorer, context_length: int, stride: int
) -> list[float]:
    """Returns the negative log-likelihood of each text, in nats."""
    # The windows of all texts together, so that batches of many short texts are full.
    windows: list[TokenSequence] = []
    text_of_window = []
    for number, text in enumerate(texts):
        for tokens in text.documents:
            windows_of_document = list(split_with_stride(tokens, context_length, stride))
            windows += windows_of_document
            text_of_window += [number] * len(windows_of_document)
    nats = [0.0] * len(texts)
    progress = ScoringProgress()
    progress("windows", 0, len(windows))  # starts its clock, before the first batch compiles
    for done, (window, score) in enumerate(scorer.score(windows), start=1):
        nats[text_of_window[window]] -= score.log_likelihood
        progress("windows", done, len(windows))
    return nats


def measures(texts: Sequence[Text], nats: float) -> dict[str, Any]:
    """Returns the results of texts with a negative log-likelihood of `nats` together."""
    tokens = sum(text.num_scored for text in texts)
    text_bytes = sum(text.text_bytes for text in texts)
    unencoded = sum(text.unencoded for text in texts)
    # per token over all texts, so that a long text counts more than a short one
    loss = nats / tokens
    return {
        "documents": sum(len(text.documents) for text in texts),
        "tokens": tokens,
        "text_bytes": text_bytes,
        "unencoded": unencoded,
        "loss": loss,
        "perplexity": float(np.exp(loss)),
        # The loss is not that of characters without a token.
        "bits_per_byte": None if unencoded else nats / math.log(2) / text_bytes,
    }
