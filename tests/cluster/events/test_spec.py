# SPDX-License-Identifier: Apache-2.0
"""`--kv-events`: what is taken, and what is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.cluster.events.spec import parse_events
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "endpoint", "replay"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://localhost:5557,topic=kv-events", "tcp://localhost:5557", "tcp://localhost:5558"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557", "tcp://[::1]:5558"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://127.9.9.9:1,replay=tcp://127.0.0.1:9,tokens=none", "tcp://127.9.9.9:1", "tcp://127.0.0.1:9"),
    ],
)
def test_taken(text: str, endpoint: str, replay: str) -> None:
    spec = parse_events(text)
    assert (spec.endpoint, spec.replay) == (endpoint, replay)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no endpoint"),
        ("127.0.0.1:5557", "is no endpoint"),
        ("tcp://127.0.0.1", "is no endpoint"),
        ("tcp://127.0.0.1:99999", "is no endpoint"),
        ("tcp://127.0.0.1:65535", "no port comes after 65535; say replay=tcp://127.0.0.1:PORT"),
        ("tcp://127.0.0.1:5557/x", "is no endpoint"),
        ("ipc:///tmp/events", "is no endpoint"),
        ("tcp://*:5557", "can be reached by others"),
        ("tcp://0.0.0.0:5557", "can be reached by others"),
        ("tcp://[::]:5557", "can be reached by others"),
        ("tcp://10.0.0.1:5557", "can be reached by others"),
        ("tcp://example.org:5557", "can be reached by others"),
        ("tcp://127.0.0.1.example.org:5557", "can be reached by others"),
        ("tcp://127.0.0.1:5557,replay=tcp://0.0.0.0:5558", "can be reached by others"),
        ("tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5557", "can't share"),
        ("tcp://127.0.0.1:5557,speed=1", "'speed' is not known"),
        ("tcp://127.0.0.1:5557,topic=a,topic=b", "given twice"),
        ("tcp://127.0.0.1:5557,topic=a@b", "has no @"),
        ("tcp://127.0.0.1:5557,tokens=some", "tokens is one of open, all, none"),
        ("tcp://127.0.0.1:5557,secret=/nowhere/at/all", "can't be read"),
        ("tcp://0.0.0.0:5557,curve=/nowhere", "together with clients=FOLDER"),
        ("tcp://0.0.0.0:5557,clients=/nowhere", "together with clients=FOLDER"),
        ("tcp://0.0.0.0:5557,curve=/nowhere,clients=/nowhere", "is no file"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_events(text)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("too short\n")
    with pytest.raises(ConfigError, match="holds 9 bytes; give 16 or more"):
        parse_events(f"tcp://127.0.0.1:1,secret={file}")
    file.write_text("long enough to be one\n")
    assert parse_events(f"tcp://127.0.0.1:1,secret={file}").secret == b"long enough to be one"


def test_events_need_a_cache() -> None:
    with pytest.raises(ConfigError, match="kv_events must be unset without prefix caching"):
        EngineConfig(kv_events="tcp://127.0.0.1:1", enable_prefix_caching=False)
