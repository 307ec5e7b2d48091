"""Uploads exported models to the Hugging Face hub."""

import re
from pathlib import Path

from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.formatting import short_reason

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def check_repository(name: str) -> None:
    """Raises UserError for a name that is no OWNER/NAME, and if nobody is logged in."""
    if not _REPOSITORY.fullmatch(name):
        raise UserError(f"--push={name}: expected OWNER/NAME, such as ada/my-model")
    # before the export, which can take minutes
    if import_library("huggingface_hub").get_token() is None:
        raise UserError(
            f"--push={name}: not logged in at the Hugging Face hub; run `hf auth login`, or set "
            "the environment variable HF_TOKEN"
        )


def push(output: Path, repository: str, is_private: bool) -> str:
    """Uploads a file, or the files of a folder, as one commit, and returns its address. Creates the
    repository if it does not exist. Raises UserError if that fails; `output` stays.
    """
    hub = import_library("huggingface_hub")
    try:
        hub.create_repo(repository, private=is_private, exist_ok=True)
        if output.is_dir():
            commit = hub.upload_folder(repo_id=repository, folder_path=output)
        else:
            commit = hub.upload_file(
                repo_id=repository, path_or_fileobj=output, path_in_repo=output.name
            )
    except Exception as error:  # errors of the hub or the network
        raise UserError(
            f"--push={repository}: the upload failed ({short_reason(error)}); the export is "
            f"complete, so repeat only the upload: hf upload {repository} {output}"
        ) from None
    return f"{commit.repo_url}/tree/{commit.oid}"
