# SPDX-License-Identifier: Apache-2.0
"""An engine's process that is killed while its tower runs, behind a server: chats go on at another engine."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from scripted_images import data_url, picture
from tiny_vision_models import save_tiny_vision_model
from waiting import until

from radixkv.cluster.remote.process import start_engine
from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.builder import build_engine

pytestmark = pytest.mark.nightly
SIZE = (96, 64)


def seeing_engine(folder: Path, begun: Any, goes_on: Any) -> AsyncEngine:
    """An engine whose tower says that it has begun, and waits in its second layer until it may go on."""
    engine = build_engine(
        EngineConfig(str(folder), num_blocks=128, max_model_len=512, warm_up="off", dtype="float32")
    )

    def wait(*_: Any) -> None:
        begun.set()
        goes_on.wait()

    engine.runner.images.vision.tower.blocks[1].register_forward_pre_hook(wait)  # type: ignore[union-attr]
    return AsyncEngine(engine)


def body(seed: int) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": data_url(picture(seed, SIZE))}}
    said = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    return {"model": "qwen", "messages": said, "max_tokens": 4, "temperature": 0}


def test_a_chat_goes_on_at_another_engine_or_gets_an_error_by_name(tmp_path: Path) -> None:
    folder = save_tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    context = multiprocessing.get_context("forkserver")
    engines: dict[str, Any] = {}
    processes: dict[str, Any] = {}
    begun, goes_on = ({name: context.Event() for name in ("one", "two")} for _ in range(2))
    for name in ("one", "two"):
        before = set(multiprocessing.active_children())
        make = partial(seeing_engine, folder, begun[name], goes_on[name])
        engines[name] = start_engine(make, method="forkserver")
        (processes[name],) = set(multiprocessing.active_children()) - before
    engine = ReplicatedEngine(engines, patience_s=1.0)
    try:
        with (
            live_server(engine, served_model_names=("qwen",)) as server,
            ThreadPoolExecutor(1) as pool,
            server.http() as http,
        ):
            asked = pool.submit(http.post, "/v1/chat/completions", json=body(1), timeout=120)
            dies = until(lambda: next((name for name in begun if begun[name].is_set()), None))
            lives = "two" if dies == "one" else "one"
            processes[dies].kill()
            until(begun[lives].is_set)  # the same image is encoded there
            goes_on[lives].set()
            answer = asked.result(120)
            assert answer.status_code == 200, answer.text
            again = http.post("/v1/chat/completions", json=body(1)).json()
            assert again["choices"][0]["message"] == answer.json()["choices"][0]["message"]
            usage = again["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
            assert engine.stats().cache.held_blocks == 0

            begun[lives].clear()
            goes_on[lives].clear()
            asked = pool.submit(http.post, "/v1/chat/completions", json=body(2), timeout=120)
            until(begun[lives].is_set)
            processes[lives].kill()
            failed = asked.result(120)
            assert failed.status_code == 503, failed.text
            assert failed.json()["error"]["message"]
            assert http.get("/health/ready").status_code == 503
    finally:
        asyncio.run(engine.close())
