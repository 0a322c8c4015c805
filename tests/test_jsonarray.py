"""One large JSON array: its elements as they stand, against json and ijson as oracles."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import ijson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import GristmillError
from gristmill.jsonarray import NotAnArray, array_elements


def chunked(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    start, turn = 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        yield data[start : start + size]
        start, turn = start + size, turn + 1


def elements(data: bytes, sizes: tuple[int, ...] = (1 << 20,), **settings: Any) -> list[bytes]:
    found = list(array_elements(chunked(data, list(sizes)), "f.json", **settings))
    assert [element[0] for element in found] == list(range(1, len(found) + 1))
    return [element[1] for element in found]


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8)
# Text that looks like structure.
TRICKY = st.text(st.sampled_from('[]{}",:\\ requests\n\u2028é'), max_size=12)
VALUES = st.recursive(
    SCALARS | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5) | TRICKY, VALUES, max_size=4)
KEYS = (st.text(max_size=5) | TRICKY).filter(lambda key: key != "requests")
OTHERS = st.dictionaries(KEYS, VALUES, max_size=3)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)
INDENT = st.sampled_from([None, 0, 2, "\t"])


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(OBJECTS | VALUES, max_size=6), before=OTHERS, after=OTHERS, sizes=SIZES, indent=INDENT)
def test_elements_of_requests(
    requests: list[Any], before: dict[str, Any], after: dict[str, Any], sizes: tuple[int, ...], indent: int | str | None
) -> None:
    after = {key: value for key, value in after.items() if key not in before}
    data = json.dumps({**before, "requests": requests, **after}, indent=indent).encode()
    assert [json.loads(text) for text in elements(data, sizes)] == requests
    assert requests == list(ijson.items(io.BytesIO(data), "requests.item"))


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(OBJECTS | VALUES, max_size=6), sizes=SIZES, indent=INDENT, ascii=st.booleans())
def test_elements_of_a_bare_array(
    requests: list[Any], sizes: tuple[int, ...], indent: int | str | None, ascii: bool
) -> None:
    data = json.dumps(requests, indent=indent, ensure_ascii=ascii).encode()
    assert [json.loads(text) for text in elements(data, sizes)] == requests


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(OBJECTS, min_size=1, max_size=4), data=st.data(), sizes=SIZES, bare=st.booleans())
def test_a_file_that_ends_early_is_an_error(
    requests: list[Any], data: st.DataObject, sizes: tuple[int, ...], bare: bool
) -> None:
    whole = json.dumps(requests if bare else {"a": 1, "requests": requests}).encode()
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    with pytest.raises((GristmillError, NotAnArray)):
        elements(cut, sizes)


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(OBJECTS, min_size=1, max_size=3),
    data=st.data(),
    sizes=SIZES,
    byte=st.sampled_from(list(b'[]{}",:x1 \\')),
)
def test_no_wrong_byte_loses_a_row_in_silence(
    requests: list[Any], data: st.DataObject, sizes: tuple[int, ...], byte: int
) -> None:
    """A file with one byte changed is refused, or is JSON, or its damage lies within elements."""
    whole = bytearray(json.dumps({"a": 1, "requests": requests, "b": [2]}).encode())
    whole[data.draw(st.integers(0, len(whole) - 1))] = byte
    try:
        found = elements(bytes(whole), sizes)
    except (GristmillError, NotAnArray):
        return
    try:
        expected = json.loads(whole)
    except ValueError:
        with pytest.raises(ValueError):
            [json.loads(text) for text in found]
    else:
        assert [json.loads(text) for text in found] == expected["requests"]


def test_bytes_are_kept_as_they_stand() -> None:
    texts = [
        b'{"n": 12345678901234567890123, "f": 1e400, "x": NaN}',
        b'{"a":"\\ud800","a":"\xff\xed\xa0\x80","a":"\\\\\\"]}"}',
        b'{"bad": }',
        b'{"id": "]", "s": "\\\\"}',
        b"[1, [2]]",
    ]
    data = b'{"requests": [' + b" ,\r\n\t".join(texts) + b"]}"
    for size in range(1, 60):
        assert elements(data, (size,)) == texts


def test_offsets_say_where_elements_start() -> None:
    data = b' {"x": [1], "requests": [ {"id": "a"},\n {"id": [2]} ]}'
    for size in (1, 7, 1000):
        for element in array_elements(chunked(data, [size]), "f.json"):
            assert element.offset is not None
            assert data[element.offset :].startswith(element.text)


def test_elements_that_are_no_objects_keep_their_places() -> None:
    data = b'[1, {"id": 1}, "a, [b]", null, {"id": 2}, [3], true, -1.5e3]'
    expected = [b"1", b'{"id": 1}', b'"a, [b]"', b"null", b'{"id": 2}', b"[3]", b"true", b"-1500.0"]
    for size in range(1, 40):
        assert elements(data, (size,)) == expected


BROKEN = {
    "a comma too many": (b'[{"a": 1},]', "Unexpected|unexpected|empty place|trailing"),
    "a comma at the beginning": (b'[,{"a": 1}]', "expected|empty place"),
    "two commas": (b'[{"a": 1},,{"b": 1}]', "expected|empty place"),
    "no comma": (b'[{"a": 1} {"b": 1}]', "a comma is missing after element 1"),
    "a word": (b'[{"a": 1}, word, {"b": 1}]', "after element 1"),
    "text after the end": (b'[{"a": 1}] x', "what stands around the elements"),
    "a string after the end": (b'[{"a": 1}] "x"', "what stands around the elements"),
    "a second array": (b'[{"a": 1}][{"b": 1}]', "what stands around the elements"),
    "a second object": (b'{"requests": [{"a": 1}]}{"requests": []}', "what stands around the elements"),
    "text between": (b'{"requests": [{"a": 1}] x}', "what stands around the elements"),
    "text before": (b'{x "requests": [{"a": 1}]}', "what stands around the elements"),
    "the wrong bracket": (b'[{"a": 1}}', "what stands around the elements"),
    "requests twice": (b'{"requests": [{"a": 1}], "requests": [{"b": 1}]}', '"requests" twice'),
    "no end": (b'[{"a": 1}', "ends too early"),
    "no end of an element": (b'[{"a": 1}, {"b": 1', "ends inside element 2"),
    "no end of a string": (b'[{"a": 1}, {"b": "1}]', "ends inside element 2"),
    "no end of the outer object": (b'{"requests": [{"a": 1}]', "what stands around the elements"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_an_error(data: bytes, message: str) -> None:
    for size in (1, 5, 1000):
        with pytest.raises(GristmillError, match=message) as caught:
            elements(data, (size,))
        assert str(caught.value.where).startswith("f.json")


NOT_ARRAYS = {
    "nothing": b"",
    "blanks": b" \n\t\r\n",
    "an object": b'{"id": 1, "messages": [{"role": "user"}]}',
    "two lines": b'{"id": 1}\n{"requests": [1]}\n',
    "requests as a value": b'{"a": "requests", "b": [{"id": 1}]}',
    "requests deeper": b'{"a": {"requests": [{"id": 1}]}}',
    "requests is an object": b'{"requests": {"a": [1]}}',
    "a sentence with brackets": b"see [1] and [2]",
    "a table with brackets": b'id,text\n1,"see [1], {2}"\n',
    "a number": b"12",
    "a string": b'"[1]"',
}


@pytest.mark.parametrize("data", NOT_ARRAYS.values(), ids=NOT_ARRAYS.keys())
def test_what_is_no_array(data: bytes) -> None:
    for size in (1, 5, 1000):
        with pytest.raises(NotAnArray):
            elements(data, (size,))


LONG = b"x" * 5000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"a": "' + LONG + b'"}]', "element 1 is over"),
        (b'[{"a": 1}, {"a": [' + b"1," * 2500 + b"1]}]", "element 2 is over"),
        (b'[{"a": 1}, "' + LONG + b'"]', "element 2 is over"),
        (b"[" + b"1," * 2500, "element 1 is over"),
        (b'{"requests": [{"a": 1}], "b": "' + LONG + b'"}', "what follows the array is over"),
    ],
)
def test_what_is_longer_than_the_limit_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(GristmillError, match=message):
        elements(data, (64,), limit=4000)
    with pytest.raises(NotAnArray):
        elements(b'{"b": "' + LONG + b'", "requests": [{"a": 1}]}', (64,), limit=4000)


def test_elements_below_the_limit_are_given_whole() -> None:
    texts = [b'{"a": "' + LONG + b'"}' for _ in range(20)]
    assert elements(b"[" + b",".join(texts) + b"]", (64,), limit=5100) == texts


def test_memory_does_not_grow_with_the_file() -> None:
    def endless(count: int) -> Iterator[bytes]:
        yield b'{"a": "\\"[", "requests": ['
        block = b",\n".join(b'{"id": "%s"}' % (b"y" * 1000) for _ in range(1000))
        for _ in range(count):
            yield block + b","
        yield b"{}]}"

    tracemalloc.start()
    count = sum(1 for _ in array_elements(endless(30), "f.json"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 30_001
    assert peak < 12 << 20
