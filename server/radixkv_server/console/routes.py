# SPDX-License-Identifier: Apache-2.0
"""Routes of the console's static files: the page at `/` and its files below `/console`, without a key.

The page consists of plain modules without a build step. Its content security policy lets it load from and
talk to this server alone, forbids inline scripts, and lets no other page frame it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from radixkv_server.console.page_files import page_files
from radixkv_server.dialect import Api

PAGE = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept by browsers, and asked about each time: an upgraded server has its new page at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page with its headers."""

    path: str
    body: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, name: str, body: bytes) -> StaticFile:
        """Make the file `name` (its path below the folder), at the path of its URL."""
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        headers = {**HEADERS, "Content-Type": media_type, "ETag": tag}
        return cls("/" if name == PAGE else f"/console/{name}", body, headers)

    async def answer(self, request: Request) -> Response:
        """Return the file, or 304 for a browser that has it."""
        known = [
            tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")
        ]
        if self.headers["ETag"] in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def static_files() -> list[StaticFile]:
    """Return every file of the page. O(their bytes)."""
    return [StaticFile.of(name, body) for name, body in page_files().items()]


def console_api() -> Api:
    """Make the routes of the page, one for each file."""
    router = APIRouter()
    files = static_files()
    for file in files:
        router.add_api_route(file.path, file.answer, methods=["GET", "HEAD"], include_in_schema=False)
    return Api(router, open_paths=frozenset(file.path for file in files))
