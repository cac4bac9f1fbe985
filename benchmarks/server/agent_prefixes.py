# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402
"""How much of their prompts coding agents find in the cache, turn by turn, with and without normalisation.

    python -m benchmarks.agent_prefixes [-k NAME] [--json FILE]

The real programs hold two sessions of three turns with calls of tools
(tests/clients/trials/hold_sessions.py), with the engine and the cache that users have; its model says what it
is told. A turn is well if at least 95 % of the prompt tokens of its requests came from the cache, or what
broke the others is named.

Claude Code adds a checksum (`cch`) to its header only for addresses that it takes for its own provider's.
`Claude Code, checksum` is the same program through a relay that adds one to each request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from radixkv import EngineConfig, SamplingParams
from radixkv.cache.keys import EncodedTokens
from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.request import PromptLike, Request

# The trials of clients are tests, and import each other by their names alone.
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests" / "support")]

from client_environment import EnvironmentNotMade, node_environment
from client_trials import (
    ENVIRONMENTS,
    MODEL,
    PAGE_MODEL,
    PROGRAMS,
    Client,
    Servers,
    program_variables,
    run_program,
)
from live_server import LiveServer, live_server
from long_context_model import save_long_context_model

WELL = 0.95
TURNS = 3
#: Name, argument of the program, environment, whether a checksum is added to its header.
AGENTS = (
    ("Claude Code", "claude-code", "claude-code", False),
    ("Claude Code, checksum", "claude-code", "claude-code", True),
    ("Codex", "codex", "codex", False),
    ("opencode", "opencode", "opencode", False),
)
#: The last thing in a prompt that is to be said.
_TOLD = re.compile(r"say\{\{(.*?)\}\}say", re.DOTALL)
_MARKS = re.compile(r"(</?tool_call>)")
#: At the end of a prompt, in which it is looked for.
_TAIL_TOKENS = 4000


class GuidedEngine(AsyncEngine):
    """The engine that users have, whose model says what its prompt tells it to; the rest is noise.

    A grammar with one text guides it, so that every token is sampled, computed and cached as usual.
    """

    def _guided(self, request: Request) -> Request:
        prompt = request.prompt
        assert isinstance(prompt, EncodedTokens)  # as the server encodes it
        ids = prompt.token_ids.tolist()
        told = _TOLD.findall(self.tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False))
        if not told:
            return request
        parts = [self._part(part) for part in _MARKS.split(told[-1]) if part]
        grammar = StructuredOutputs(grammar=f"start: {' '.join(parts)}")
        return replace(request, params=replace(request.params, structured=grammar, max_tokens=1000))

    def _part(self, text: str) -> str:
        if _MARKS.fullmatch(text):
            return f"<[{self.tokenizer.encode(text, add_special_tokens=False)[0]}]>"
        return json.dumps(text)

    async def stream(
        self, prompt: PromptLike | Request, params: SamplingParams | None = None
    ) -> AsyncGenerator[OutputDelta]:
        assert isinstance(prompt, Request)
        async for delta in super().stream(self._guided(prompt), params):
            yield delta

    async def generate(
        self, prompt: PromptLike | Request, params: SamplingParams | None = None
    ) -> RequestOutput:
        assert isinstance(prompt, Request)
        return await super().generate(self._guided(prompt), params)


@dataclass
class Turn:
    """One turn: its requests together.

    Attributes:
        breakers: what was named for each request of which less than 95 % was found.
    """

    session: int
    number: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    breakers: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


def key_of(name: str, normalizes: str) -> str:
    return "key-" + re.sub(r"\W+", "-", f"{name} {normalizes}".lower())


@contextlib.contextmanager
def with_checksums(url: str) -> Iterator[str]:
    """A relay in front of a server that adds a checksum to Claude Code's header in each request."""

    class Relay(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            body = re.sub(
                r"(x-anthropic-billing-header: cc_version=[^;]*; cc_entrypoint=[^;]*;)",
                rf"\1 cch={secrets.token_hex(3)[:5]};",
                body,
                count=1,
            )
            kept = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("host", "content-length")
            }
            answer = httpx.post(url + self.path, content=body.encode(), headers=kept, timeout=100)
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "application/json"))
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *args: Any) -> None:
            pass

    relay = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    thread = threading.Thread(target=relay.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{relay.server_port}"
    finally:
        relay.shutdown()
        thread.join()
        relay.server_close()


def measure(
    agent: tuple[str, str, str, bool], normalizes: str, server: LiveServer, folder: Path
) -> list[Turn]:
    """The turns of one agent's sessions, as the server counted them.

    Raises:
        EnvironmentNotMade: it can't be installed here.
        RuntimeError: it failed.
    """
    name, argument, environment, checksum = agent
    key = key_of(name, normalizes)
    home = node_environment(ENVIRONMENTS / environment)
    work = folder / "work" / key
    work.mkdir(parents=True)
    servers = Servers(server, server, folder)
    client = Client(name, argument, "hold_sessions.py", environment)
    with contextlib.ExitStack() as stack:
        variables = {**program_variables(client, servers, work, home), "KEY": key}
        if checksum:
            variables["URL"] = stack.enter_context(with_checksums(server.url))
        command = [sys.executable, str(PROGRAMS / client.program), argument]
        out, problems, code = run_program(command, work, variables, 500)
    said = [json.loads(line) for line in out.splitlines() if line.startswith('{"turn"')]
    if code != 0:
        raise RuntimeError(f"{name}: {problems.strip()[-600:]}")
    return _turns(server, key, [one["at"] for one in said])


def _turns(server: LiveServer, key: str, ends: list[float]) -> list[Turn]:
    turns = [Turn(1 + index // TURNS, 1 + index % TURNS) for index in range(len(ends))]
    with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
        seen = http.get("/v1/cache/requests", params={"limit": 200}).raise_for_status().json()["data"]
        for request in reversed(seen):
            turn = next((t for t, end in zip(turns, ends, strict=True) if request["started_at"] < end), None)
            if turn is None:
                continue
            turn.requests += 1
            turn.prompt_tokens += request["prompt_tokens"]
            turn.cached_tokens += request["cached_tokens"]
            if request["cached_tokens"] < WELL * request["prompt_tokens"]:
                told = http.get(f"/v1/cache/requests/{request['id']}").json()["explanation"]
                breaker = told["breaker"]
                missed = told["missed_tokens"]
                what = "new text" if breaker is None else f"{breaker['kind']} in {breaker['place']}"
                turn.breakers.append(f"{missed:,} missed: {told['reason']}, {what}")
        metrics = http.get("/metrics").text
    for name, total in (
        ("prompt", sum(turn.prompt_tokens for turn in turns)),
        ("cached_prompt", sum(turn.cached_tokens for turn in turns)),
    ):
        counted = re.findall(rf"^radixkv_{name}_tokens_total{{[^}}]*}} ([\d.e+]+)", metrics, re.M)
        if sum(map(float, counted)) != total:
            raise RuntimeError(f"/metrics counts {counted} {name} tokens, the requests {total}")
    return turns


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("-k", default="", help="only agents whose name has this text")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    asked = options.parse_args()
    agents = [agent for agent in AGENTS if re.search(asked.k, agent[0], re.IGNORECASE)]
    results: dict[str, dict[str, list[Turn]]] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = save_long_context_model(folder / MODEL)
        engine = GuidedEngine.from_config(EngineConfig(str(model), num_blocks=40_000))
        try:
            for normalizes in ("on", "off"):
                keys = tuple(f"{key}={key}" for agent in agents for key in [key_of(agent[0], normalizes)])
                with live_server(
                    engine,
                    api_keys=keys,
                    served_model_names=(MODEL, PAGE_MODEL),
                    normalize_clients=normalizes,
                ) as server:
                    for agent in agents:
                        try:
                            turns = measure(agent, normalizes, server, folder)
                        except EnvironmentNotMade as error:
                            print(f"{agent[0]}: skipped: {error}")
                            continue
                        results.setdefault(agent[0], {})[normalizes] = turns
                        _tell(agent[0], normalizes, turns)
        finally:
            asyncio.run(engine.close())
    if asked.json:
        asked.json.write_text(json.dumps(results, default=asdict, indent=1))
    return 0 if all(_is_well(modes["on"]) for modes in results.values() if "on" in modes) else 1


def _tell(name: str, normalizes: str, turns: list[Turn]) -> None:
    for turn in turns:
        print(
            f"{name:22} normalized {normalizes:3} session {turn.session} turn {turn.number}: "
            f"{turn.requests} requests, "
            f"{turn.cached_tokens:,} of {turn.prompt_tokens:,} tokens cached ({turn.share:.1%})"
            + "".join(f"\n    {breaker}" for breaker in turn.breakers),
            flush=True,
        )


def _is_well(turns: list[Turn]) -> bool:
    return all(turn.share >= WELL or turn.breakers for turn in turns if turn.number > 1)


if __name__ == "__main__":
    sys.exit(main())
