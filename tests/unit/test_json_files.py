"""Tests of smallgpt_jax.storage.json_files: what a schema accepts, and the messages for everything
else.
"""

import json

import pytest

from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.json_files import (
    ANYTHING,
    BOOLEAN,
    LOSS,
    MAX_BYTES,
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
        (b" " * (MAX_BYTES + 1), "larger than 134 MB"),
        (None, "not a file"),
    ],
)
def test_refuses_what_is_no_json(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_json(path, ANYTHING, "remove it")
    assert str(error.value) == f"{path}: {message}; remove it"


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
