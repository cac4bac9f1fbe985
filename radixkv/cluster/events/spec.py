# SPDX-License-Identifier: Apache-2.0
"""The value of `--kv-events`, `tcp://127.0.0.1:5557[,OPTION=VALUE...]`, checked."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from radixkv.errors import ConfigError

FORM = "tcp://127.0.0.1:PORT[,replay=tcp://127.0.0.1:PORT][,topic=NAME][,tokens=open|all|none][,secret=FILE]"
#: A shorter secret is refused.
MIN_SECRET_BYTES = 16
_MAX_PORT = 65535
_TOKENS = ("open", "all", "none")
_OPTIONS = ("replay", "topic", "tokens", "secret", "curve", "clients", "server")
_OPTION = re.compile(r",([a-z_]+)=([^,]*)$")
_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^\[\]:/]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class EventsSpec:
    """Addresses and options of block events, for a publisher or a reader.

    Attributes:
        endpoint: of the stream, `tcp://HOST:PORT`; port 0: any that is free.
        replay: of the socket that repeats missed messages; by default the next port.
        topic: the part before `@` in the topic of every message.
        tokens: owners of published token ids: `open` (text without tenant or salt), `all` or `none`.
        secret: keys the hashes; None: a random one.
        curve: one's own CURVE certificate, with its secret key; None: the stream is plain.
        clients: for publishers: folder with the public keys of permitted readers.
        server: for readers: certificate with the publisher's public key.
    """

    endpoint: str
    replay: str
    topic: str = "kv"
    tokens: str = "open"
    secret: bytes | None = None
    curve: Path | None = None
    clients: Path | None = None
    server: Path | None = None


def parse_events(text: str, *, reads: bool = False) -> EventsSpec:
    """Parse the value of `--kv-events`, or (`reads`) a follower's address of a stream.

    Raises:
        ConfigError: no such endpoint, an unknown option, a file that can't be read, or an address that
            others can reach without CURVE.
    """
    options, endpoint = _options(text)
    host, port = _address(endpoint)
    if port == _MAX_PORT and not options.get("replay"):
        raise ConfigError(
            f"--kv-events: no port comes after {port}; say replay=tcp://{host}:PORT, or another port"
        )
    next_port = 0 if port == 0 else port + 1
    replay = options.get("replay") or f"{endpoint.rpartition(':')[0]}:{next_port}"
    replay_host, replay_port = _address(replay)
    if port and replay_port == port and replay_host == host:
        raise ConfigError(f"--kv-events: stream and replay can't share {endpoint}; give replay another port")
    if options.get("tokens", "open") not in _TOKENS:
        raise ConfigError(f"--kv-events: tokens is one of {', '.join(_TOKENS)}, not {options['tokens']!r}")
    if "@" in options.get("topic", ""):
        raise ConfigError("--kv-events: a topic has no @, after which the messages name the incarnation")
    paths = {
        name: Path(options[name]).expanduser() for name in ("curve", "clients", "server") if name in options
    }
    other = "server" if reads else "clients"
    if ("curve" in paths) != (other in paths):
        raise ConfigError(
            "--kv-events: CURVE takes curve=FILE (one's own certificate, as zmq.auth makes it) together with "
            + (
                "server=FILE (the publisher's public key)"
                if reads
                else "clients=FOLDER (readers' public keys)"
            )
        )
    for name, path in paths.items():
        if not (path.is_dir() if name == "clients" else path.is_file()):
            kind = "folder" if name == "clients" else "file"
            raise ConfigError(f"--kv-events: {name}={path} is no {kind} that can be read")
    for one in (host, replay_host):
        if "curve" not in paths and not reads and not _is_loopback(one):
            raise ConfigError(
                f"--kv-events: {one!r} can be reached by others, and events tell what prompts are about; "
                "publish on 127.0.0.1, or with curve=FILE,clients=FOLDER (CURVE)"
            )
    return EventsSpec(
        endpoint,
        replay,
        options.get("topic", "kv"),
        options.get("tokens", "open"),
        _secret(options.get("secret")),
        paths.get("curve"),
        paths.get("clients"),
        paths.get("server"),
    )


def _options(text: str) -> tuple[Mapping[str, str], str]:
    options: dict[str, str] = {}
    rest = text
    while found := _OPTION.search(rest):
        name, value = found.groups()
        if name not in _OPTIONS:
            raise ConfigError(f"--kv-events: option {name!r} is not known; write {FORM}")
        if name in options:
            raise ConfigError(f"--kv-events: option {name!r} is given twice")
        options[name] = value
        rest = rest[: found.start()]
    return options, rest


def _address(endpoint: str) -> tuple[str, int]:
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found[2]) > _MAX_PORT:
        raise ConfigError(f"--kv-events: {endpoint[:80]!r} is no endpoint; write {FORM}")
    return found[1].strip("[]"), int(found[2])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or `*`
        return False


def _secret(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--kv-events: secret={path} can't be read: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--kv-events: secret={path} holds {len(secret)} bytes; give {MIN_SECRET_BYTES} or more"
        )
    return secret
