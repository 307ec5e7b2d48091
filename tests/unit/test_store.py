"""Tests of token stores: fingerprints, damage, mixtures."""

import json
import shutil
from types import SimpleNamespace

import pytest
from conftest import load_config
from data_helpers import prepare_store, write_jsonl

from smallgpt_jax import data
from smallgpt_jax.data import encoding, store
from smallgpt_jax.errors import UserError


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Returns a folder with two stores of the same text: `one` has byte tokens, and `two` has SentencePiece tokens."""
    folder = tmp_path_factory.mktemp("stores")
    texts = write_jsonl(folder / "texts.jsonl", [f"document {i} " + "text " * (i % 50) for i in range(300)])
    prepare_store(folder / "one", texts)
    prepare_store(folder / "two", texts, tokenizer="sentencepiece:300")
    return folder



def test_fingerprints_identify_content(tmp_path):
    """Two stores of the same text have equal fingerprints, even if the names of the source files differ.

    Stores of different texts have different fingerprints, even if the texts have the same size.
    """
    texts = [f"document {n:05d}" for n in range(1000)]
    other = next(text for text in (f"document {n:05d}" for n in range(1000, 2000))
                 if not encoding.is_validation(text, 0.2))
    changed = next(i for i, text in enumerate(texts) if not encoding.is_validation(text, 0.2))
    made = {}
    for name, documents in (("a", texts), ("b", texts), ("c", [*texts[:changed], other, *texts[changed + 1:]])):
        made[name] = prepare_store(tmp_path / name, write_jsonl(tmp_path / f"{name}.jsonl", documents))
    a, b, c = (made[name].metadata for name in "abc")
    assert a["splits"] == b["splits"] == c["splits"] and a["fingerprints"] == b["fingerprints"]
    assert data.same_text(a, b) and not data.same_text(a, c)
    assert a["fingerprints"]["validation"] == c["fingerprints"]["validation"]
    mixtures = [data.Corpus((made[name], made["b"]), (0.5, 0.5)).description for name in "abc"]
    assert data.same_text(mixtures[0], mixtures[1]) and not data.same_text(mixtures[0], mixtures[2])
    # The metadata of stores that were prepared by older versions has no fingerprints.
    old = {field: value for field, value in a.items() if field != "fingerprints"}
    (tmp_path / "a" / "metadata.json").write_text(json.dumps(old))
    for split in store.SPLITS:
        assert store.open_store(tmp_path / "a").fingerprint(split) == a["fingerprints"][split]
    assert data.same_text(old, a) and data.same_text(old, old) and not data.same_text(old, b)


def test_cached_store_depends_on_tokenizer_file(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    config = load_config("gpt", data__source=str(source), data__tokenizer=str(tmp_path / "my.model")).data
    (tmp_path / "my.model").write_bytes(b"one")
    before = data.store_folder(config)
    (tmp_path / "my.model").write_bytes(b"two")
    assert data.store_folder(config) != before


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage, substrings", [
    (lambda f: (f / "metadata.json").write_text("{"), ["metadata.json"]),
    (lambda f: (f / "metadata.json").write_text("[]"), ["metadata.json"]),
    (lambda f: (f / "metadata.json").write_text('{"format": 99}'), ["format 99", "rerun smallgpt_jax.prepare"]),
    (lambda f: (f / "metadata.json").write_text('{"format": 2}'), ["metadata.json: damaged"]),
    (lambda f: (f / "train.bin").unlink(), ["train.bin", "missing"]),
    (lambda f: cut(f / "train.bin"), ["train.bin", "damaged, has"]),
    (lambda f: cut(f / "validation.documents.bin"), ["validation.documents.bin", "damaged"]),
    (lambda f: (f / "tokenizer" / "tokenizer_kind.json").write_text("{"), ["tokenizer_kind.json"]),
    (lambda f: shutil.rmtree(f / "tokenizer"), ["tokenizer", "missing"]),
])
def test_names_damaged_files(stores, tmp_path, damage, substrings):
    shutil.copytree(stores / "one", tmp_path / "store")
    damage(tmp_path / "store")
    with pytest.raises(UserError) as error:
        store.open_store(tmp_path / "store").tokenizer  # noqa: B018
    assert all(s in str(error.value) for s in substrings), str(error.value)


@pytest.mark.parametrize("text, substrings", [
    ("STORES/one", ["is not FOLDER=WEIGHT"]),
    ("STORES/one=much", ["STORES/one=much", "is not FOLDER=WEIGHT"]),
    ("STORES/one=0", ["weight above 0"]),
    ("STORES/one=1,", ["''"]),
    ("STORES/one=1,STORES/two=1", ["different tokenizers", "--config.data.tokenizer=STORES/one/tokenizer"]),
    ("STORES/none=1", ["STORES/none", "not the metadata of a token store"]),
])
def test_refuses_bad_mixtures(stores, text, substrings):
    with pytest.raises(UserError) as error:
        data.open_mixture(text.replace("STORES", str(stores)))
    assert all(s.replace("STORES", str(stores)) in str(error.value) for s in substrings), str(error.value)


@pytest.mark.parametrize("source, name", [
    ("my_texts/**/*.md", "my_texts_md"), ("texts/*.txt", "texts_txt"), ("**/*", "text"), ("one.jsonl", "one"),
    ("hf:some/corpus", "corpus"), ("python_stdlib", "python_stdlib")])
def test_the_names_of_stores_in_the_cache_show_the_source(source, name):
    assert data.cached_name(SimpleNamespace(source=source)).rpartition("-")[0] == name
