# SPDX-License-Identifier: Apache-2.0
"""Trials of the clients that people use: two turns and a call of a tool against a real server.

Each client has a program in tests/clients/trials, which runs in an environment of its own
(`client_environment`) and says what worked, line by line (trials/report.py). Two servers answer it. One has
the long-context model, with the engine and the cache that users have; what a turn found in the cache is
read from its own record. The other has an engine that answers what a prompt tells it to, for agents that
can't force a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client_environment import EnvironmentNotMade, node_environment, python_environment
from live_server import LiveServer, live_server
from long_context_model import save_long_context_model
from scripted_engine import ScriptedEngine
from told_answers import told_answer

from radixkv import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

HERE = Path(__file__).resolve().parents[1] / "clients"
ENVIRONMENTS, PROGRAMS = HERE / "environments", HERE / "trials"
MODEL = "noise"
#: The page whose settings agents are given, and the model that it names.
AGENTS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"
PAGE_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
#: About 2,000 tokens before the first turn; agents have prompts of their own.
SYSTEM = "You are the keeper of a small library by the sea, and you answer briefly. " * 80
#: Told to those that ask: nothing leaves this machine, and nobody counts us.
QUIET = {
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "AI_SDK_TELEMETRY_DISABLED": "1",
}
#: For those that don't: what is sent to other machines goes to a port where nobody listens.
NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Client:
    """A client over one of the server's APIs.

    Args:
        name: as the table of docs calls it.
        api: what its program takes as an argument.
        program: in tests/clients/trials.
        environment: a requirements file, or a folder with a lock file, in tests/clients/environments.
        converses: it holds a conversation; else its program alone decides what works.
        calls: it can call tools.
        limit_s: a trial that takes longer has failed.
        is_quick: it is one of the tests of `make test`.
    """

    name: str
    api: str
    program: str
    environment: str
    converses: bool = True
    calls: bool = True
    limit_s: float = 180.0
    is_quick: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.api})"


def _over(apis: str, *args: Any, **options: Any) -> list[Client]:
    return [Client(args[0], api, *args[1:], **options) for api in apis.split()]


CLIENTS: tuple[Client, ...] = (
    Client("Codex", "responses", "use_codex.py", "codex"),
    Client("Claude Code", "messages", "use_claude_code.py", "claude-code"),
    Client("opencode", "chat", "use_opencode.py", "opencode"),
    Client("qwen-code", "chat", "use_qwen_code.py", "qwen-code"),
    Client("aider", "chat", "use_aider.py", "aider.txt"),
    Client("pi", "chat", "use_pi.py", "pi"),
    Client("Continue", "chat", "use_continue.py", "continue"),
    Client("Cline", "chat", "use_cline.py", "cline"),
    *_over("chat responses messages", "AI SDK", "use_ai_sdk.mjs", "ai-sdk", is_quick=True),
    *_over("chat responses", "openai-agents", "use_openai_agents.py", "agents.txt"),
    *_over("chat responses", "pydantic-ai", "use_pydantic_ai.py", "agents.txt"),
    *_over("chat messages", "litellm", "use_litellm.py", "litellm.txt"),
    *_over("chat responses messages", "LangChain", "use_langchain.py", "agents.txt"),
    *_over(
        "chat responses messages",
        "LangChain's standard tests",
        "use_langchain_standard.py",
        "agents.txt",
        converses=False,
        calls=False,
    ),
    *_over("chat responses messages", "instructor", "use_instructor.py", "frameworks.txt"),
    *_over("chat", "LlamaIndex", "use_llama_index.py", "frameworks.txt"),
    *_over("chat completions", "lm-eval", "use_lm_eval.py", "lm-eval.txt", calls=False),
    Client("GuideLLM", "chat", "use_guidellm.py", "guidellm.txt", calls=False),
)


@dataclass
class Trial:
    """What came of a client's trial.

    Attributes:
        turns: texts of the turns that were answered.
        called: arguments of the tool's calls.
        prompt_tokens, cached_tokens: of the second turn's largest prompt, as the server counted them.
        notes: what else its program has to say.
        skipped: why it could not be tried.
        error: why it failed.
    """

    client: Client
    version: str = ""
    turns: list[str] = field(default_factory=list)
    called: list[Any] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    error: str = ""

    @property
    def works(self) -> bool:
        """Two turns were answered, and the tool called, by a client that does such things."""
        answered = len(self.turns) >= 2 or not self.client.converses
        called = bool(self.called) or not self.client.calls
        return not self.error and not self.skipped and answered and called


@dataclass(frozen=True)
class Servers:
    """The two servers that trials talk to."""

    real: LiveServer
    scripted: LiveServer
    folder: Path


def key_of(client: Client) -> str:
    return "key-" + re.sub(r"\W+", "-", f"{client.name}-{client.api}".lower())


@contextlib.contextmanager
def serving(folder: Path, clients: Sequence[Client]) -> Iterator[Servers]:
    """Both servers, with a key (hence a namespace of the cache) for each client; the model is in `folder`."""
    keys = tuple(f"{key_of(client)}={key_of(client)}" for client in clients)
    model = save_long_context_model(folder / MODEL)
    engine = AsyncEngine.from_config(EngineConfig(str(model), num_blocks=20_000))
    scripted = ScriptedEngine(max_model_len=1 << 20, num_blocks=1 << 16, script=told_answer)
    names = {"api_keys": keys, "served_model_names": (MODEL, PAGE_MODEL)}
    try:
        with live_server(engine, **names) as real, live_server(scripted, **names) as told:
            yield Servers(real, told, folder)
    finally:
        asyncio.run(engine.close())


def try_client(client: Client, servers: Servers) -> Trial:
    """Make the client's environment if need be, run its program, and see what the server says of it."""
    trial = Trial(client)
    environment = ENVIRONMENTS / client.environment
    try:
        if environment.is_dir():
            home = node_environment(environment)
            python = Path(sys.executable)
        else:
            python = python_environment(environment)
            home = python.parents[1]
    except EnvironmentNotMade as error:
        trial.skipped = str(error)
        return trial
    work = servers.folder / "work" / key_of(client)
    work.mkdir(parents=True)
    if client.program.endswith(".mjs"):
        # Node.js looks for packages beside the program.
        shutil.copy(PROGRAMS / client.program, work)
        (work / "node_modules").symlink_to(home / "node_modules")
        command = ["node", client.program, client.api]
    else:
        command = [str(python), str(PROGRAMS / client.program), client.api]
    out, problems, code = run_program(
        command, work, program_variables(client, servers, work, home), client.limit_s
    )
    _read(trial, out, servers)
    if code != 0:
        took_too_long = code is None and f"took more than {client.limit_s:.0f} s"
        trial.error = took_too_long or _last_line(problems) or f"its program ended with {code}"
    return trial


