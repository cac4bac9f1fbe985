# SPDX-License-Identifier: Apache-2.0
"""Replicas on Ray Serve, over HTTP. Needs radixkv[ray]; `make test-ray` installs it and runs this."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from free_ports import free_ports
from replica_server import ReplicaServer, ray_cluster, replica_server
from tiny_models import save_tiny_model
from waiting import until

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray brings it and runs these tests")

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "docs" / "guide" / "ray_serve.yaml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaServer]:
    folder = tmp_path_factory.mktemp("replicas")
    model = save_tiny_model(folder / "model", "llama")
    options = ("--num-blocks", "400", "--no-access-log", "--threads", "1", "--warm-up", "quick")
    tier = ("--kv-tier", f"disk:{folder / 'tier'},max=1GiB,long=1")
    with replica_server(str(model), "--replicas", "2", *options, *tier) as started:
        started.folder = folder
        yield started


def complete(server: ReplicaServer, prompt: str, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def both_take(server: ReplicaServer) -> bool:
    shown = server.replicas()
    return len(shown) == 2 and all(one["takes_requests"] for one in shown.values())


def test_prompts_are_found_where_they_are_by_all_apis(server: ReplicaServer) -> None:
    until(lambda: both_take(server), 60)
    for family in range(16):
        text = f"{family} are the words of a family, and more of them, " * 3
        for turn in range(3):
            usage = complete(server, text + f"turn {turn}").json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 100) == (turn > 0), (family, turn, usage)
    assert all(one["requests"] for one in server.replicas().values()), "families are spread"
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/health/ready").status_code == 200
        asked = {"prompt": "1 are the words of a family, and more of them, "}
        told = http.post("/v1/cache/explain", json=asked).json()
        assert told["missed_tokens"] <= 1
        metrics = http.get("/metrics").text
        assert metrics.count("radixkv_replica_up{") == 2
        assert http.post("/v1/cache/reset").status_code == 200
        until(lambda: not any(one["blocks"] for one in server.replicas().values()), 10)


@pytest.mark.parametrize("lost", ["engine killed", "replica killed", "engine stopped"])
def test_a_lost_replica_fails_no_request_without_a_token_and_is_replaced(
    server: ReplicaServer, lost: str
) -> None:
    until(lambda: both_take(server), 60)
    failed: list[object] = []
    answered: list[int] = []
    ends: list[str] = []
    stop = threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            answer = complete(server, f"{number} {len(answered)} some words", max_tokens=8)
            answered.append(answer.status_code)
            if answer.status_code != 200:
                failed.append(answer.text)

    def follow(number: int) -> None:
        body = {"prompt": f"stream {number}", "max_tokens": 150, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            lines: list[str] = []
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
                lines += [line for line in answer.iter_lines() if line.startswith("data: ")]
            if lines[-1] == "data: [DONE]":
                ends.append("done")
            elif "error" in json.loads(lines[-1][6:]) and len(lines) > 1:
                ends.append("error")
            else:
                failed.append(lines)

    threads = [threading.Thread(target=target, args=(i,)) for target in (ask, follow) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(answered) > 10, 60)
        names = set(server.replicas())
        if lost == "replica killed":
            server.replica_processes()[0].kill()
        elif lost == "engine killed":
            server.engine_processes()[0].kill()
        else:
            server.engine_processes()[0].suspend()
        until(lambda: sum(one["takes_requests"] for one in server.replicas().values()) == 1, 6)
        until(lambda: both_take(server), 120)
        assert len(set(server.replicas()) - names) == 1, "one in its place"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    assert "done" in ends
    tiers = {path.name for path in (server.folder / "tier").iterdir()}
    assert tiers == {"replica-0", "replica-1"}, "the new one took over the folder of the killed one"


def test_a_reader_that_leaves_ends_its_request(server: ReplicaServer) -> None:
    until(lambda: both_take(server), 60)
    body = {"prompt": "never ending", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    until(lambda: not any(one["running_requests"] for one in server.replicas().values()), 2)


def test_a_wrong_name_in_a_config_file_is_refused() -> None:
    from radixkv.errors import ConfigError
    from radixkv_server.ray_serve.application import build

    with pytest.raises(ConfigError, match="num_blobs is not known"):
        build({"num_blobs": 3})
    with pytest.raises(ConfigError, match="unknown scheduling policy 'roundrobin'"):
        build({"scheduling_policy": "roundrobin"})
    with pytest.raises(ConfigError, match="unknown eviction policy 'mru'"):
        build({"eviction_policy": "mru"})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port", "no-such-host.invalid:6379"])
def test_a_cluster_that_is_not_there_is_said_at_once(address: str) -> None:
    command = [sys.executable, "-m", "radixkv", "serve", "--replicas", "1", "--ray-address", address]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2
    assert f"--ray-address {address}: Ray can't be reached" in refused.stderr


def test_the_config_file_is_deployed_and_a_command_joins_its_cluster(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    config = yaml.safe_load(EXAMPLE.read_text())
    (application,) = config["applications"]
    (port,) = free_ports(1)
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    application["args"] |= {"model": str(model), "num_blocks": 200, "warm_up": "quick"}
    ada, ops = (application["args"][name][0].split("=")[1] for name in ("api_keys", "admin_keys"))

    def ask(path: str, key: str, **body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{port}/v1/{path}"
        if body:
            return httpx.post(url, json=body, headers=headers, timeout=60)
        return httpx.get(url, headers=headers, timeout=60)

    def replicas() -> dict[str, dict[str, object]]:
        try:
            answer = ask("cache", ops)
        except httpx.TransportError:
            return {}
        shown = answer.json().get("replicas", []) if answer.status_code == 200 else []
        return {one["name"]: one for one in shown if one["takes_requests"]}

    with ray_cluster() as cluster:
        cluster.deploy(config, tmp_path / "config.yaml")
        until(lambda: len(replicas()) == 2, 180)
        assert ask("completions", "no-such-key", prompt="x").status_code == 401
        for number in range(8):
            body = {"prompt": f"{number} is a prompt that somebody has cached", "max_tokens": 2}
            assert ask("completions", ada, **body).status_code == 200
        before = replicas()
        until(lambda: all(one["blocks"] for one in replicas().values()), 10)
        application["deployments"][0]["num_replicas"] = 1
        cluster.deploy(config, tmp_path / "config.yaml")
        until(lambda: len(replicas()) == 1, 60)
        ((name, stays),) = replicas().items()
        assert name in before
        assert stays["blocks"], "with what it has cached"

        options = (str(model), "--replicas", "1", "--num-blocks", "100", "--ray-address", cluster.address)
        joining = [sys.executable, "-m", "radixkv", "serve", *options, "--port", str(port)]
        refused = subprocess.run(joining, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert "application named radixkv already" in refused.stderr
        assert replicas().keys() == {name}, "it was not touched"

        cluster.serve("shutdown", "-y", "--address", cluster.dashboard)
        with replica_server(*options) as joined:
            assert complete(joined, "hello").status_code == 200
        assert cluster.process.poll() is None, "who joined leaves it as it was"


def test_replicas_are_added_while_prompts_wait_and_leave_without_losing_a_chunk(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    options = ("--num-blocks", "400", "--no-access-log", "--threads", "1", "--warm-up", "quick")
    file = tmp_path / "serve.toml"
    file.write_text("[replicas]\nmax_replicas = 2\ntarget_queue_s = 0.0001\nscale_down_after_s = 4\n")
    scaling = ("--replicas", "1", "--config", str(file))
    with replica_server(str(model), *options, *scaling) as server:
        stop = threading.Event()

        def ask(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                complete(server, f"{number} {turn} a prompt that nobody has seen before " * 8)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: both_take(server), 120)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        ended: list[bool] = []

        def follow(number: int) -> None:
            body = {"prompt": f"stream {number}", "max_tokens": 200, "ignore_eos": True, "stream": True}
            body["stream_options"] = {"include_usage": True}
            while not stop.is_set():
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
                    *_, usage, done = [line for line in answer.iter_lines() if line.startswith("data: ")]
                given = json.loads(usage[6:])["usage"]["completion_tokens"]
                ended.append(given == 200 and done == "data: [DONE]")

        stop.clear()
        threads = [threading.Thread(target=follow, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(server.replicas()) == 1, 120)
            time.sleep(1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert all(ended)
        assert len(ended) > 4
