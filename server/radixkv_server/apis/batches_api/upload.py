# SPDX-License-Identifier: Apache-2.0
"""Uploads: a file in a form, kept on disk while it comes, within a bound of its size."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import IO

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from radixkv_server.errors import ApiError, bad_request

#: Bytes of a form beside its file, and most fields of it.
OTHER_BYTES = 64 * 1024
MAX_FIELDS = 8
MAX_FILENAME = 255
_KNOWN = ("file", "purpose")


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that has come whole.

    Attributes:
        file: at its beginning.
    """

    file: IO[bytes]
    filename: str
    purpose: str


@contextlib.asynccontextmanager
async def read_upload(request: Request, max_bytes: int) -> AsyncIterator[Upload]:
    """Read a form with `file` and `purpose`; the file is gone after the block.

    Raises:
        ApiError: 415; it is no form. 400; it is malformed, or has other fields. 413; the file is too large.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        message = "Send the file as multipart/form-data with the fields purpose and file."
        raise ApiError(415, message, code="unsupported_media_type")
    too_large = ApiError(413, f"The file is larger than {max_bytes:,} bytes.", code="file_too_large")

    async def bounded() -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > max_bytes + OTHER_BYTES:
                raise too_large
            yield piece

    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes + OTHER_BYTES:
        raise too_large
    try:
        parser = MultiPartParser(request.headers, bounded(), max_files=1, max_fields=MAX_FIELDS)
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise bad_request(f"The form can't be read: {error}.", code="invalid_form") from None
    try:
        for name in form:
            if name not in _KNOWN:
                message = f"Unrecognized request argument supplied: {name[:100]}."
                raise bad_request(message, param=name[:100], code="unknown_parameter")
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            message = "Missing required parameter: 'file'."
            raise bad_request(message, param="file", code="missing_required_parameter")
        if purpose != "batch":
            message = f"purpose must be batch, the one use of files here; not {str(purpose)[:80]!r}."
            raise bad_request(message, param="purpose")
        if (file.size or 0) > max_bytes:
            raise too_large
        yield Upload(file.file, (file.filename or "file.jsonl")[:MAX_FILENAME], "batch")
    finally:
        await form.close()
