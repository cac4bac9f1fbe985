# SPDX-License-Identifier: Apache-2.0
"""Token ids as byte keys, namespaces as framed tuples.

The tree compares prefixes as byte runs: a token id is four little-endian bytes, so that one `memcmp` compares
a whole edge. Byte order is as good as token order for finding neighbours: strings that share the most leading
bytes are adjacent in it, and the number of shared tokens is the number of shared bytes divided by four.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Union, final

from radixkv.errors import InvalidRequestError

if TYPE_CHECKING:  # numpy's arrays are understood, and numpy is not needed
    import numpy as np
    import numpy.typing as npt

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
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The tokens, int32 [len], read-only; needs numpy. O(1)."""
        import numpy as np  # heavy

        return np.frombuffer(self.data, "<i4")


TokenIds = Union[Sequence[int], "npt.NDArray[Any]", EncodedTokens]
NamespaceName = str | tuple[str, ...]
NamespaceKey = tuple[str, ...]

_IS_LITTLE_ENDIAN = sys.byteorder == "little"
_SMALL_BYTES = 256  # up to this many bytes two big integers are compared quicker than halves


def encode_tokens(token_ids: TokenIds) -> bytes:
    """Return token ids as bytes, four per token, little-endian. O(n); O(1) for encoded ones.

    Args:
        token_ids: a sequence of ints, a one-dimensional integer array, or encoded ones.

    Raises:
        InvalidRequestError: something is not an integer, or lies outside [0, 2**31).
    """
    if type(token_ids) is EncodedTokens:
        return token_ids.data
    if type(token_ids) is list and len(token_ids) == 1:  # the usual case in decoding
        token = token_ids[0]
        if type(token) is int and 0 <= token <= MAX_TOKEN_ID:
            return token.to_bytes(TOKEN_BYTES, "little")
    if hasattr(token_ids, "__array__"):  # an array of numpy, or a tensor of torch
        return _encode_array(token_ids)
    is_text = isinstance(token_ids, str | bytes | bytearray)
    if is_text or isinstance(token_ids, Mapping | Set) or not hasattr(token_ids, "__len__"):
        raise InvalidRequestError(
            f"token ids must be a sequence of integers, not {type(token_ids).__name__}", param="token_ids"
        )
    if not len(token_ids):
        return b""
    try:
        numbers = array("i", token_ids)
    except (TypeError, OverflowError):
        raise _not_tokens(token_ids) from None
    if not _IS_LITTLE_ENDIAN:
        numbers.byteswap()
    data = numbers.tobytes()
    any_negative = not data[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()  # the top bit is the sign
    if any_negative or type(token_ids[0]) is bool:
        raise _not_tokens(token_ids)
    return data


def _encode_array(given: Any) -> bytes:
    """Encode anything that numpy understands as an array. O(n)."""
    try:
        array = given.__array__()
    except (TypeError, RuntimeError) as error:  # from torch: on a GPU, or numpy is not there
        raise InvalidRequestError(f"token ids must be integers: {error}", param="token_ids") from None
    if array.ndim != 1:
        raise InvalidRequestError(
            f"token ids must be one-dimensional, not of shape {array.shape}", param="token_ids"
        )
    if array.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"token ids must be integers, not {array.dtype}", param="token_ids", code="invalid_token_ids"
        )
    fits = array.dtype.kind == "i" and array.dtype.itemsize <= TOKEN_BYTES  # then none is too large
    if array.size and (
        array.item(array.argmin()) < 0 or (not fits and array.item(array.argmax()) > MAX_TOKEN_ID)
    ):
        raise _not_tokens(array.tolist())
    return array.astype("<i4", copy=False).tobytes()


def _not_tokens(token_ids: Sequence[Any]) -> InvalidRequestError:
    """Describe the first value that is no token id."""
    found = "these are not"
    for position, token in enumerate(token_ids):
        is_integer = hasattr(token, "__index__") and type(token) is not bool
        if not is_integer or not 0 <= int(token) <= MAX_TOKEN_ID:
            found = f"token id {token!r} at position {position} is not an integer"
            break
    return InvalidRequestError(f"{found} in [0, 2**31)", param="token_ids", code="invalid_token_ids")


def decode_tokens(data: bytes | bytearray) -> list[int]:
    """Return the token ids of bytes: the inverse of `encode_tokens`. O(n)."""
    numbers = array("i")
    numbers.frombytes(data)
    if not _IS_LITTLE_ENDIAN:
        numbers.byteswap()
    return numbers.tolist()


def frame_namespace(namespace: NamespaceName) -> NamespaceKey:
    """Return a namespace as the tuple that keys the tree; its parts are never joined.

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
    """Complete the key (tenant, salt, adapter, model); without a model, missing parts stay missing."""
    return key if len(key) > 3 or not model else (*key, *[""] * (3 - len(key)), model)


def shared_bytes(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Count the leading bytes that two strings share. O(min(len(a), len(b)))."""
    n = min(len(a), len(b))
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        n = min(n, TOKEN_BYTES)
    if n <= _SMALL_BYTES:
        difference = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
        return ((difference & -difference).bit_length() - 1) >> 3 if difference else n
    if a[:n] == b[:n]:
        return n
    same = 0
    while n - same > _SMALL_BYTES:  # halve what holds the first difference: bytes are compared as memory
        middle = (same + n) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            n = middle
    return same + shared_bytes(a[same:n], b[same:n])


class Owner(NamedTuple):
    """Owner of a prompt's K/V.

    Attributes:
        tenant: who is served; bound by the server to the API key, never taken from a request's body.
        salt: divides the tenant's own space; chosen by its clients.
        adapter: identity of the LoRA adapter on top of the model's weights; empty: the base alone.

    >>> Owner("alice", "s").namespace("sha256:1f")
    ('alice', 's', '', 'sha256:1f')
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""

    def namespace(self, model: str) -> tuple[str, str, str, str]:
        """Return the namespace of the prefix cache, tenant first: policies and quotas find it there.

        The parts are framed in a tuple and never joined, so that no choice of strings by one tenant can name
        another's space.

        Args:
            model: fingerprint of configuration, weights and dtype; empty: unknown.
        """
        return (*self, model)


NOBODY = Owner()
