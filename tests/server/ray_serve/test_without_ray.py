# SPDX-License-Identifier: Apache-2.0
"""What replicas on Ray Serve need beside Ray: settings, slots, the autoscaler's decision, the connections."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_process import paged_engine
from scripted_engine import ScriptedEngine
from waiting import until

from radixkv.cluster.remote.tcp import EngineAddress, EngineListener, connect_to
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError, EngineStoppedError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv_server.ray_serve.autoscaling import QUEUE_S, Decision, decide, queue_policy
from radixkv_server.ray_serve.settings import ReplicaSettings
from radixkv_server.ray_serve.slots import Slot, private_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicas": 0}, "--replicas"),
        ({"replicas": 3, "max_replicas": 2}, r"max_replicas must .*table \[replicas\]"),
        ({"max_replicas": 2}, "together with --replicas"),
        ({"ray_address": "auto"}, "together with --replicas"),
        ({"replicas": 1, "target_queue_s": 0.0}, "target_queue_s must be above 0"),
        ({"replicas": 1, "replica_gpus": -1.0}, "replica_gpus must be at least 0"),
    ],
)
def test_wrong_settings_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        ReplicaSettings(**options)


@pytest.mark.nightly
def test_without_ray_the_command_says_what_to_install():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "sys.argv = ['radixkv', 'serve', '--replicas', '2', '--port', '0']\n"
        "from radixkv.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"needs ray: {install_command('ray')}" in done.stderr


# ---------------------------------------------------------------------- slots


def _hold(config: EngineConfig, end) -> None:
    slot = Slot.take(config)
    end.send(slot.number)
    end.recv()  # until it is killed: nothing is sent


def test_each_process_has_a_slot_and_a_killed_ones_is_free_again(tmp_path: Path):
    config = EngineConfig(
        kv_tier=(f"disk:{tmp_path},max=1GiB", "host:1GiB"), kv_events="tcp://127.0.0.1:7000"
    )
    context = multiprocessing.get_context("forkserver")
    ends, processes = [], []
    for number in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=_hold, args=(config, theirs), daemon=True)
        process.start()
        assert ours.recv() == number
        ends.append((ours, theirs))
        processes.append(process)
    processes[1].kill()
    processes[1].join()
    slot = Slot.take(config)
    assert slot.number == 1
    own = slot.config(config)
    assert own.kv_tier == (f"disk:{tmp_path}/replica-1,max=1GiB", "host:1GiB")
    assert own.kv_events == "tcp://127.0.0.1:7002,replay=tcp://127.0.0.1:7003"
    with_secret = replace(config, kv_events="tcp://127.0.0.1:7000,replay=tcp://127.0.0.1:7100,topic=x")
    assert slot.config(with_secret).kv_events == "tcp://127.0.0.1:7002,replay=tcp://127.0.0.1:7102,topic=x"
    assert slot.config(EngineConfig()) == EngineConfig()
    other = Slot.take(EngineConfig(model="another"))
    assert other.number == 0
    other.release()
    slot.release()
    for process in processes:
        process.kill()
        process.join()


# ---------------------------------------------------------------------- autoscaling


def test_waiting_for_too_long_adds_as_many_as_bring_it_down():
    decision, queues = Decision(2), {"a": 9.0, "b": 3.0}
    asked = [
        decision := decide(queues, decision, float(now), target_s=2.0, down_after_s=60.0) for now in range(5)
    ]
    assert [one.replicas for one in asked] == [2, 2, 2, 6, 6], (
        "after three seconds of it, and not at once again"
    )


def test_a_short_burst_adds_nothing():
    decision = Decision(1)
    for now, queue_s in enumerate([9.0, 9.0, 1.0, 9.0, 9.0, 1.0]):
        decision = decide({"a": queue_s}, decision, float(now), target_s=2.0, down_after_s=60.0)
        assert decision.replicas == 1


def test_one_replica_at_a_time_goes_and_the_last_one_stays():
    decision, seen = Decision(3), []
    for now in range(0, 50, 5):
        decision = decide({"a": 0.0, "b": 0.1}, decision, float(now), target_s=2.0, down_after_s=10.0)
        seen.append(decision.replicas)
    assert seen == [3, 3, 2, 2, 1, 1, 1, 1, 1, 1]


def test_a_moderate_queue_changes_nothing():
    decision = Decision(2)
    for now in range(100):
        decision = decide({"a": 1.5, "b": 1.0}, decision, float(now), target_s=2.0, down_after_s=10.0)
        assert decision == Decision(2)


def test_the_policy_reads_the_latest_reports_and_keeps_to_the_bounds():
    state: dict[str, object] = {}
    for now in range(5):
        context = SimpleNamespace(
            raw_metrics={QUEUE_S: {"a": [SimpleNamespace(value=0.0), SimpleNamespace(value=50.0)], "b": []}},
            policy_state=state,
            target_num_replicas=1,
            current_time=float(now),
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=3,
            config=SimpleNamespace(target_ongoing_requests=2.0, downscale_delay_s=60.0),
        )
        replicas, state = queue_policy(context)
        assert replicas == (3 if now == 3 else 1)


# ---------------------------------------------------------------------- connections


async def test_an_engine_is_served_to_who_has_the_key_and_stays_when_they_leave():
    engine = paged_engine(num_blocks=64)
    listener = EngineListener(engine, "127.0.0.1")
    silent = Client((listener.address.host, listener.address.port))  # says nothing, and holds up nobody
    wrong = replace(listener.address, key=b"another key")
    with pytest.raises(EngineStoppedError, match="can't be reached"):
        await asyncio.to_thread(connect_to, wrong)
    clients = [await asyncio.to_thread(connect_to, listener.address) for _ in range(2)]
    outputs = [await client.generate(Request([5, 6, 7], GREEDY)) for client in clients]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert listener.num_clients == 2
    await clients[0].close()
    assert (await clients[1].generate(Request([5, 6], GREEDY))).outputs
    assert not clients[0].is_healthy
    await asyncio.to_thread(listener.close)
    with pytest.raises(EngineStoppedError):
        await clients[1].generate(Request([5, 6], GREEDY))
    assert (await engine.generate(Request([5, 6], GREEDY))).outputs, "who made it closes it"
    await clients[1].close()
    await engine.close()
    silent.close()


def test_silent_strangers_and_a_lack_of_descriptors_end_no_listener(monkeypatch, caplog):
    monkeypatch.setattr("radixkv.cluster.remote.tcp._HANDSHAKE_S", 0.5)
    engine = paged_engine(num_blocks=64)
    listener = EngineListener(engine, "127.0.0.1")
    where = (listener.address.host, listener.address.port)
    num_threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(where, 20)) for _ in range(100)]
        clients = [connect_to(listener.address)]
        assert threading.active_count() < num_threads + 80
        for one in silent:  # each is told the challenge and then, in time, that it is over
            while one.recv(1000):
                pass

        until(lambda: not any(one.name.endswith("handshake") for one in threading.enumerate()))

        late = stack.enter_context(socket.socket())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:  # until none is left
                    stack.callback(os.close, os.dup(late.fileno()))
            late.connect(where)
            until(lambda: "Too many open files" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        clients.append(connect_to(listener.address))
    listener.close()
    for client in (*clients, engine):
        asyncio.run(client.close())


def test_a_client_gives_a_silent_listener_up_after_some_tries(monkeypatch):
    monkeypatch.setattr("radixkv.cluster.remote.tcp._HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = EngineAddress("127.0.0.1", silent.getsockname()[1], b"a key", ScriptedEngine().facts)
        with pytest.raises(EngineStoppedError, match="it does not answer"):
            connect_to(address)
        for _ in range(3):
            silent.accept()[0].close()


def _listen(end) -> None:
    listener = EngineListener(paged_engine(num_blocks=64), "127.0.0.1")
    end.send(listener.address)
    end.recv()  # until it is killed: nothing is sent


async def test_an_engine_that_falls_silent_is_lost_though_its_machine_answers(monkeypatch):
    monkeypatch.setattr("radixkv.cluster.remote.tcp._SILENT_S", 2)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_listen, args=(theirs,), daemon=True)
    process.start()
    try:
        client = await asyncio.to_thread(connect_to, ours.recv())
        stream = client.stream(Request([5, 6, 7], replace(GREEDY, max_tokens=100_000)))
        await anext(stream)
        os.kill(process.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            with pytest.raises(EngineStoppedError):
                async for _ in stream:
                    pass
        assert not client.is_healthy
    finally:
        process.kill()
        process.join()
    await client.close()


def test_what_replicas_share_is_in_a_folder_that_nobody_else_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder() == folder
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others can't write to"):
        private_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder of this user"):
        private_folder()