def program_variables(client: Client, servers: Servers, work: Path, home: Path) -> dict[str, str]:
    kept = ("PATH", "LANG", "LD_LIBRARY_PATH", "SYSTEMROOT")
    own = {
        "URL": servers.real.url,
        "SCRIPTED_URL": servers.scripted.url,
        "KEY": key_of(client),
        "MODEL": MODEL,
        "PAGE": str(AGENTS_PAGE),
        "PAGE_MODEL": PAGE_MODEL,
        "SYSTEM": SYSTEM,
        "MODEL_FOLDER": str(servers.folder / MODEL),
        "ENVIRONMENT": str(home),
        "HOME": str(work),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    return (
        {name: os.environ[name] for name in kept if name in os.environ}
        | QUIET
        | own
        | dict.fromkeys(proxies, NOWHERE)
    )


def run_program(
    command: Sequence[str], work: Path, variables: dict[str, str], limit_s: float
) -> tuple[str, str, int | None]:
    """Output, errors and exit code of a program and all that it started; None: it was ended."""
    program = subprocess.Popen(
        command,
        cwd=work,
        env=variables,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, problems = program.communicate(timeout=limit_s)
        return out, problems, program.returncode
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        out, problems = program.communicate()
        return out, problems, None


def _read(trial: Trial, out: str, servers: Servers) -> None:
    """What the program said, and the server's record of the second turn."""
    ends = []
    for line in out.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            said = json.loads(line)
            if not isinstance(said, dict) or "at" not in said:
                continue
            trial.version = said.get("version", trial.version)
            trial.notes += [said["note"]] if "note" in said else []
            trial.called += [said["called"]] if "called" in said else []
            if "turn" in said:
                trial.turns.append(said["turn"])
                ends.append(said["at"])
    if len(ends) < 2:
        return
    with servers.real.http(headers={"Authorization": f"Bearer {key_of(trial.client)}"}) as http:
        seen = http.get("/v1/cache/requests", params={"limit": 100}).raise_for_status().json()["data"]
    second = [request for request in seen if ends[0] < request["started_at"] < ends[1]]
    if second:
        largest = max(second, key=lambda request: request["prompt_tokens"] or 0)
        trial.prompt_tokens, trial.cached_tokens = largest["prompt_tokens"], largest["cached_tokens"]


def _last_line(text: str) -> str:
    """The last line that tells of an error, or else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (told or lines or [""])[-1][:300]
