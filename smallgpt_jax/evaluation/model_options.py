"""Which weights of a run are evaluated, and how."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax import inference
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scoring import Scorer

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    step: int | None = None  # of the checkpoint; None: the newest
    paths: str | Sequence[int] = "all"  # of a pgpt: "all", "best", or indices such as "0,1"
    skip_blocks: Sequence[str | int] = ()  # numbers of blocks to leave out
    dtype: str | None = None  # of the computation; None: as in training
    batch_tokens: int = 8192  # most token positions per device in a batch
    trust_custom_code: bool = False  # import the modules of custom classes

    def load(self, workdir: Path) -> inference.TrainedModel:
        """Returns the model of a workdir with these options. Raises UserError."""
        if self.dtype not in (None, *DTYPES):
            raise UserError(f"--dtype={self.dtype}: must be one of {', '.join(DTYPES)}")
        trained = inference.load_trained(workdir, self.step, self.trust_custom_code)
        inference.require_next_tokens(trained.model)
        trained = trained.with_paths(self.paths).without_blocks(self.skip_blocks)
        return trained if self.dtype is None else trained.with_dtype(self.dtype)

    def scorer(self, trained: inference.TrainedModel) -> Scorer:
        return Scorer(
            trained.model, trained.params, self.batch_tokens, model_state=trained.model_state
        )

    @property
    def is_whole(self) -> bool:
        """Whether the model is evaluated as it was trained: all parts, in its own dtype."""
        return self.paths == "all" and not self.skip_blocks and self.dtype is None

    def file_name(self, step: int) -> str:
        """Returns the step and what differs from the defaults, for names of files."""
        paths = self.paths if isinstance(self.paths, str) else ",".join(map(str, self.paths))
        skipped = "_".join(map(str, self.skip_blocks))
        return join_name_parts(
            f"step{step}",
            "" if paths == "all" else f"paths{paths}",
            skipped and f"without{skipped}",
            self.dtype,
        )


def join_name_parts(*parts: str | None) -> str:
    return "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts if part)


def short_stem(path: str | Path) -> str:
    """Returns the path's name for readers, cut to 100 bytes: file systems limit names to 255."""
    # A name that is no UTF-8 has surrogates.
    return Path(path).stem.encode(errors="replace")[:100].decode(errors="ignore")


def name_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
