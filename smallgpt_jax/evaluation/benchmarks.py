"""Evaluation on benchmarks: tasks of lm-evaluation-harness."""

import dataclasses
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax import inference, models
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError, install_command, require_list
from smallgpt_jax.evaluation import lm_eval_tasks, report
from smallgpt_jax.evaluation.model_options import ModelOptions, join_name_parts, name_hash
from smallgpt_jax.evaluation.progress import ScoringProgress
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.run.metrics import ANSWER_BITS, ANSWER_MARGIN
from smallgpt_jax.storage.cache import cache_folder
from smallgpt_jax.storage.paths import local_path

_SCORING_VERSION = 3  # part of the cache key; increase it when a code change affects the scores
SEED = 1234
# Metrics that divide by bytes or words of a text, which the model must have seen as a whole.
PER_TEXT = ("bits_per_byte", "byte_perplexity", "word_perplexity", ANSWER_BITS, ANSWER_MARGIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmarks:
    # names of the harness; "paper": the seven tasks of arXiv 2404.14462; "core" and "babylm"
    tasks: Sequence[str]
    # folder with the benchmarks' original files; None: they come from the Hugging Face hub
    data_dir: str | Path | None = None
    num_fewshot: int | None = None  # examples before each question; None: the task's own number
    seed: int = SEED  # of the choice of these examples, and of sampled texts
    gen_kwargs: str | None = None  # of tasks that generate text, such as "temperature=0.8"

    def __post_init__(self):
        require_list("tasks", self.tasks)

    def score(
        self, workdir: Path, model: ModelOptions, limit: float | None, log_samples: bool
    ) -> tuple[str, dict, str]:
        """Returns the name of the files to write, the results, and a table of them."""
        try:
            from smallgpt_jax.evaluation.lm_eval_model import SmallGPT
        except ImportError:
            raise UserError(
                f"lm-evaluation-harness is not installed; run {install_command('eval')}"
            ) from None
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed}: must be at least 0 and below 2^32")
        data_folder = self._data_folder()
        trained = model.load(workdir)
        template = inference.find_chat_template(workdir)
        end_of_turn = template.end_of_turn if template else None

        built = []  # to read its counts afterwards; nothing is built where a task is wrong

        def build() -> SmallGPT:
            lm = SmallGPT(model.scorer(trained), trained, ScoringProgress(), self.seed, end_of_turn)
            built.append(lm)
            return lm

        results = lm_eval_tasks.evaluate(
            build,
            self.tasks,
            data_folder,
            cache=_cache_of(trained, end_of_turn),
            num_fewshot=self.num_fewshot,
            limit=int(limit) if limit and limit >= 1 else limit,  # below 1: a fraction
            random_seed=self.seed,
            numpy_random_seed=self.seed,
            torch_random_seed=self.seed,
            fewshot_random_seed=self.seed,
            gen_kwargs=self.gen_kwargs,
            log_samples=log_samples,
        )
        unencoded = sum(lm.unencoded for lm in built)
        # characters that are not encoded cost no bits
        if unencoded:
            print(
                f"warning: {unencoded:,} texts have characters that the model's tokenizer cannot "
                f"encode; {', '.join(PER_TEXT)} are left out",
                file=sys.stderr,
            )
            leave_out(PER_TEXT, results)
        table = report.results_table(results, _name_in_paper(trained, model))
        return self._file_name(model.file_name(trained.step), limit), results, table

    def _data_folder(self) -> Path | None:
        if not self.data_dir:
            return None
        folder = local_path("--data_dir", self.data_dir)
        if not folder.is_dir():
            raise UserError(
                f"--data_dir={folder}: no such folder; create it, or omit the flag to use the "
                "Hugging Face hub"
            )
        return folder

    def _file_name(self, of_model: str, limit: float | None) -> str:
        name = join_name_parts(
            of_model,
            _short("_".join(self.tasks), 80),
            None if self.num_fewshot is None else f"{self.num_fewshot}shot",
            None if limit is None else f"limit{limit:g}",
            None if self.seed == SEED else f"seed{self.seed}",
            self.gen_kwargs,
            # another folder has other questions
            None if self.data_dir is None else name_hash(str(Path(self.data_dir).absolute())),
        )
        return _short(name, 200)  # file systems limit names to 255 bytes


def _name_in_paper(trained: inference.TrainedModel, options: ModelOptions) -> str:
    """Returns the model's name in arXiv 2404.14462, or its architecture if it is not there."""
    config = trained.model.config
    is_one_path = options.paths != "all" and getattr(config, "num_paths", 0) == 1
    return "pgpt, one path" if is_one_path else config.architecture


def leave_out(metrics: Sequence[str], results: dict) -> None:
    """Sets metrics to None in results of the harness."""
    for values in results["results"].values():
        for key in values:
            if key.partition(",")[0] in metrics:
                values[key] = None


def _short(name: str, length: int) -> str:
    """Returns the name, cut if it has more bytes. Different names stay different."""
    encoded = name.encode()
    if len(encoded) <= length:
        return name
    digest = name_hash(name)
    return f"{encoded[: length - len(digest) - 1].decode(errors='ignore')}-{digest}"


def _cache_of(trained: inference.TrainedModel, end_of_turn: int | None) -> Path | None:
    """Returns the file of finished requests; None for custom code, which may change."""
    if models.custom_classes(trained.model.config):
        return None
    return cache_folder() / "scores" / f"{_model_fingerprint(trained, end_of_turn)}.jsonl"


def _model_fingerprint(trained: inference.TrainedModel, end_of_turn: int | None) -> str:
    """Returns a hash of all that the scores depend on: equal models of all runs share a cache."""
    # not the workdir or the step: two runs with the same weights have the same scores
    variables = [bit_checksums(tree) for tree in (trained.params, trained.model_state) if tree]
    content = [
        _SCORING_VERSION,
        repr(trained.model),  # its config, and the blocks that are left out
        *variables,
        tokenizers.fingerprint(trained.tokenizer),
        end_of_turn,
        importlib.metadata.version("lm_eval"),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
