# SPDX-License-Identifier: Apache-2.0
"""ServerSettings: every setting of the HTTP server, in one frozen place, checked on construction."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from radixkv.errors import ConfigError
from radixkv.text.chat_formats.formats import AUTO, named_format
from radixkv_server.log_format import FORMATS, LEVELS
from radixkv_server.tenants.api_keys import (
    ADMIN_ENV_VARIABLE,
    KeyRing,
    keys_from_environment,
    keys_from_file,
    parse_api_key,
)

MIB = 1024 * 1024
UNKNOWN_FIELDS = ("refuse", "warn")
IMAGES = ("auto", "show", "placeholder", "refuse")


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on requests and on the data kept for a tenant, and time limits of clients.

    Args:
        max_body_bytes: largest request body.
        max_header_bytes: largest request line plus headers.
        max_json_depth: deepest nesting of arrays and objects in a body.
        max_json_parts: most arrays, objects and members of objects in a body.
        max_messages: most messages in a chat.
        max_prompts: most prompts in a completions request.
        max_samples: most samples (prompts x best_of) in a request.
        header_timeout_s: time a client has to send a request's headers.
        body_timeout_s: time a client has to send a request's body.
        keep_alive_s: how long an idle connection stays open.
        slow_client_timeout_s: a stream whose client takes nothing for this long is aborted.
        ping_interval_s: interval at which an idle stream sends an SSE comment.
        max_stored_responses: most stored responses of a tenant; the least recently used ones are dropped.
        max_stored_bytes: most bytes of a tenant's stored responses.
        max_background_responses: most unfinished background responses of a tenant.
        max_websockets: most open WebSockets of a tenant.
        background_timeout_s: longest time of a background response, including its wait in the queue.
        max_files: most files of a tenant, answers of batches included.
        max_file_bytes: largest file that a tenant uploads.
        max_batch_lines: most requests of a batch.
        max_batches: most unfinished batches of a tenant.
        max_images: most images in a chat.
        max_image_bytes: largest file of an image.
        max_image_pixels: most pixels of an image, checked before it is decoded; all images of a chat may have
            four times as many.
        max_kept_image_bytes: most bytes of decoded images that are kept for later turns.
        image_url_timeout_s: longest time for fetching an image, redirects included.

    Raises:
        ConfigError: a value is out of range.
    """

    max_body_bytes: int = 32 * MIB
    max_header_bytes: int = 64 * 1024
    max_json_depth: int = 64
    max_json_parts: int = 200_000
    max_messages: int = 8192
    max_prompts: int = 256
    max_samples: int = 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_s: int = 30
    slow_client_timeout_s: float = 30.0
    ping_interval_s: float = 15.0
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * MIB
    max_background_responses: int = 64
    max_websockets: int = 256
    background_timeout_s: float = 3600.0
    max_files: int = 100
    max_file_bytes: int = 128 * MIB
    max_batch_lines: int = 50_000
    max_batches: int = 16
    max_images: int = 100
    max_image_bytes: int = 20 * MIB
    max_image_pixels: int = 36_000_000
    max_kept_image_bytes: int = 128 * MIB
    image_url_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for item in fields(ServerLimits):
            value = getattr(self, item.name)
            if item.type == "int":
                self.require(_is_int(value) and value >= 1, item.name, "an integer of at least 1")
            else:
                self.require(_is_number(value) and value > 0, item.name, "a number of seconds above 0")

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Raise ConfigError with the setting and its value, unless the condition holds."""
        if not condition:
            raise ConfigError(f"the server's {name} must be {expected}, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class ServerSettings(ServerLimits):
    """Settings of the HTTP server: address, access, and the limits that are one with them.

    Args:
        host: address to listen on; a name is resolved once.
        port: TCP port; 0 picks a free one.
        api_keys: `KEY` or `NAME=KEY` each, of users. Keys with the same name share one namespace of the
            prefix cache, so a key can be rotated without losing cached prefixes. Without any key, neither of
            users nor of admins, none is required, and everybody is an admin.
        admin_keys: keys of admins, in the form of `api_keys`; admins may see and change settings and entries
            of all tenants.
        keys_file: TOML that names tenants with their keys (hashed), limits and quotas; read again at SIGHUP.
        served_model_names: names that clients may use; empty: the model's own name.
        allowed_hosts: names accepted in the Host header besides the listening address; `*` accepts all.
        allowed_origins: origins (`https://app.example`) that browsers may call from; `*` accepts all.
        unknown_fields: handling of fields that no API of this server knows: `refuse` the request, or ignore
            them and `warn` in the answer's `warning` header.
        images: handling of images, files and sounds in messages: `show` shows images to a model that sees,
            `placeholder` shows it a short text in their place, `refuse` refuses the request, `auto` shows
            images where the model sees; what it can't see, `auto` and `show` refuse in the user's latest
            message, and replace in earlier messages and in results of tools.
        image_urls: fetch images that are given by their http(s) addresses; only public addresses are reached.
        shutdown_delay_s: time after SIGTERM in which the server still listens, not ready and answering 503 to
            new requests, so that load balancers notice before connections are refused.
        shutdown_grace_s: time that running requests have after SIGTERM or SIGINT.
        chat_format: format of reasoning and tool calls in answers: `auto` (by its chat template), a known
            family's name, a file `FAMILY.toml` that declares one, or `plain` (all text is content).
        normalize_clients: `on`: hold text of clients about themselves in prompts (Claude Code's billing
            header) constant, so that the rest is found in the cache; `off`: leave it unchanged.
        canonical_tools: show models the tools sorted by name, and the keys of their schemas sorted, so that
            clients that list them in changing orders find them in the cache.
        tools_first: show models the tools before the system prompt, where the chat template lets that be, so
            that prompts whose system prompts differ share the tools.
        trust_request_chat_template: accept `chat_template` from clients (it is a program: leave it off
            unless every client is trusted).
        structured_additional_properties: default of `additionalProperties` for objects of a JSON Schema that
            lists properties: `closed`, or `open`, JSON Schema's own default. Always closed under `strict` and
            for tools without properties.
        response_store: file for stored answers of the Responses API, for `previous_response_id` and
            retrieval; None: they are kept in memory.
        console: serve the console, a page that shows the cache, at `/`.
        access_log: one line per request.
        otlp_traces_endpoint: address that OpenTelemetry traces go to (OTLP over HTTP); None: none.
        log_format: `text`, or `json`: an object a line.
        log_level: `debug`, `info`, `warning` or `error`; None: `info`, or `debug` with `radixkv --verbose`.
        vllm_metrics: give metrics at `/metrics` under vLLM's names, too.

    Raises:
        ConfigError: a value is out of range; names the setting, the value and the range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    keys_file: str | None = None
    served_model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    unknown_fields: str = "refuse"
    images: str = "auto"
    image_urls: bool = False
    shutdown_delay_s: float = 1.0
    shutdown_grace_s: float = 30.0
    chat_format: str = AUTO
    normalize_clients: str = "on"
    canonical_tools: bool = False
    tools_first: bool = False
    trust_request_chat_template: bool = False
    structured_additional_properties: str = "closed"
    response_store: str | None = None
    console: bool = True
    access_log: bool = True
    log_format: str = "text"
    log_level: str | None = None
    vllm_metrics: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require = self.require
        require(isinstance(self.host, str) and bool(self.host), "host", "an address or a name")
        require(_is_int(self.port) and 0 <= self.port <= 65535, "port", "an integer from 0 to 65535")
        for name in ("api_keys", "admin_keys", "served_model_names", "allowed_hosts", "allowed_origins"):
            value = getattr(self, name)
            good = isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)
            if not good:  # the values may be secrets: do not print them
                raise ConfigError(f"{name} must be a list of non-empty strings")
            object.__setattr__(self, name, tuple(value))
        KeyRing.of(self.api_keys, self.admin_keys)  # refuses what is malformed or given to two tenants
        store = self.response_store
        is_file = store is None or (not os.path.isdir(store) and os.path.isdir(os.path.dirname(store) or "."))
        require(is_file, "response_store", "a file in a folder that exists")
        kinds = ("closed", "open")
        require(
            self.structured_additional_properties in kinds,
            "structured_additional_properties",
            "closed or open",
        )
        if self.chat_format != AUTO:
            named_format(self.chat_format)
        require(
            self.unknown_fields in UNKNOWN_FIELDS, "unknown_fields", "one of " + ", ".join(UNKNOWN_FIELDS)
        )
        require(self.images in IMAGES, "images", "one of " + ", ".join(IMAGES))
        require(self.normalize_clients in ("on", "off"), "normalize_clients", "on or off")
        for name in ("shutdown_delay_s", "shutdown_grace_s"):
            value = getattr(self, name)
            require(_is_number(value) and value >= 0, name, "a number of seconds of at least 0")
        require(self.log_format in FORMATS, "log_format", "one of " + ", ".join(FORMATS))
        require(self.log_level in (None, *LEVELS), "log_level", "one of " + ", ".join(LEVELS))

    @property
    def asks_for_keys(self) -> bool:
        """True if every client needs a key."""
        return bool(self.api_keys or self.admin_keys or self.keys_file)

    @property
    def has_several_tenants(self) -> bool:
        """True if there are several tenants, or a keys file may add some."""
        names = {parse_api_key(text).tenant.name for text in self.api_keys + self.admin_keys}
        return len(names) > 1 or self.keys_file is not None

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> ServerSettings:
        """Build settings from keyword options; an unknown one is an error that lists the known ones.

        Raises:
            ConfigError: unknown option, or a value out of range.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            listing = ", ".join(sorted(known))
            raise ConfigError(f"unknown server option {', '.join(unknown)}; known options: {listing}")
        return cls(**options)


def make_settings(
    *,
    api_keys: Sequence[str] | None = None,
    admin_keys: Sequence[str] | None = None,
    api_key_file: str | None = None,
    **options: Any,
) -> ServerSettings:
    """Make settings from options of a command line; None stands for the default.

    Args:
        api_keys: `KEY` or `NAME=KEY` each; without any, and without a file, the environment variable
            RADIXKV_API_KEY is read.
        admin_keys: likewise, with RADIXKV_ADMIN_KEY.
        api_key_file: file with further `api_keys`, one a line.
        options: further fields of ServerSettings.

    Raises:
        ConfigError: a value is wrong, or a key is malformed or given to two tenants.
    """
    given = {name: value for name, value in options.items() if value is not None}
    users = [*(api_keys or ()), *(keys_from_file(api_key_file) if api_key_file else ())]
    given["api_keys"] = tuple(users or keys_from_environment())
    given["admin_keys"] = tuple(admin_keys or keys_from_environment(variable=ADMIN_ENV_VARIABLE))
    return ServerSettings.from_options(given)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
