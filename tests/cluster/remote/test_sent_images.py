# SPDX-License-Identifier: Apache-2.0
"""Images of requests cross a connection once, and arrive as they were sent, whoever forgets what."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from engine_process import served_in_a_thread
from scripted_engine import IMAGE_PLACEHOLDER, ScriptedEngine
from scripted_images import ScriptedImageProcessor, picture

from radixkv.channel import Channel
from radixkv.cluster.remote.messages import Ask
from radixkv.cluster.remote.sent_images import ReceivedImages, SentImage, SentImages
from radixkv.errors import InvalidRequestError, RequestFailedError
from radixkv.images.image_files import DecodedImage, image_of
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

IMAGES = [image_of(picture(seed, (64, 32 + 32 * (seed % 3)))) for seed in range(6)]


def request(images: Sequence[DecodedImage], tenant: str = "") -> Request:
    prompt = [ord("a"), *[ord(IMAGE_PLACEHOLDER)] * len(images)]
    ids, placed = ScriptedImageProcessor().place(prompt, images)
    return Request(ids, SamplingParams(max_tokens=1), images=placed, tenant=tenant)


def ask(images: Sequence[DecodedImage], tenant: str = "") -> Ask:
    return Ask(1, "generate", (request(images, tenant),), {})


def shown(asked: Ask) -> list[DecodedImage]:
    return [placed.image for placed in asked.args[0].images]


class Ends:
    """Both ends of a connection; fewer bytes are kept than all images have."""

    def __init__(self, max_bytes: int) -> None:
        self._client, self._host = SentImages(max_bytes), ReceivedImages(max_bytes)

    def send(self, images: Sequence[DecodedImage], tenant: str = "", *, is_lost: bool = False) -> int:
        """Send a request, and check what arrives; return how many images were sent on the way."""
        given = ask(images, tenant)
        *sent, last = self._client.shortened(given)
        assert shown(given) == list(images)
        for message in sent:
            assert isinstance(message, SentImage)
            self._host.take(message)
        if not is_lost:
            self._client.sent()
            assert isinstance(last, Ask)
            arrived = self._host.restored(last)
            assert shown(arrived) == list(images)
            assert list(arrived.args[0].images) == list(given.args[0].images)
        return len(sent)


def test_each_image_is_sent_once() -> None:
    ends = Ends(10**6)
    assert [ends.send(IMAGES[:count]) for count in range(1, 7)] == [1] * 6
    assert ends.send(IMAGES[:3] + IMAGES[:3]) == 0
    assert ends.send([]) == 0


def test_a_tenant_sends_its_images_whether_another_one_has_or_not() -> None:
    ends = Ends(10**6)
    assert [ends.send(IMAGES[:2], tenant) for tenant in ("ada", "bob", "ada", "bob")] == [2, 2, 0, 0]


def test_a_request_that_could_not_be_sent_changes_nothing() -> None:
    ends = Ends(10**6)
    assert ends.send(IMAGES[:2], is_lost=True) == 2
    assert ends.send(IMAGES[1:3]) == 2
    assert ends.send(IMAGES[:3]) == 1


@pytest.mark.parametrize("max_bytes", [0, 7_000, 20_000, 40_000])
def test_both_ends_forget_the_same_ones(max_bytes: int) -> None:
    ends, numbers = Ends(max_bytes), random.Random(max_bytes)
    sent = 0
    for _ in range(300):
        some = numbers.choices(IMAGES, k=numbers.randrange(5))
        sent += ends.send(some, numbers.choice(["ada", "bob"]), is_lost=numbers.random() < 0.1)
    assert sent
    assert max_bytes > 0 or ends.send(IMAGES[:1]) == 1


def test_an_image_that_was_never_sent_is_a_named_error() -> None:
    client = SentImages()
    client.shortened(ask(IMAGES[:1]))
    client.sent()
    *_, last = client.shortened(ask(IMAGES[:1]))
    assert isinstance(last, Ask)
    with pytest.raises(RequestFailedError, match="has not sent"):
        ReceivedImages().restored(last)


async def test_a_later_turn_sends_no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    send = Channel.send

    def count(channel: Channel, message: bytes) -> None:
        sizes.append(len(message))
        send(channel, message)

    monkeypatch.setattr(Channel, "send", count)
    image = image_of(picture(1, (640, 480)))
    engine = ScriptedEngine(max_model_len=10_000, image_processor=ScriptedImageProcessor())
    async with served_in_a_thread(engine) as client:
        for turn in range(3):
            sizes.clear()
            await asyncio.wait_for(client.generate(request([image])), 20)
            assert (max(sizes) > 640 * 480 * 3) == (turn == 0)
            assert max(sizes) < 100_000 or turn == 0
    assert engine.requests[-1].images[0].image == image


async def test_what_is_too_long_for_the_connection_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(max_model_len=100_000, image_processor=ScriptedImageProcessor())
    async with served_in_a_thread(engine, max_bytes=200_000) as client:
        with pytest.raises(InvalidRequestError, match="the limit is 200,000"):
            await asyncio.wait_for(client.generate(request([image_of(picture(1, (640, 480)))])), 20)
        assert await asyncio.wait_for(client.generate(request(IMAGES[:1])), 20)
