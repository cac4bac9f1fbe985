# SPDX-License-Identifier: Apache-2.0
"""Engines that are copies of a process that has the model: answers, failures, and when that process ends."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
from tiny_models import save_tiny_model
from waiting import until

from radixkv.channel import Channel, ChannelEnded
from radixkv.cluster.remote.fork_server import fork_engine
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.loading.loader import LoadedModel
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be copied here")

PROMPTS = [[5, 6, 7, 8], list(range(3, 60)), [9] * 33]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True)


async def answers(engine: AsyncEngine, params: SamplingParams) -> list[list[int]]:
    return [(await engine.generate(Request(prompt, params))).outputs[0].token_ids for prompt in PROMPTS]


def serve(config: EngineConfig, loaded: LoadedModel, channel: Channel) -> None:
    """Answer, send that, and end once asked to."""

    async def run() -> None:
        engine = AsyncEngine.from_config(config, loaded=loaded)
        greedy, drawn = await answers(engine, GREEDY), await answers(engine, DRAWN)
        channel.send_object((os.getpid(), greedy, drawn))
        await asyncio.to_thread(channel.receive_object)
        await engine.close()

    asyncio.run(run())


@pytest.mark.usefixtures("trapped_folder")
def test_copies_answer_as_one_engine_does_and_outlive_each_other(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    config = EngineConfig(model=str(model), num_blocks=64, warm_up="quick", threads=2)
    path = tmp_path / "fork.sock"
    channels = [fork_engine(path, config, partial(serve, config)) for _ in range(2)]
    told = [channel.receive_object() for channel in channels]

    async def here() -> list[list[int]]:
        engine = AsyncEngine.from_config(config)
        try:
            return await answers(engine, GREEDY)
        finally:
            await engine.close()

    expected = asyncio.run(here())
    assert [greedy for _, greedy, _ in told] == [expected, expected]
    assert told[0][2] != told[1][2], "each draws its own"
    server = psutil.Process(told[0][0]).parent()
    os.kill(told[0][0], signal.SIGKILL)
    with pytest.raises(ChannelEnded):
        channels[0].receive_object()
    assert isinstance(fork_engine(path, config, fail).receive_object(), ConfigError)
    another = fork_engine(path, config, partial(serve, config))
    assert another.receive_object()[1] == expected
    assert psutil.Process(told[1][0]).parent() == server, "it has read the model once"
    for channel in (another, channels[1]):
        channel.send_object(None)
    server.wait(30)
    assert not path.exists(), "all have ended as they were asked to: nobody comes in their place"


def fail(loaded: LoadedModel, channel: Channel) -> None:
    raise ConfigError(f"{loaded.name} is fine, the rest is not")


@pytest.mark.nightly
def test_a_model_that_cannot_be_loaded_is_told_and_nothing_stays(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    config = EngineConfig(model=str(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match="nothing"):
        fork_engine(path, config, partial(serve, config))
    until(lambda: not path.exists())
