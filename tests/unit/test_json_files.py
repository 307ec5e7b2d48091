"""Tests of smallgpt_jax.storage.json_files: what a schema accepts, and the messages for everything
else.
"""

import json
import tracemalloc

import pytest

from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.bounded import MAX_BYTES, read_bounded
from smallgpt_jax.storage.json_files import (
    ANYTHING,
    BOOLEAN,
    LOSS,
    MAX_VALUES,
    NULL,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    Each,
    Optional,
    integer,
    one_of,
    parse_json,
    read_json,
    read_json_lines,
    read_json_or_none,
)

SCHEMA = {
    "name": TEXT,
    "sizes": Each(integer(1)),
    "rows": [{"loss": (NULL, NUMBER)}],
    "kind": one_of("a", 2),
    "is_open": Optional(BOOLEAN),
}
GOOD = {
    "name": "n",
    "sizes": {"a": 1},
    "rows": [{"loss": None}, {"loss": 1, "more": []}],
    "kind": 2,
    "further": None,
}


def test_accepts_what_matches():
    assert parse_json(json.dumps(GOOD).encode(), SCHEMA) == GOOD
    assert parse_json(b'\xef\xbb\xbf{"is": true}', {"is": BOOLEAN, "was": Optional(BOOLEAN)}) == {
        "is": True
    }
    assert len(parse_json(b"[NaN, -Infinity, 1, 2.5]", [LOSS])) == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"name": 1}, "name: expected a string, found 1"),
        ({"name": None}, "name: expected a string, found null"),
        ({"sizes": {"a": 0}}, "sizes.a: expected an integer of at least 1, found 0"),
        ({"sizes": {"a": True}}, "sizes.a: expected an integer of at least 1, found true"),
        ({"sizes": {"a": 1.0}}, "sizes.a: expected an integer of at least 1, found 1.0"),
        (
            {"sizes": {"a": 10**30}},
            "sizes.a: expected an integer of at least 1, found 1" + "0" * 30,
        ),
        ({"sizes": [1]}, "sizes: expected an object, found an array"),
        ({"rows": [{"loss": 1}, {}]}, "rows[1].loss: missing"),
        ({"rows": {}}, "rows: expected an array, found an object"),
        ({"rows": [{"loss": float("nan")}]}, "rows[0].loss: expected a finite number, found NaN"),
        (
            {"rows": [{"loss": 10**400}]},
            "rows[0].loss: expected a finite number, found 1" + "0" * 39 + "…",
        ),
        ({"kind": 2.0}, 'kind: expected "a" or 2, found 2.0'),
        ({"is_open": "x" * 99}, 'is_open: expected true or false, found "' + "x" * 39 + "…"),
    ],
)
def test_names_the_field(tmp_path, changes, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD | changes))
    with pytest.raises(UserError) as error:
        read_json(path, SCHEMA, "remove it")
    assert str(error.value) == f"{path}: {message}; remove it"
    assert read_json_or_none(path, SCHEMA) is None


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not JSON: Expecting value in line 1"),
        (b'{"a":\n 1', "not JSON: Expecting ',' delimiter in line 2"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"[" * 100_000, "nested deeper than 50 levels"),
        (b"[" * 60 + b"]" * 60, "nested deeper than 50 levels"),
        (b"[" + b"1" * 5000 + b"]", "an integer has thousands of digits"),
        (b" " * (MAX_BYTES + 1), "larger than 67 MB"),
        (b"[" + b"[]," * MAX_VALUES + b"[]]", "has more than 1,048,576 values"),
        (b'{"a":' + b"[]," * MAX_VALUES, "has more than 1,048,576 values"),
        (None, "not a file"),
    ],
)
def test_refuses_what_is_no_json(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_json(path, ANYTHING, "remove it")
    assert str(error.value) == f"{path}: {message}; remove it"


def test_only_the_values_outside_of_strings_count():
    text = ',[{\\"' * (MAX_VALUES // 4)
    assert parse_json(json.dumps({"text": text}).encode(), {"text": TEXT}) == {"text": text}
    assert len(parse_json(b"[" + b"1," * (MAX_VALUES - 2) + b"1]", ANYTHING)) == MAX_VALUES - 1


def test_many_values_are_refused_before_they_take_memory(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b"[]," * 10_000_000 + b"[]]")  # 30 MB, and 1 GB as objects
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="has more than 1,048,576 values"):
            read_json(path, ANYTHING, "remove it")
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_a_device_without_an_end_is_not_read(tmp_path):
    (tmp_path / "a.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a file"):
        read_bounded(tmp_path / "a.json")
    (tmp_path / "b").write_bytes(b"12345")
    assert read_bounded(tmp_path / "b", 5) == b"12345"
    with pytest.raises(ValueError, match="larger than"):
        read_bounded(tmp_path / "b", 4)


def test_skips_lines_that_do_not_match(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"a": 1}\n\xff\n[]\n{"a": 0.5}\n'
        + b'{"a": ' * 9999
        + b'\n{"a": 1e999}\n{"b": 1}\n{"a": 2, "b": 0}'
    )
    assert [line["a"] for line in read_json_lines(path, {"a": POSITIVE})] == [1, 0.5, 2]
    assert len(read_json_lines(path, OBJECT)) == 5
    assert read_json_lines(tmp_path, OBJECT) == read_json_lines(tmp_path / "none", OBJECT) == []
