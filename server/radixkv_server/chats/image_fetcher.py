# SPDX-License-Identifier: Apache-2.0
"""Fetching of images by their addresses, for servers that allow it (`--image-urls`).

A client that may name addresses could have the server reach what only the server can: its own machine, its
network, a cloud's metadata. Each hop of a request, redirects included, therefore goes like this:

1. The address must be http or https, without a user's name or password.
2. Its host is resolved once. All addresses that come back must be public.
3. The connection goes to the first of them, by number: a name that resolves to something else a moment
later (DNS
   rebinding) changes nothing. The certificate is checked against the name.
4. The body is read up to the limit, uncompressed, within one time for all hops.

No proxy of the environment is used: it would resolve names by itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

import httpx

from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import invalid_image, too_many_bytes

MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"accept": "image/png, image/jpeg, image/webp, image/gif", "accept-encoding": "identity"}

#: Returns the IP addresses of a host and port, as texts; raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host, by the system's resolver.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Return True for an IP address that anybody on the internet may reach.

    IPv4 addresses that IPv6 carries (mapped, 6to4, Teredo, NAT64) must be public, too.

    >>> is_public("1.1.1.1"), is_public("169.254.169.254"), is_public("::ffff:127.0.0.1")
    (True, False, False)
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        carried = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            carried.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        inner = [str(one) for one in carried if one is not None]
        if inner:
            return all(map(is_public, inner))
        if ip.is_site_local:
            return False
    if any(ip in network for network in _NOT_PUBLIC):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


# What older versions of Python take for global: protocols' own, relays' and documentation's addresses.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "5f00::/16")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class ImageFetcher:
    """Fetches files of images, within bounds.

    Args:
        max_bytes: of a file.
        timeout_s: for all hops together.
        resolve: finds the addresses of a host.
        allows: tells whether an IP address may be connected to.
    """

    def __init__(
        self,
        max_bytes: int,
        timeout_s: float,
        *,
        resolve: Resolve = resolve_host,
        allows: Callable[[str], bool] = is_public,
    ) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._allows = allows

    async def fetch(self, url: str) -> bytes:
        """Return the file at an address.

        Raises:
            InvalidRequestError: the address is not allowed, or the file can't be had within the bounds.
        """
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._timeout_s) as client,
            ):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._hop(client, url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise invalid_image(
                f"its address gave no file within {self._timeout_s:g} s (image_url_timeout_s)"
            ) from None
        except (httpx.HTTPError, OSError):
            raise invalid_image("its address can't be reached: send the data in base64") from None
        raise invalid_image(f"its address redirects more than {MAX_REDIRECTS} times: give the last address")

    async def _hop(self, client: httpx.AsyncClient, url: str) -> bytes | str:
        """Return the file at an address, or the address to go on with."""
        given = _parsed(url)
        port = given.port or (443 if given.scheme == "https" else 80)
        addresses = await self._resolve(given.host, port)
        if not addresses or not all(map(self._allows, addresses)):
            raise _not_allowed("leads to an address that is not public")
        # By number, so that nobody resolves the name again; the name stays in the header and the certificate.
        direct = given.copy_with(host=addresses[0].partition("%")[0])
        async with client.stream(
            "GET",
            direct,
            headers={**_HEADERS, "host": given.netloc.decode("ascii")},
            extensions={"sni_hostname": given.host},
        ) as answer:
            if answer.status_code in _REDIRECTS:
                return str(given.join(answer.headers.get("location", "")))
            if answer.status_code != 200:
                raise invalid_image(f"its address answers with status {answer.status_code}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise invalid_image("its address sends a compressed file, which could be a bomb")
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    raise too_many_bytes(self._max_bytes)
            return bytes(data)


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise invalid_image("its address is malformed") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _not_allowed("is, or redirects to, something else than http(s)")
    if parsed.userinfo:
        raise _not_allowed("has a user's name in it")
    return parsed


def _not_allowed(why: str) -> InvalidRequestError:
    return invalid_image(f"its address {why}, which this server does not fetch: send the data in base64")
