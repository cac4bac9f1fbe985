# SPDX-License-Identifier: Apache-2.0
"""Block records: names and stored form of blocks in memories that outlive the process.

    name     blake2b of the model, the owner and all tokens up to the block's end, keyed by a secret:
             16 bytes of file key, and 32 more that are compared
    record   header (with its own checksum) | the block's tokens | its bytes (one checksum for both)

The identities of `radixkv.cache.block_identity` are quick and fit for one process and for routing. A store
that lives on, or that others can write to, is asked by names: two texts of one name cannot be made, and
without the secret one can neither tell the text of a name nor ask for one. Names propose too: a record is
trusted if its digest and its tokens are the requested ones, and its checksums hold.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import xxhash

from radixkv.cache.block_identity import framed
from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.tiers.tier import Bytes

#: Raised when the header, the making of names or the results of our own kernels change: older ones are not
#: found any more.
FORMAT_VERSION = 1
#: The same, for the contents of states alone.
STATE_FORMAT = 1
KEY_BYTES = 16
_DIGEST_BYTES = 32
_MAGIC = b"radixkv\x01"
# magic, version, bytes of the tokens, bytes of the block, key, digest, checksum of tokens and block
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}s{_DIGEST_BYTES}s16s")
_CHECKSUM = struct.Struct("<Q")
#: Bytes of a header.
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Everything that must be equal for two blocks' bytes to mean the same.

    Attributes:
        model: fingerprint over all bytes of the weights and of everything else that computes.
        kv_format: type, shape and order of the elements.
        block_size: tokens of a block.
        block_bytes: bytes of a block.
        tensor_parallel: processes that compute it together.
        computed_by: source of the last bits, such as the processor; empty: these do not matter.
        model_name: for people; it means nothing, and stands last.
    """

    model: str
    kv_format: str
    block_size: int
    block_bytes: int
    tensor_parallel: int = 1
    computed_by: str = ""
    model_name: str = ""


class BlockName(NamedTuple):
    """Name of a block.

    Attributes:
        key: file key.
        digest: compared part.
    """

    key: bytes
    digest: bytes


class BlockNames:
    """Names of blocks of one kind.

    Args:
        secret: at most 64 bytes; without it names can neither be made nor be guessed.
    """

    def __init__(self, kind: BlockKind, secret: bytes = b"") -> None:
        self._kind = kind
        parts = (str(FORMAT_VERSION), *map(str, astuple(kind)[:-1]))
        self._begun = hashlib.blake2b(
            framed(parts), digest_size=KEY_BYTES + _DIGEST_BYTES, key=secret, person=b"radixkv block"
        )

    def of(self, run: BlockRun) -> Iterator[BlockName]:
        """Yield the names of a run's blocks, in order. O(tokens)."""
        text = self._begun.copy()
        text.update(framed(run.namespace) + (b"public" if run.is_public else b"private"))
        tokens, start = memoryview(run.tokens), run.start * TOKEN_BYTES
        text.update(tokens[:start])
        size = self._kind.block_size * TOKEN_BYTES
        for _ in range(len(run)):
            text.update(tokens[start : start + size])
            start += size
            name = text.digest()
            yield BlockName(name[:KEY_BYTES], name[KEY_BYTES:])


class RecordError(Exception):
    """Record that fails its verification.

    Attributes:
        reason: `header`, `version` (a header of another version), `checksum`, or `other text`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RecordHeader(NamedTuple):
    """Header of a record."""

    key: bytes
    digest: bytes
    token_bytes: int
    block_bytes: int
    checksum: bytes

    @property
    def record_bytes(self) -> int:
        """Return the bytes of the whole record."""
        return HEADER_BYTES + self.token_bytes + self.block_bytes


def pack_record(name: BlockName, tokens: Bytes, block: Bytes) -> tuple[bytes, memoryview]:
    """Return a record's two parts, to be written in order: header with tokens, and the block's bytes.

    Args:
        tokens: the block's tokens, four bytes each.
    """
    text, data = _view(tokens), _view(block)
    header = _HEADER.pack(
        _MAGIC, FORMAT_VERSION, text.nbytes, data.nbytes, name.key, name.digest, _checksum(text, data)
    )
    return b"".join((header, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)), text)), data


def read_header(data: Bytes) -> RecordHeader:
    """Return the header at the beginning of the bytes.

    Raises:
        RecordError: there is none, or it is damaged.
    """
    start = bytes(data[:HEADER_BYTES])
    if len(start) < HEADER_BYTES:
        raise RecordError("header")
    header, (checksum,) = start[: _HEADER.size], _CHECKSUM.unpack(start[_HEADER.size :])
    magic, version, *fields = _HEADER.unpack(header)
    is_ours = (magic, version) == (_MAGIC, FORMAT_VERSION)
    if not is_ours and magic.startswith(_MAGIC[:-1]):
        # A later version may have other fields after these two. Ours with damage there is whole but for it.
        ours = _HEADER.pack(_MAGIC, FORMAT_VERSION, *fields)
        if xxhash.xxh3_64_intdigest(ours) != checksum:
            raise RecordError("version")
    if not is_ours or xxhash.xxh3_64_intdigest(header) != checksum:
        raise RecordError("header")
    token_bytes, block_bytes, key, digest, of_contents = fields
    return RecordHeader(key, digest, token_bytes, block_bytes, of_contents)


def unpack_record(data: Bytes, name: BlockName, tokens: Bytes) -> memoryview:
    """Return the block's bytes, a view of the record's.

    Args:
        data: a record, exactly.
        name, tokens: the requested ones.

    Raises:
        RecordError: it is damaged, or of another text.
    """
    header = verify_record(data)
    view = _view(data)
    end = HEADER_BYTES + header.token_bytes
    if (header.key, header.digest) != name or view[HEADER_BYTES:end] != _view(tokens):
        raise RecordError("other text")
    return view[end:]


def verify_record(data: Bytes) -> RecordHeader:
    """Return the header of a record of exactly these bytes, after verifying them.

    Raises:
        RecordError: the record is damaged, or of another length.
    """
    header, view = read_header(data), _view(data)
    if header.record_bytes != view.nbytes:
        raise RecordError("header")
    end = HEADER_BYTES + header.token_bytes
    if _checksum(view[HEADER_BYTES:end], view[end:]) != header.checksum:
        raise RecordError("checksum")
    return header


def _view(data: Any) -> memoryview:
    return memoryview(data).cast("B")


def _checksum(tokens: memoryview, block: memoryview) -> bytes:
    digest = xxhash.xxh3_128(tokens)
    digest.update(block)
    return digest.digest()
