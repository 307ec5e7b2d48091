"""What a run needs before it starts: a checked config, its program and its text. Writes nothing."""

import json
from pathlib import Path

import jax
from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import DataPipeline, make_pipeline
from smallgpt_jax.data.probe_corpus import ProbeCorpus
from smallgpt_jax.devices import distributed, sharding
from smallgpt_jax.models.causality_check import check_causality
from smallgpt_jax.models.kernel_check import check_attention_kernels, check_recurrence_kernels
from smallgpt_jax.run import trackers
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.workdir import check_workdir, config_in_workdir
from smallgpt_jax.training.branch import Branch, open_branch
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.checks import (
    check_processes,
    require_32_bits,
    require_learning_rate,
    require_mask_token,
)
from smallgpt_jax.training.program import Program
from smallgpt_jax.training.size_messages import size_messages


def check_run(config: ConfigDict | Config, folder: Path) -> tuple[Config, Branch | None, Program]:
    """Checks the config, the workdir and the devices, and prints what follows from the size.
    Writes nothing. The number of microbatches may still be open, and is 1 in the program.
    """
    require_32_bits()
    check_processes(folder)
    config = config_in_workdir(config, folder)

    def check() -> Branch | None:
        check_workdir(folder, config)
        require_learning_rate(config)
        return open_branch(folder, config)

    branch = distributed.run_on_primary(check)
    # Processes with other programs would wait for each other's collectives forever.
    distributed.require_equal("config", json.dumps(config.to_dict(), sort_keys=True))
    # Before the checks of custom modules, which take seconds.
    for line in size_messages(config):
        print(line, flush=True)
    program = shared_program(config)
    if program.teacher:  # it has the step of its newest checkpoint, if the config gives none
        config = config.replace(train={"teacher_step": program.teacher.step})
    distributed.require_equal("config.train.teacher_step", f"{config.train.teacher_step}")
    trackers.require_installed(config.train.tracker)
    check_attention_kernels(program.model, program.mesh, config.data.separate_documents)
    check_recurrence_kernels(program.model, program.mesh)
    if models.custom_classes(config.model):
        # Simulated devices must not run two programs at a time (`Program._wait_if_simulated`).
        state = jax.block_until_ready(program.initial_state(config.train.seed))
        with sharding.use_mesh(program.mesh):
            check_causality(
                program.model, state.params, state.model_state, config.data.separate_documents
            )
    return config, branch, program


def open_pipeline(
    config: ConfigDict | Config, program: Program, corpus: Corpus | ProbeCorpus | None = None
) -> DataPipeline:
    """Returns the data of a run. Raises UserError if the text does not suit the model."""
    config = Config.of(config)
    pipeline = make_pipeline(
        program.mesh, config.data, config.model, config.train, config.data_seed, corpus
    )
    if program.teacher:
        program.teacher.check_tokenizer(pipeline.corpus.tokenizer)
    if config.train.objective == "masked":
        require_mask_token(config.model, pipeline.corpus.tokenizer)
        return pipeline.with_vocab_size()
    return pipeline
