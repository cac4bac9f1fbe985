"""Token ids as byte keys, namespaces as framed tuples.

The tree compares prefixes as byte runs: a token id is four little-endian bytes, so that one `memcmp` compares
a whole edge. Byte order is as good as token order for finding neighbours: strings that share the most leading
bytes are adjacent in it, and the number of shared tokens is the number of shared bytes divided by four.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidRequestError

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1
CONTEXT_TOKENS = 48  # tokens shown from the place on where two prompts part


@final
class EncodedTokens:
    """Token ids, checked and encoded once: for a prompt that is looked up again and again."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data  # the encoding, see `encode_tokens`

    def __len__(self) -> int:
        return len(self.data) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"EncodedTokens({len(self)} tokens)"

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The token ids, int32 [len], read-only. O(1)."""
        return np.frombuffer(self.data, _INT32)


TokenIds = Sequence[int] | npt.NDArray[Any] | EncodedTokens
NamespaceName = str | tuple[str, ...]
NamespaceKey = tuple[str, ...]

_INT32 = np.dtype("<i4")
_NATIVE = sys.byteorder == "little" and array("i").itemsize == TOKEN_BYTES
_SHORT = 8  # below this many tokens a Python loop is quicker than a numpy reduction
_SMALL_BYTES = 256  # below this many bytes two big integers are compared quicker than two arrays


def encode_tokens(token_ids: TokenIds) -> bytes:
    """Token ids as bytes, four per token, little-endian. O(n); O(1) for encoded ones.

    Args:
        token_ids: a sequence of ints, a one-dimensional integer array, or encoded ones.

    Raises:
        InvalidRequestError: something is not an integer, or lies outside [0, 2**31).
    """
    if type(token_ids) is EncodedTokens:
        return token_ids.data
    if isinstance(token_ids, np.ndarray):
        return _encode_array(token_ids)
    try:
        length = len(token_ids)
    except TypeError:
        raise InvalidRequestError(
            f"token ids must be a sequence of integers, not {type(token_ids).__name__}", param="token_ids"
        ) from None
    if length == 1 and type(token_ids) in (list, tuple):
        token = token_ids[0]
        if type(token) is int and 0 <= token <= MAX_TOKEN_ID:
            return token.to_bytes(TOKEN_BYTES, "little")
    if type(token_ids) is list and token_ids and type(token_ids[0]) is int and _NATIVE:
        # Half the time of numpy's conversion, which looks for a common type first.
        try:
            quick = array("i", token_ids)
        except (TypeError, OverflowError):
            pass  # the general way says what is wrong
        else:
            numbers = np.frombuffer(quick, _INT32)
            if numbers.item(numbers.argmin()) >= 0:
                return quick.tobytes()
    if isinstance(token_ids, str | bytes | bytearray):
        raise InvalidRequestError("token ids must be integers, not text", param="token_ids")
    if not length:
        return b""
    try:
        converted = np.asarray(token_ids)
    except (OverflowError, ValueError, TypeError, RuntimeError) as error:  # the last from torch
        raise InvalidRequestError(f"token ids must be integers: {error}", param="token_ids") from None
    return _encode_array(converted)


def encode_known(token_ids: TokenIds, known: bytes) -> bytes:
    """Like `encode_tokens`, and quicker where the tokens are the ones that `known` encodes. O(n)."""
    if type(token_ids) is EncodedTokens:
        return token_ids.data
    if (
        type(token_ids) is np.ndarray
        and token_ids.dtype is _INT32
        and token_ids.ndim == 1
        and token_ids.nbytes == len(known)
        and token_ids.tobytes() == known
    ):
        return known
    return encode_tokens(token_ids)


def _encode_array(array: npt.NDArray[Any]) -> bytes:
    if array.ndim != 1:
        raise InvalidRequestError(
            f"token ids must be one-dimensional, not of shape {array.shape}", param="token_ids"
        )
    if array.dtype == _INT32:
        data = array.tobytes()
        if array.size < _SHORT:
            if data and max(data[3::4]) >= 128:
                raise _out_of_range(array)
        elif array.item(array.argmin()) < 0:
            raise _out_of_range(array)
        return data
    if array.dtype.kind not in "iu":
        if array.dtype == object:
            raise _out_of_range(array)
        raise InvalidRequestError(
            f"token ids must be integers, not {array.dtype}", param="token_ids", code="invalid_token_ids"
        )
    if array.size and (np.minimum.reduce(array) < 0 or np.maximum.reduce(array) > MAX_TOKEN_ID):
        raise _out_of_range(array)
    return array.astype(_INT32).tobytes()


def _out_of_range(array: npt.NDArray[Any]) -> InvalidRequestError:
    for position, token in enumerate(array.tolist()):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            return InvalidRequestError(
                f"token id {token!r} at position {position} is not an integer in [0, 2**31)",
                param="token_ids",
                code="invalid_token_ids",
            )
    return InvalidRequestError("token ids must be integers in [0, 2**31)", param="token_ids")


def decode_tokens(data: bytes | bytearray) -> list[int]:
    """The inverse of `encode_tokens`."""
    return np.frombuffer(bytes(data), dtype=_INT32).tolist()


def frame_namespace(namespace: NamespaceName) -> NamespaceKey:
    """A namespace as the tuple that keys the tree; its parts are never joined, so they can't run together.

    Raises:
        InvalidRequestError: neither a string nor a tuple of at least one string.
    """
    if type(namespace) is str:
        return (namespace,)
    if isinstance(namespace, tuple) and namespace and all(isinstance(part, str) for part in namespace):
        return namespace
    if isinstance(namespace, str):
        return (str(namespace),)
    raise InvalidRequestError(
        f"a namespace is a string or a tuple of at least one string, not {namespace!r}", param="namespace"
    )


def whole_key(key: NamespaceKey, model: str) -> NamespaceKey:
    """The key (tenant, salt, adapter, model), of which parts may be missing; without a model they stay so."""
    return key if len(key) > 3 or not model else (*key, *[""] * (3 - len(key)), model)


def shared_bytes(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """How many leading bytes two strings share. O(min(len(a), len(b)))."""
    n = min(len(a), len(b))
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        n = min(n, TOKEN_BYTES)
    if n <= _SMALL_BYTES:
        difference = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
        return ((difference & -difference).bit_length() - 1) >> 3 if difference else n
    if a[:n] == b[:n]:
        return n
    differs = np.frombuffer(a, np.uint8, n) != np.frombuffer(b, np.uint8, n)
    return int(differs.argmax())
