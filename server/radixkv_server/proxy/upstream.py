# SPDX-License-Identifier: Apache-2.0
"""Upstream: the server behind the proxy, and the changes that it needs to a request's head."""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from radixkv.errors import ConfigError

READ_BYTES = 256 * 1024  # that may wait in each direction of a connection

_REQUEST_LINE = re.compile(rb"(\S+) (\S+)( HTTP/[\d.]+\r?\n)")
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_HOST = re.compile(rb"^host:[^\r\n]*", re.IGNORECASE | re.MULTILINE)
_CHUNKED = re.compile(rb"^transfer-encoding:", re.IGNORECASE | re.MULTILINE)
# With its continuation lines.
_LENGTH = re.compile(rb"^content-length:[^\n]*\n(?:[ \t][^\n]*\n)*", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Upstream:
    """Address of an upstream.

    Attributes:
        authority: value of its `Host` header.
        prefix: prefix of all paths; "" or begins with a slash.
    """

    host: str
    port: int
    authority: str
    prefix: str = ""
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, url: str) -> Upstream:
        """Parse `http://HOST[:PORT][/PREFIX]` or `https://...`.

        Raises:
            ConfigError: not of that form.
        """
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"--upstream {url[:200]!r}: give http:// or https://, a host, perhaps a port and a path"
            )
        if parts.username is not None:
            raise ConfigError("--upstream takes no user name or password: keys come with each request")
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            if not tls.cert_store_stats()["x509_ca"] and not ssl.get_default_verify_paths().capath:
                import certifi  # comes with httpx; for systems without certificates of their own

                tls.load_verify_locations(certifi.where())
        return cls(
            parts.hostname,
            port or (443 if tls else 80),
            parts.netloc,
            parts.path.rstrip("/"),
            tls,
        )

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    async def connect(self, protocol: asyncio.Protocol) -> None:
        """Open a new connection with this protocol.

        Raises:
            OSError: the upstream can't be reached.
        """
        name = self.host if self.tls else None
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: protocol, self.host, self.port, ssl=self.tls, server_hostname=name
        )

    def addressed(self, head: bytes) -> bytes:
        """Return the head of a request with the upstream's path prefix and `Host` header. O(head).

        A `Content-Length` beside `Transfer-Encoding` is left out, by which two readers could disagree on
        where the request ends (RFC 9112, 6.3). All else stays byte for byte.
        """
        line = _REQUEST_LINE.match(head)
        if line is None:
            return head
        method, target, end = line.groups()
        target = _ABSOLUTE.sub(b"", target, count=1)
        if target.startswith(b"/") or not target:
            target = self.prefix.encode() + (target or b"/")
        host = b"Host: " + self.authority.encode()
        headers = head[line.end() :]
        if _CHUNKED.search(headers):
            headers = _LENGTH.sub(b"", headers)
        headers, found = _HOST.subn(lambda _: host, headers, count=1)
        if not found:
            headers = host + b"\r\n" + headers
        return method + b" " + target + end + headers
