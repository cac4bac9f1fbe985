# SPDX-License-Identifier: Apache-2.0
"""Values of calls as bytes: what arrives is what was sent, and nothing is run by reading it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from scripted_engine import scripted_stats

from radixkv import PrefixCache
from radixkv.cache.keys import EncodedTokens, Owner, encode_tokens
from radixkv.cluster.remote.messages import Ask, Failed
from radixkv.cluster.remote.wire import UnreadableMessage, dumps, loads, sendable
from radixkv.engine.outputs import CompletionOutput, PromptOutcome, RequestOutput
from radixkv.errors import ContextLengthExceededError, InvalidRequestError, RequestFailedError
from radixkv.sampling.logprobs import Logprob, TokenLogprobs
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin, Request, RequestTimes

ATOMS = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.floats(allow_nan=False),
    some.text(some.characters(exclude_categories=())),  # lone surrogates, too
    some.binary(),
)
VALUES = some.recursive(
    ATOMS,
    lambda values: some.one_of(
        some.lists(values),
        some.lists(values).map(tuple),
        some.dictionaries(some.tuples(some.text(), some.integers()) | some.text() | some.integers(), values),
        some.frozensets(some.text()),
        some.sets(some.binary()),
    ),
    max_leaves=20,
)


def kinds(value: Any) -> Any:
    """A value with the type of each part beside it; sets in one order."""
    if isinstance(value, list | tuple):
        return type(value), [kinds(each) for each in value]
    if isinstance(value, dict):
        return dict, [(kinds(key), kinds(each)) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    return type(value), repr(value)


@given(VALUES)
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    copy = loads(dumps(value))
    assert copy == value
    assert kinds(copy) == kinds(value), "also the types of what is equal"


def test_requests_and_outputs_arrive_as_they_are() -> None:
    params = SamplingParams(
        stop=["a", "\ud800"],
        structured={"json": {"type": "object", "properties": {"d": {}}}},
        logit_bias={3: 1.5},
        n=2,
        best_of=3,
    )
    prompt = EncodedTokens(encode_tokens(range(20)))
    request = Request(prompt, params, request_id="r", tenant="t", pins=(PrefixPin(3, 2.0),))
    (copy,) = loads(dumps(Ask(7, "generate", (request,), {}))).args
    assert (copy.params, copy.pins, copy.prompt.data) == (params, request.pins, prompt.data)
    output = RequestOutput(
        "r",
        None,
        [1, 2],
        [CompletionOutput(0, "a\0", [3], [TokenLogprobs(Logprob(3, -math.inf, 1, "a"), ())])],
        prompt_logprobs=[None],
        times=RequestTimes(1.0, None, 2.5),
    )
    outcome = PromptOutcome(3, cache_report=PrefixCache(num_blocks=8).explain([1, 2, 3]))
    stats = scripted_stats(PrefixCache(num_blocks=8))
    for value in (output, outcome, stats, Owner("a", "b"), replace(params, seed=1)):
        assert loads(dumps(value)) == value
        assert type(loads(dumps(value))) is type(value)


@pytest.mark.parametrize("kind", ["<i4", ">i8", "<f8", "bool", "<u2"])
def test_arrays_and_tensors_arrive_as_arrays(kind: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(kind)
    for sent in (array, array.T, array[:, :0]):
        copy = loads(dumps(sent))
        assert copy.dtype == sent.dtype
        assert np.array_equal(copy, sent)
        assert copy.shape == sent.shape
    assert loads(dumps(torch.tensor([1, 2]))).tolist() == [1, 2]
    assert loads(dumps(np.float32(0.5))) == 0.5


def test_other_mappings_and_sequences_arrive_as_pythons_own() -> None:
    assert loads(dumps([range(3), Counter("aa"), OrderedDict(b=1)])) == [[0, 1, 2], {"a": 2}, {"b": 1}]


class Other(Exception):
    pass


@pytest.mark.parametrize("value", [object(), len, int, Other("x"), SystemExit(3), (n for n in [1]), [[len]]])
def test_what_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="can't be sent to another process"):
        dumps(value)


def test_what_is_nested_too_deeply_is_refused() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidRequestError, match="can't be sent"):
        dumps(value)


def test_errors_arrive_with_their_attributes_or_described() -> None:
    for error in (ContextLengthExceededError("long", param="messages"), KeyError("k"), OSError(2, "no file")):
        copy = loads(dumps(Failed(1, error))).error
        assert (type(copy), copy.args, vars(copy)) == (type(error), error.args, vars(error))
        assert sendable(error, RequestFailedError) is error
    described = sendable(Other("x"), RequestFailedError)
    assert (type(described), str(described)) == (RequestFailedError, "Other: x")


@pytest.mark.parametrize(
    "data",
    [
        b'{"d":["os:system","true"]}',
        b'{"d":["radixkv.helper_process:helper_environment"]}',
        b'{"d":["radixkv.channel:Channel",null]}',
        b'{"d":["radixkv.channel:socket.socket"]}',
        b'{"d":["radixkv.__main__:main"]}',
        b'{"d":["radixkv.nothing:Nothing"]}',
        b'{"d":["radixkv.cluster.remote.messages:Cancel"]}',
        b'{"d":["radixkv.cluster.remote.messages:Cancel",1,2]}',
        b'{"e":["radixkv.channel:os.P_NOWAIT",1]}',
        b'{"x":["builtins:SystemExit",[],[]]}',
        b'{"x":["builtins:eval",["1"],[]]}',
        b'{"a":["O",[1],"AAAAAAAAAAA="]}',
        b'{"a":["<i4",[1000000000000],"AAAA"]}',
        b'{"z":1}',
        b'{"t":1,"m":2}',
        b"[" * 100_000,
        b"\xff",
        b"",
    ],
)
def test_what_no_process_of_ours_writes_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableMessage):
        loads(data)
