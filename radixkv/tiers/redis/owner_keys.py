# SPDX-License-Identifier: Apache-2.0
"""OwnerKeys: names of each owner's blocks in a store that others can read, and encryption.

    secret of a store   the same for all replicas, from a file
      |-- of an owner   a namespace (tenant, salt, adapter, model), or the public text of a model
            |-- names   keyed hashes, see `radixkv.tiers.record`
            |-- key     AES-256-GCM over the whole record, bound to its name

Without the secret one can't tell the owner of a name's text, whether two owners have the same text, or ask
for a guessed text. Public text has an owner of its own: all tenants share it, nothing else does. Without
a secret, names follow from the model, the tenant's name and the text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from radixkv.cache.block_identity import framed
from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import NamespaceKey
from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError
from radixkv.tiers.record import BlockKind, BlockName, BlockNames, RecordError

_NONCE_BYTES = 12
_MAX_OWNERS = 1024  # whose keys are kept at hand


class OwnerKeys:
    """Keys of a store.

    Args:
        kind: the blocks' kind.
        secret: of the store; empty: there is none.
        encrypts: records are encrypted.
        states: the kind of the states kept beside them; None: the model has none.

    Raises:
        ConfigError: encryption needs a secret, or the package `cryptography`.
    """

    def __init__(
        self, kind: BlockKind, secret: bytes, *, encrypts: bool = False, states: BlockKind | None = None
    ) -> None:
        if encrypts and not secret:
            raise ConfigError("--kv-tier redis: encrypt=on needs a secret; give secret=FILE")
        if encrypts:
            _cipher(bytes(32))
        self._kinds = kind, kind if states is None else states  # by whether a run is one of states
        self._secret = hashlib.blake2b(secret).digest() if secret else b""
        self._encrypts = encrypts
        self._names_of = lru_cache(_MAX_OWNERS)(self._make_names)
        self._cipher_of = lru_cache(_MAX_OWNERS)(self._make_cipher)

    def names(self, run: BlockRun) -> Iterator[BlockName]:
        """See `BlockNames.of`."""
        return self._names_of(run.namespace, run.is_public, run.is_state).of(run)

    def closed(self, run: BlockRun, name: BlockName, record: bytes) -> bytes:
        """Seal a record for storage."""
        if not self._encrypts:
            return record
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._cipher_of(run.namespace, run.is_public).encrypt(nonce, record, name.key)
        return nonce + sealed

    def opened(self, run: BlockRun, name: BlockName, value: bytes) -> bytes:
        """Open a sealed record.

        Raises:
            RecordError: it was changed, or stored under another name.
        """
        if not self._encrypts:
            return value
        from cryptography.exceptions import InvalidTag  # optional; `encrypts` has checked that it is there

        try:
            record: bytes = self._cipher_of(run.namespace, run.is_public).decrypt(
                value[:_NONCE_BYTES], value[_NONCE_BYTES:], name.key
            )
        except (InvalidTag, ValueError):
            raise RecordError("checksum") from None
        return record

    def _derived(self, purpose: str, namespace: NamespaceKey, is_public: bool) -> bytes:
        parts = (purpose, "public" if is_public else "private", *namespace)
        return hashlib.blake2b(framed(parts), digest_size=32, key=self._secret).digest()

    def _make_names(self, namespace: NamespaceKey, is_public: bool, is_state: bool) -> BlockNames:
        purpose = "names of encrypted records" if self._encrypts else "names"
        return BlockNames(self._kinds[is_state], self._derived(purpose, namespace, is_public))

    def _make_cipher(self, namespace: NamespaceKey, is_public: bool) -> Any:
        return _cipher(self._derived("encryption", namespace, is_public))


def _cipher(key: bytes) -> Any:
    try:  # optional: of the extra `redis`
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(f"--kv-tier redis: {error}; {install_command('redis')}") from None
    return AESGCM(key)
