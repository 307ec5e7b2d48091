"""The architectures against the paper's released PyTorch code: its weights, its logits."""

import io
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_config

from smallgpt_jax import models
from smallgpt_jax.models.pgpt import with_paths


class TensorsOnly(pickle.Unpickler):
    """Reads the tensors of a torch file; whatever else the pickle names becomes an empty stand-in."""

    class StandIn:
        def __init__(self, *args, **kwargs):
            pass

        def __setstate__(self, state):
            self.__dict__.update(state)

    def __init__(self, archive: zipfile.ZipFile, root: str):
        super().__init__(io.BytesIO(archive.read(f"{root}/data.pkl")))
        self._archive, self._root = archive, root

    def find_class(self, module, name):
        if name == "OrderedDict":
            return type("Dictionary", (dict,), {})  # one that takes attributes, as torch gives it
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, strides, *_: np.lib.stride_tricks.as_strided(
                storage[offset:], shape, [s * storage.itemsize for s in strides])
        return self.StandIn

    def persistent_load(self, identifier):
        return np.frombuffer(self._archive.read(f"{self._root}/data/{identifier[2]}"), np.float32)


def read_torch(path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
        return TensorsOnly(archive, root).load()["model"]


def blocks(tensors, prefix, count, heads):
    """Their blocks prefix0, prefix1, … as one stack of ours."""
    def block(i):
        def tensor(name):
            return tensors[f"{prefix}{i}.{name}.weight"]

        width = len(tensor("ln_1"))
        # Theirs: queries, keys and values one after another; ours: head by head.
        qkv = tensor("attn.c_attn").T.reshape(width, 3, heads, width // heads).swapaxes(1, 2)
        out = tensor("attn.c_proj").T.reshape(heads, width // heads, width)
        return {
            "attention_norm": {"scale": tensor("ln_1")},
            "attention": {"qkv": {"kernel": qkv}, "out": {"kernel": out}},
            "mlp_norm": {"scale": tensor("ln_2")},
            "mlp": {"up": {"kernel": tensor("mlp.c_fc").T}, "down": {"kernel": tensor("mlp.c_proj").T}}}

    return jax.tree.map(lambda *layers: np.stack(layers), *(block(i) for i in range(count)))


def trunk(architecture, tensors, heads=4):
    if architecture == "gpt":
        return {"blocks": blocks(tensors, "transformer.h.", 4, heads)}
    if architecture == "pgpt":
        paths = [
            {"dense": {"kernel": tensors[f"transformer.lin_{p}.weight"].T,
                       "bias": tensors[f"transformer.lin_{p}.bias"]},
             "blocks": blocks(tensors, f"transformer.h_{p}.", 2, heads)} for p in (1, 2)]
        return {"paths": jax.tree.map(lambda *x: np.stack(x), *paths),
                "path_logits": tensors["transformer.wt"].reshape(1)}
    if architecture == "lgpt":  # one list of modules: two blocks, a dense layer, two blocks, …
        shifted = {name.replace("h.3.", "h2.0.").replace("h.4.", "h2.1."): x
                   for name, x in tensors.items()}
        return {"stage_0": blocks(tensors, "transformer.h.", 2, heads),
                "stage_1": blocks(shifted, "transformer.h2.", 2, heads),
                **{f"compress_{i}": {"kernel": tensors[f"transformer.h.{place}.weight"].T,
                                     "bias": tensors[f"transformer.h.{place}.bias"]}
                   for i, place in enumerate((2, 5))}}
    stages = {}
    for i in range(2):
        conv = f"transformer.h.{i}.conv_layer"
        stages[f"stage_{i}"] = blocks(tensors, f"transformer.h.{i}.blocks.", 2, heads)
        stages[f"compress_{i}"] = {"kernel": tensors[f"{conv}.weight"].transpose(2, 1, 0),
                                   "bias": tensors[f"{conv}.bias"]}
    return stages


def convert(architecture, tensors):
    """Their weights as the parameters of our model."""
    return jax.tree.map(jnp.asarray, {
        "token_embedding": tensors["transformer.wte.weight"],
        "position_embedding": tensors["transformer.wpe.weight"],
        "trunk": trunk(architecture, tensors),
        "final_norm": {"scale": tensors["transformer.ln_f.weight"]},
        "head": tensors["lm_head.weight"]})


@pytest.mark.parametrize("architecture", ["gpt", "pgpt", "lgpt", "cgpt"])
def test_same_weights_give_the_same_logits(architecture, shared_data):
    params = convert(architecture, read_torch(shared_data / f"gpt_variations/{architecture}.pt"))
    expected = np.load(shared_data / f"gpt_variations/{architecture}.npz")
    model = models.build(**load_config(architecture).model)
    logits = model.apply({"params": params}, expected["tokens"][:, :-1])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", [0, 1])
def test_one_path_alone(path, shared_data):
    params = convert("pgpt", read_torch(shared_data / "gpt_variations/pgpt.pt"))
    expected = np.load(shared_data / "gpt_variations/pgpt.npz")
    config, params = with_paths(models.build(**load_config("pgpt").model).config, params, [path])
    logits = models.LanguageModel(config).apply({"params": params}, expected["tokens"][:, :-1])
    np.testing.assert_allclose(logits, expected[f"path{path}_logits"], atol=1e-5, rtol=1e-5)
