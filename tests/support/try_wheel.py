# SPDX-License-Identifier: Apache-2.0
"""Install a wheel into a clean environment, serve the embedded model from it, and ask it twice.

    python tests/support/try_wheel.py dist/radixkv-0.2.0-py3-none-any.whl [--base-only]

Uses the standard library alone, and nothing of the working tree. Pip's own settings say where torch comes
from (`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`). Exits with 1 and a sentence at the first
fault.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 600
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--base-only", action="store_true", help="without [cpu]: the cache, audit and proxy")
    parser.add_argument("-c", "--constraint", type=Path, help="pip's file of pins")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="radixkv-wheel-") as folder:
        environment = Path(folder, "environment")
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        extra = "" if options.base_only else "[cpu]"
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        if options.constraint:
            pip += ["-c", options.constraint.resolve()]
        run([*pip, f"{options.wheel.resolve()}{extra}"], folder)
        check_base(environment / "bin" / "radixkv", folder)
        if not options.base_only:
            check_served(environment / "bin" / "radixkv", folder)
    print(f"{options.wheel.name} works on Python {sys.version.split()[0]}")


def check_base(radixkv: Path, folder: str) -> None:
    """Version, cache, dashboards and audit, which need no torch."""
    version = run([radixkv, "--version"], folder).strip()
    code = (
        "from radixkv import PrefixCache\n"
        "cache = PrefixCache(num_blocks=64, block_size=16)\n"
        "lease = cache.acquire(list(range(100)))\n"
        "lease.commit(100)\n"
        "lease.release()\n"
        "print(cache.match(list(range(80))).num_tokens)\n"
    )
    expect("a cached prefix", run([radixkv.parent / "python", "-c", code], folder).strip(), "80")
    run([radixkv, "dashboards", "dashboards"], folder)
    expect("dashboards", sorted(os.listdir(Path(folder, "dashboards"))), ["alerts.yml", "radixkv.json"])
    log = Path(folder, "requests.jsonl")
    line = {"time": 1.0, "path": "/v1/chat/completions", "request": {"model": "m", **QUESTION}}
    log.write_text("".join(json.dumps({**line, "time": float(i)}) + "\n" for i in range(3)))
    run([radixkv, "audit", log], folder)
    print(f"base: version {version}")


def check_served(radixkv: Path, folder: str) -> None:
    """The embedded model's answer, and its prompt in the cache the second time."""
    with served(radixkv, folder) as url:
        first, second = (ask(url) for _ in range(2))
    expect("the answer", "Paris" in first["choices"][0]["message"]["content"], True)
    expect("the second answer", second["choices"], first["choices"])
    prompt = second["usage"]["prompt_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    expect("cached tokens of the second prompt", cached, prompt - 1)


@contextmanager
def served(radixkv: Path, folder: str) -> Iterator[str]:
    log = Path(folder, "serve.log")
    with log.open("w") as output:
        port = free_port()
        server = subprocess.Popen(
            [radixkv, "serve", "--port", str(port)], cwd=folder, stdout=output, stderr=output
        )
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_ready(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start:\n{log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def is_ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health/ready", timeout=5).status == 200
    except OSError:
        return False


def ask(url: str) -> dict[str, Any]:
    body = json.dumps({"model": "smollm2-135m-instruct", **QUESTION}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer: dict[str, Any] = json.load(urllib.request.urlopen(request, timeout=120))
    return answer


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(command: list[Any], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True)
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-4000:]
        )
    return done.stdout


def expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        sys.exit(f"{what}: {got!r}, not {wanted!r}")


if __name__ == "__main__":
    main()
