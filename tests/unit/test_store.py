"""Tests of token stores: fingerprints, damage, mixtures."""

import json
import shutil

import numpy as np
import pytest
from conftest import load_config
from data_helpers import prepare_store, write_jsonl

from smallgpt_jax.data import batches, encoding, store
from smallgpt_jax.data.corpus import Corpus, open_mixture, same_text
from smallgpt_jax.data.store_spec import StoreSpec, readable_name
from smallgpt_jax.errors import UserError


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Returns a folder with two stores of the same text: `one` has byte tokens, and `two` has
    SentencePiece tokens.
    """
    folder = tmp_path_factory.mktemp("stores")
    texts = write_jsonl(
        folder / "texts.jsonl", [f"document {i} " + "text " * (i % 50) for i in range(300)]
    )
    prepare_store(folder / "one", texts)
    prepare_store(folder / "two", texts, tokenizer="sentencepiece:300")
    return folder


def test_fingerprints_identify_content(tmp_path):
    """Two stores of the same text have equal fingerprints, even if the names of the source files
    differ.

    Stores of different texts have different fingerprints, even if the texts have the same size.
    """
    texts = [f"document {n:05d}" for n in range(1000)]
    other = next(
        text
        for text in (f"document {n:05d}" for n in range(1000, 2000))
        if not encoding.is_validation(text, 0.2)
    )
    changed = next(i for i, text in enumerate(texts) if not encoding.is_validation(text, 0.2))
    made = {}
    for name, documents in (
        ("a", texts),
        ("b", texts),
        ("c", [*texts[:changed], other, *texts[changed + 1 :]]),
    ):
        made[name] = prepare_store(
            tmp_path / name, write_jsonl(tmp_path / f"{name}.jsonl", documents)
        )
    a, b, c = (made[name].metadata for name in "abc")
    assert a["splits"] == b["splits"] == c["splits"] and a["fingerprints"] == b["fingerprints"]
    assert same_text(a, b) and not same_text(a, c)
    assert a["fingerprints"]["validation"] == c["fingerprints"]["validation"]
    mixtures = [Corpus((made[name], made["b"]), (0.5, 0.5)).description for name in "abc"]
    assert same_text(mixtures[0], mixtures[1]) and not same_text(mixtures[0], mixtures[2])


def test_cached_store_depends_on_tokenizer_file(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    config = load_config(
        "gpt", data__source=str(source), data__tokenizer=str(tmp_path / "my.model")
    ).data
    (tmp_path / "my.model").write_bytes(b"one")
    before = StoreSpec.of(config).folder
    (tmp_path / "my.model").write_bytes(b"two")
    assert StoreSpec.of(config).folder != before


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def set_field(folder, *path_and_value):
    """Sets a field of metadata.json: set_field(folder, "splits", "train", "tokens", 7)."""
    *path, name, value = path_and_value
    content = fields = json.loads((folder / "metadata.json").read_text())
    for part in path:
        fields = fields[part]
    fields[name] = value
    (folder / "metadata.json").write_text(json.dumps(content))


def set_start(folder, document, start):
    starts = np.fromfile(folder / "train.documents.bin", np.int64)
    starts[document] = start
    starts.tofile(folder / "train.documents.bin")


@pytest.mark.parametrize(
    "damage, substrings",
    [
        (lambda f: (f / "metadata.json").write_text("{"), ["metadata.json: not JSON"]),
        (lambda f: (f / "metadata.json").write_text("[]"), ["metadata.json: expected an object"]),
        (
            lambda f: (f / "metadata.json").write_text('{"format": 99}'),
            ["format 99", "rerun smallgpt_jax.prepare"],
        ),
        (
            lambda f: (f / "metadata.json").write_text('{"format": 3}'),
            ["metadata.json: made_from: missing"],
        ),
        (
            lambda f: set_field(f, "splits", "train", "text_bytes", 0),
            ["splits.train.text_bytes: expected an integer"],
        ),
        (
            lambda f: set_field(f, "splits", "train", "tokens", 1e3),
            ["splits.train.tokens: expected an integer"],
        ),
        (
            lambda f: set_field(f, "splits", "validation", "documents", "7"),
            ["splits.validation.documents", 'found "7"'],
        ),
        (lambda f: set_field(f, "dtype", "float16"), ["dtype: expected", 'found "float16"']),
        (
            lambda f: set_field(f, "vocab_size", 300),
            ["vocab_size: 300, but the store's tokenizer has 257"],
        ),
        (
            lambda f: set_field(f, "end_of_text", 5),
            ["end_of_text: 5, but the store's tokenizer has 256"],
        ),
        (
            lambda f: set_start(f, 0, 3),
            ["train.documents.bin: damaged, the documents are not in order"],
        ),
        (
            lambda f: set_start(f, 7, 2),
            ["train.documents.bin: damaged, the documents are not in order"],
        ),
        (
            lambda f: set_start(f, -1, 2**40),
            ["train.documents.bin: damaged, the documents are not in order"],
        ),
        (lambda f: (f / "train.bin").unlink(), ["train.bin", "missing"]),
        (lambda f: cut(f / "train.bin"), ["train.bin", "damaged, has"]),
        (lambda f: cut(f / "validation.documents.bin"), ["validation.documents.bin", "damaged"]),
        (
            lambda f: (f / "tokenizer" / "tokenizer_kind.json").write_text("{"),
            ["tokenizer_kind.json"],
        ),
        (lambda f: shutil.rmtree(f / "tokenizer"), ["tokenizer", "missing"]),
    ],
)
def test_names_damaged_files(stores, tmp_path, damage, substrings):
    shutil.copytree(stores / "one", tmp_path / "store")
    damage(tmp_path / "store")
    with pytest.raises(UserError) as error:
        store.open_store(tmp_path / "store").tokenizer  # noqa: B018
    assert all(s in str(error.value) for s in substrings), str(error.value)


def test_further_fields_of_the_metadata_are_ignored(stores, tmp_path):
    """A later version may write them."""
    shutil.copytree(stores / "one", tmp_path / "store")
    for place in ((), ("splits",), ("splits", "train"), ("made_from",), ("fingerprints",)):
        set_field(tmp_path / "store", *place, "further", 7)
    opened = store.open_store(tmp_path / "store")
    assert opened.train.tokens == store.open_store(stores / "one").train.tokens


@pytest.mark.parametrize(
    "text, substrings",
    [
        ("STORES/one", ["is not FOLDER=WEIGHT"]),
        ("STORES/one=much", ["STORES/one=much", "is not FOLDER=WEIGHT"]),
        ("STORES/one=0", ["weight above 0"]),
        ("STORES/one=1,", ["''"]),
        (
            "STORES/one=1,STORES/two=1",
            ["different tokenizers", "--config.data.tokenizer=STORES/one/tokenizer"],
        ),
        ("STORES/none=1", ["STORES/none: no token store", "prepare it"]),
    ],
)
def test_refuses_bad_mixtures(stores, text, substrings):
    with pytest.raises(UserError) as error:
        open_mixture(text.replace("STORES", str(stores)))
    assert all(s.replace("STORES", str(stores)) in str(error.value) for s in substrings), str(
        error.value
    )


@pytest.mark.parametrize(
    "source, name",
    [
        ("my_texts/**/*.md", "my_texts_md"),
        ("texts/*.txt", "texts_txt"),
        ("**/*", "text"),
        ("one.jsonl", "one"),
        ("hf:some/corpus", "corpus"),
        ("python_stdlib", "python_stdlib"),
    ],
)
def test_the_names_of_stores_in_the_cache_show_the_source(source, name):
    assert readable_name(source) == name


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("dtype, foreign", [("uint16", 257), ("uint32", 2**31 + 5)])
def test_refuses_ids_that_are_not_in_the_vocabulary(stores, tmp_path, packing, dtype, foreign):
    """A batch that contains such an id ends the run with a message; all other batches can be
    read.
    """
    folder = shutil.copytree(stores / "one", tmp_path / "store")
    for split in store.SPLITS:
        np.fromfile(folder / f"{split}.bin", np.uint16).astype(dtype).tofile(
            folder / f"{split}.bin"
        )
    set_field(folder, "dtype", dtype)
    corpus = Corpus((store.open_store(folder),), (1.0,))
    ids = np.memmap(folder / "train.bin", dtype, "r+")
    ids[len(ids) // 2] = (
        foreign  # after opening, which reads only a sample of the ids, but all of this small store
    )
    ids.flush()
    rows = corpus.pack("train", packing, False, 32)
    readable = 0
    with pytest.raises(
        UserError,
        match=rf"train.bin: damaged, has the id {foreign}, but its vocabulary has only 257",
    ):
        for row in range(rows.num_rows):
            rows.read_rows(np.array([row]))
            readable += 1
    assert 0 < readable < rows.num_rows
    with pytest.raises(UserError, match=r"train\.bin: damaged, has the id"):
        for _, _ in zip(
            range(rows.num_rows),
            batches.read_ahead(batches.train_batches(rows, 4, 0), 0, workers=2),
        ):
            pass
    with pytest.raises(UserError, match=r"train\.bin: damaged, has the id"):
        store.open_store(folder)


def test_messages_name_the_store_as_given(stores, tmp_path, monkeypatch):
    """A store in object storage is read from a local copy, whose path the user does not know."""
    copy = shutil.copytree(stores / "one", tmp_path / "copy")
    monkeypatch.setattr(store, "local_copy", lambda _: copy)
    opened = store.open_store(stores / "one")
    with pytest.raises(UserError, match=f"^{stores}/one/validation.bin: damaged, has the id 257"):
        opened.validation.check_ids(np.int32([5, 257]))
    np.full(opened.train.tokens, 300, np.uint16).tofile(copy / "train.bin")
    with pytest.raises(UserError, match=f"^{stores}/one/train.bin: damaged, has the id 300"):
        store.open_store(stores / "one")
    cut(copy / "train.bin")
    with pytest.raises(UserError, match=f"^{stores}/one/train.bin: damaged, has "):
        store.open_store(stores / "one")


def test_refuses_a_mixture_that_trains_on_validation_documents(tmp_path):
    """The message counts the training documents of one store that another store has in its
    validation split.
    """
    common, own, other = (
        [f"document {i} of {name} " + "text " * (i % 9) for i in range(200)] for name in "abc"
    )
    for name, texts, fraction in (
        ("small", common + own, 0.1),
        ("large", common + other, 0.4),
        ("none", other, 0.3),
        ("same", common + other, 0.1),
    ):
        prepare_store(
            tmp_path / name,
            write_jsonl(tmp_path / f"{name}.jsonl", texts),
            validation_fraction=fraction,
        )
    leaked = sum(
        encoding.is_validation(text, 0.4) and not encoding.is_validation(text, 0.1)
        for text in common
    )
    train = sum(not encoding.is_validation(text, 0.1) for text in common + own)
    assert leaked > 20
    for names in (("small", "large"), ("large", "small")):
        text = ",".join(f"{tmp_path}/{name}=1" for name in names)
        with pytest.raises(UserError) as error:
            open_mixture(text)
        assert str(error.value) == (
            f"config.data.mixture={text!r}: {leaked} of the {train} training documents of "
            f"'{tmp_path}/small' are validation documents of '{tmp_path}/large'; prepare all "
            "stores with the same config.data.validation_fraction"
        )
    for other in ("same", "none"):  # the same fraction, and other text
        assert len(open_mixture(f"{tmp_path}/small=1,{tmp_path}/{other}=1").stores) == 2
