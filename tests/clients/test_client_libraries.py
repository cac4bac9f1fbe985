# SPDX-License-Identifier: Apache-2.0
"""Libraries that people use the server through, each a program in an environment of its own.

They talk to a scripted engine, which answers `say:TEXT` with TEXT: a plain answer, a stream, a tool's call
and its result (which says what the answer to it shall be), an answer of a schema, and errors.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client_environment import EnvironmentNotMade, python_environment
from live_server import live_server
from scripted_engine import ScriptedEngine

HERE = Path(__file__).parent
KEY = "a-key-of-ada"
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"city": "Paris", "degrees": 21}
ENVIRONMENTS = {
    "agents.txt": ("use_openai_agents", "use_langchain", "use_pydantic_ai", "use_llm"),
    "litellm.txt": ("use_litellm",),
}
Program = subprocess.Popen[str]


pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Program | str]]:
    """All programs, begun at once; or why one's environment is missing."""
    started: dict[str, Program | str] = {}
    with live_server(ScriptedEngine(), api_keys=(f"ada={KEY}",)) as server:
        variables = {**os.environ, "URL": server.url, "KEY": KEY, "CALL": CALL, "PYTHONPATH": ""}
        variables |= {
            "NO_PROXY": "127.0.0.1",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LANGSMITH_TRACING": "false",
        }
        try:
            with ThreadPoolExecutor() as pool:
                pythons = dict(zip(ENVIRONMENTS, pool.map(_environment, ENVIRONMENTS), strict=True))
            for requirements, names in ENVIRONMENTS.items():
                for name in names:
                    started[name] = _start(name, pythons[requirements], variables)
            yield started
        finally:
            for program in started.values():
                if not isinstance(program, str):
                    program.kill()
                    program.communicate()


def _environment(requirements: str) -> Path | str:
    try:
        return python_environment(HERE / "environments" / requirements)
    except EnvironmentNotMade as error:
        return str(error)


def _start(name: str, python: Path | str, variables: dict[str, str]) -> Program | str:
    if isinstance(python, str):
        return python
    command = [str(python), str(HERE / "programs" / f"{name}.py")]
    return subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def result(programs: dict[str, Program | str], name: str) -> dict[str, Any]:
    """What a program printed; skips the test where it has no environment."""
    program = programs[name]
    if isinstance(program, str):
        pytest.skip(f"{name} needs an environment that could not be made: {program}")
    out, problems = program.communicate(timeout=240)
    assert program.returncode == 0, problems
    return json.loads(out.strip().rpartition("\n")[2])


def check(got: dict[str, Any], *, structured: Any = WEATHER, text: str = "Hello there.") -> None:
    """What all clients must get over one API."""
    assert (got["plain"], got["stream"]) == (text, text)
    assert got["pieces"] > 3, "it came in pieces"
    # The scripted engine has half of each prompt cached.
    assert got["usage"]["cached"] == got["usage"]["prompt"] // 2 > 0
    assert set(got["tools"]) == {"It is sunny."}
    found = got.get("structured", [structured])
    assert all(each == structured for each in (found if isinstance(found, list) else [found]))


ERRORS = {"model": 404, "key": 401}


def test_openai_agents(programs: dict[str, Program | str]) -> None:
    got = result(programs, "use_openai_agents")
    for api in ("chat", "responses"):
        check(got[api])
        assert got[api]["errors"] == ERRORS
    assert got["called"] == ["Paris"] * 4
    one, two, short, long = got["chain"]
    assert (one, two) == ("One.", "Two.")
    assert long > short, "the second turn has the first before it"


def test_langchain_openai(programs: dict[str, Program | str]) -> None:
    got = result(programs, "use_langchain")
    for api in ("chat", "responses"):
        check(got[api])
        assert got[api]["stream_usage"] == got[api]["usage"]
        assert got[api]["errors"] == ERRORS
    assert got["called"] == ["Paris"] * 2
    one, two, short, long = got["chain"]
    assert (one, two) == ("One.", "Two.")
    assert long > short, "the second turn has the first before it"


def test_pydantic_ai(programs: dict[str, Program | str]) -> None:
    got = result(programs, "use_pydantic_ai")
    for api in ("chat", "responses"):
        check(got[api])
        assert got[api]["errors"] == ERRORS
    assert got["called"] == ["Paris"] * 2


def test_llm(programs: dict[str, Program | str]) -> None:
    got = result(programs, "use_llm")
    for api in ("chat", "responses"):
        check(got[api])
        assert got[api]["turns"] == ["One.", "Two."]
    assert got["chat"]["errors"] == ERRORS
    assert got["called"] == ["Paris"] * 2


def test_litellm(programs: dict[str, Program | str]) -> None:
    got = result(programs, "use_litellm")
    for api in ("chat", "messages"):
        check(got[api])
        assert got[api]["async"] == "Hello there."
        assert got[api]["errors"] == ERRORS
    assert got["called"] == ["Paris"] * 2
