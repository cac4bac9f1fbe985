# SPDX-License-Identifier: Apache-2.0
"""JSON bodies: read strictly, within limits, and in pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv_server.errors import ApiError
from radixkv_server.http.body import parse_json
from radixkv_server.http.json_pieces import Outline, outline, parse_pieces

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=25,
)
#: Texts that are JSON or nearly so.
NEARLY_JSON = st.lists(
    st.sampled_from([*'[]{},:"\\ 1', "{}", "[]", '"a":', '"a"', '"\\""', "é", "[1,2]", '{"a":1}', "  "]),
    max_size=40,
).map("".join)


def depth_of(value: Any) -> int:
    """The obvious definition."""
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


def parts_of(value: Any) -> int:
    """Arrays, objects and members, by the obvious definition."""
    if isinstance(value, list):
        return 1 + sum(map(parts_of, value))
    if isinstance(value, dict):
        return 1 + sum(1 + parts_of(item) for item in value.values())
    return 0


def outline_of(body: bytes, window: int) -> Outline:
    return outline(body, max_depth=10**9, max_parts=10**9, window=window)


@given(JSON_VALUES, st.booleans(), st.integers(1, 40))
@settings(deadline=None)
def test_depth_and_parts_are_found_without_parsing(value: Any, ascii_only: bool, window: int) -> None:
    found = outline_of(json.dumps(value, ensure_ascii=ascii_only).encode("utf-8"), window)
    assert (found.depth, found.num_parts) == (depth_of(value), parts_of(value))


@given(JSON_VALUES, st.sampled_from([None, 0, 1]), st.integers(1, 40))
@settings(deadline=None)
def test_pieces_make_the_whole(value: Any, indent: int | None, window: int) -> None:
    body = json.dumps(value, indent=indent).encode("utf-8")
    found = parse_pieces(body, outline_of(body, window), json.loads)
    assert found == value
    assert json.dumps(found, indent=indent).encode("utf-8") == body, "members keep their order"


@given(st.one_of(NEARLY_JSON, st.text(max_size=30)), st.integers(1, 20))
@settings(deadline=None, max_examples=500)
def test_what_is_no_json_is_none_in_pieces_either(text: str, window: int) -> None:
    body = text.encode("utf-8")
    try:
        value = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            parse_pieces(body, outline_of(body, window), json.loads)
    else:
        # As text: NaN, which the standard parser takes, differs from itself.
        assert repr(parse_pieces(body, outline_of(body, window), json.loads)) == repr(value)


def test_an_error_is_where_the_client_finds_it() -> None:
    body = b'{"a": [1,\n2,\n3, ' + b"4, " * 100 + b"5 6]}"
    with pytest.raises(json.JSONDecodeError) as whole:
        json.loads(body)
    with pytest.raises(json.JSONDecodeError) as pieces:
        parse_pieces(body, outline_of(body, 16), json.loads)
    for name in ("msg", "pos", "lineno", "colno"):
        assert getattr(pieces.value, name) == getattr(whole.value, name)


@given(JSON_VALUES, st.integers(0, 5))
@settings(deadline=None)
def test_sound_json_parses_as_always_up_to_the_depth_limit(value: Any, limit: int) -> None:
    body = json.dumps(value).encode("utf-8")
    if depth_of(value) > limit:
        with pytest.raises(ApiError):
            parse_json(body, limit)
    else:
        assert parse_json(body, limit) == value


@pytest.mark.parametrize("body", [b"[[],[],[]]", b'{"a": 1, "b": [2]}', b'[{"a": "[[[[["}, {}]'])
def test_the_limit_of_parts_is_exact(body: bytes) -> None:
    parts = parts_of(json.loads(body))
    assert parse_json(body, 64, parts) == json.loads(body)
    with pytest.raises(ApiError, match="arrays, objects and fields") as caught:
        parse_json(body, 64, parts - 1)
    assert caught.value.status == 413


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    try:
        parse_json(body, 64)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017


def test_long_bodies_are_read_as_strictly_as_short_ones() -> None:
    filler = '{"role": "user", "content": "' + "é" * 300 + '"},'
    start, end = '{"messages": [' + filler * 500, filler[:-1] + "]}"
    assert len(parse_json((start + end).encode(), 64)["messages"]) == 501
    for wrong, complaint in {
        '{"a": NaN},': "NaN is not JSON",
        '{"a": 1e999},': "out of range",
        '{"a": "\\ud800"},': "surrogate",
        "," + filler: "Expecting value",
        '{"a" 1},': "Expecting ':'",
        '{"a": 1],': "Expecting ','",
        "[" * 70 + "]" * 70 + ",": "nests deeper",
    }.items():
        with pytest.raises(ApiError, match=complaint):
            parse_json((start + wrong + end).encode(), 64)
    with pytest.raises(ApiError, match="is not UTF-8"):
        parse_json(start.encode() + b'"\xff",' + end.encode(), 64)


@pytest.mark.parametrize("unit", [b'"', b'\\"', b'"\\', b'"[', b"[", b'{"a":', b" ", b'{":'])
def test_hostile_bodies_cost_linear_time(unit: bytes) -> None:
    def cost(repeats: int) -> float:
        body = b'["' + b"[" * 65 + b'",' + unit * repeats
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            with pytest.raises(ApiError):
                parse_json(body, 64)
            best = min(best, time.thread_time() - start)
        return best

    # Sixteen times the input: linear is 16, quadratic 256.
    assert cost(320_000) < 80 * max(cost(20_000), 2e-4)
