# SPDX-License-Identifier: Apache-2.0
"""Text to token ids while the other threads go on.

The tokenizers library's `encode` keeps Python's interpreter lock from beginning to end, a second or two for a
megabyte of text, and every other thread stands still meanwhile. Its `encode_batch_fast` gives the lock up,
computes the same ids without their offsets, and is quicker; what remains under the lock is the list of ids,
about 10 ms for a million. The same goes for `decode` and `decode_batch`.
"""

from __future__ import annotations

from typing import Any

from radixkv.errors import ENDS_PROCESS, InvalidRequestError

# Giving the lock up may cost half a millisecond until it is held again, as long as a text of this size takes
# (characters, or ids).
SHORT_TEXT = 2048


def encode_ids(backend: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text. O(length); never under the interpreter's lock for long.

    Args:
        backend: a `tokenizers.Tokenizer`.
    """
    if len(text) <= SHORT_TEXT:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def encode_prompt(tokenizer: Any, text: str, *, add_special_tokens: bool, allow_special: bool) -> list[int]:
    """The ids of a user's text, whatever the tokenizer does with it; any thread.

    Args:
        tokenizer: a `radixkv.text.tokenizer.Tokenizer`, or what stands for one.

    Raises:
        InvalidRequestError: it fails on the text.
    """
    try:
        ids: list[int] = tokenizer.encode(
            text, add_special_tokens=add_special_tokens, allow_special=allow_special
        )
    except (InvalidRequestError, *ENDS_PROCESS):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        raise InvalidRequestError(f"the prompt can't be tokenised: {error}", param="prompt") from error
    return ids


def decode_ids(backend: Any, ids: list[int], *, skip_special_tokens: bool) -> str:
    """The text of ids. O(n); never under the interpreter's lock for long.

    Args:
        backend: a `tokenizers.Tokenizer`.
    """
    if len(ids) <= SHORT_TEXT:
        return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
    (text,) = backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
    return str(text)
