# SPDX-License-Identifier: Apache-2.0
"""ReplicatedEngine: several engines with one model as one `EngineClient`.

The life of a request here:

 1. its prompt is rendered and tokenised here, once; engines get token ids;
 2. the router chooses an engine by each one's blocks and load (`radixkv.cluster.routing`), and charges it;
 3. its deltas pass through. Where an engine fails or refuses before the first one, another engine is tried;
    later the reader gets the error, since no other engine could go on with the same words;
 4. when it has ended, however that was, the charge is given back.

Engines come, are drained and go while requests run. A thread of this object's own follows their events and
looks after their health, so that callers may use any event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from radixkv.cluster.loop_thread import LoopThread
from radixkv.cluster.replicas.adapters import ReplicatedAdapters
from radixkv.cluster.replicas.attempts import Attempts, Running
from radixkv.cluster.replicas.cache import ReplicatedCache
from radixkv.cluster.replicas.member import AGAIN_S, Member
from radixkv.cluster.replicas.members import Members
from radixkv.engine.adapters import Adapters
from radixkv.engine.calls import Call
from radixkv.engine.client import EngineClient, EngineFacts
from radixkv.engine.counts import EngineStats
from radixkv.engine.input_processor import encode_prompt
from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.engine.weights import PauseMode
from radixkv.errors import ConfigError, EngineOverloadedError, EngineStoppedError, WeightUpdateError
from radixkv.scheduling.request import Request
from radixkv.text.prompt_texts import RendersChats

logger = logging.getLogger("radixkv")

#: Seconds that a request without a token waits for an engine where there is none.
PATIENCE_S = 10.0


class ReplicatedEngine(RendersChats, EngineClient):
    """See the module's text. The engines are closed with it, or when they leave.

    Args:
        engines: name -> engine; at least one.
        patience_s: see `PATIENCE_S`.

    Raises:
        ConfigError: they have not the same model and block size.
    """

    def __init__(self, engines: Mapping[str, EngineClient], *, patience_s: float = PATIENCE_S) -> None:
        first = next(iter(engines.values()))
        self._facts = first.facts
        self._patience_s = patience_s
        super().__init__()
        self._members = Members()
        self._adapters = ReplicatedAdapters(self._members, first.adapters.is_enabled)
        self._running: Running = {}
        self.cache: ReplicatedCache = ReplicatedCache(self._members, first.model_fingerprint)
        self._beside = LoopThread("radixkv-replicas")
        for name, engine in engines.items():
            member = self.add(name, engine)
            self._members.open(member, engine.is_healthy)  # nothing has been set yet

    # ------------------------------------------------------------------ engines come and go

    def add(self, name: str, engine: EngineClient) -> Member:
        """An engine takes requests, as soon as it has the quotas and the public text. Any thread.

        Raises:
            ConfigError: it has another model or block size; or the name is taken.
        """
        same = (engine.model_fingerprint, engine.limits.block_size)
        if same != (self.model_fingerprint, self.limits.block_size):
            raise ConfigError(
                f"the replica {name} ({engine.model_name}) has another model, dtype or block size than the "
                "others: all replicas must be started alike"
            )
        member = self._members.add(name, engine)
        self._beside.start(self._look_after(member))
        return member

    def drain(self, name: str) -> None:
        """An engine gets no more requests, and leaves when it has ended those it has. Any thread."""
        self._members.drain(name)

    def remove(self, name: str) -> None:
        """An engine is gone; nothing happens if it was so before. Any thread."""
        if self._members.remove(name):
            logger.info("the replica %s has left", name)

    @property
    def names(self) -> list[str]:
        """The engines that are there."""
        return [member.name for member in self._members.present()]

    @property
    def queue_s(self) -> float:
        """Seconds until the prompts that were sent are computed, on average over the engines."""
        return self._members.queue_s

    async def _look_after(self, member: Member) -> None:
        """On this object's thread: prepare, follow and watch an engine until it has left."""
        following = asyncio.ensure_future(member.follow())
        is_prepared = False
        try:
            while self._members.has(member):
                if not member.engine.is_healthy:
                    is_prepared = False
                elif not is_prepared:
                    is_prepared = await self._prepare(member)
                was_open = member.replica.is_open
                if self._members.open(member, is_prepared and member.engine.is_healthy) != was_open:
                    logger.info("the replica %s takes requests: %s", member.name, member.replica.is_open)
                if member.is_draining and not member.replica.num_running:
                    self.remove(member.name)
                await asyncio.sleep(AGAIN_S)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await member.engine.close()

    async def _prepare(self, member: Member) -> bool:
        try:
            await self.cache.prepare(member.engine.cache)
            await asyncio.to_thread(self._adapters.prepare, member.engine.adapters)
        except EngineStoppedError:
            return False
        except Exception:
            logger.exception("the replica %s can't be prepared; it gets no requests", member.name)
            return False
        return True

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Ask all engines, and merge their answers by the call's rule."""
        return self._members.perform(call, args, options, lambda engine: engine)

    # ------------------------------------------------------------------ facts

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    @property
    def is_healthy(self) -> bool:
        with contextlib.suppress(EngineStoppedError):
            return any(member.engine.is_healthy for member in self._members.present())
        return False

    @property
    def is_full(self) -> bool:
        with contextlib.suppress(EngineStoppedError):
            taking = [member for member in self._members.present() if member.replica.is_open]
            return bool(taking) and all(member.engine.is_full for member in taking)
        return False

    def stats(self) -> EngineStats:
        return self._members.stats()

    # ------------------------------------------------------------------ text

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        return await self._off_loop(
            len(text),
            lambda: encode_prompt(
                self.tokenizer, text, add_special_tokens=add_special_tokens, allow_special=allow_special
            ),
        )

    async def _encode(self, request: Request) -> Request:
        """The request with its prompt as encoded token ids, and its namespace."""
        card = self.adapters.card(request.lora) if request.lora else None
        adapter = "" if card is None else card.namespace_part
        request.namespace = self.cache.namespace(request.tenant, request.salt, adapter)
        if isinstance(request.prompt, str):
            request.text, request.prompt = request.prompt, await self.tokenize(request.prompt)
        prompt = request.prompt
        size = len(prompt) if hasattr(prompt, "__len__") else 0
        request.prompt = await self._off_loop(size, lambda: self.limits.encode(prompt))
        request.namespace = self.limits.namespace(request.namespace, len(request.prompt))
        return request

    # ------------------------------------------------------------------ requests

    async def check_quota(self, requests: Sequence[Request]) -> None:
        encoded = [await self._encode(request) for request in requests]
        error = EngineStoppedError("no replica is there", retry_after_s=1.0)
        for member in self._members.present():  # all have the same quotas
            try:
                return await member.engine.check_quota(encoded)
            except EngineStoppedError as stopped:
                error = stopped
        raise error

    async def stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        attempts = await self._attempts(request)
        with attempts.run():
            while True:
                has_begun = False
                with attempts.sent(await attempts.route()) as (engine, own):
                    try:
                        async with aclosing(engine.stream(own)) as deltas:
                            async for delta in deltas:
                                if not has_begun:
                                    has_begun = True
                                    attempts.begun()
                                yield delta
                        return
                    except (EngineStoppedError, EngineOverloadedError) as error:
                        if has_begun:
                            raise
                        attempts.failed(error)

    async def generate(self, request: Request) -> RequestOutput:
        attempts = await self._attempts(request)
        with attempts.run():
            while True:
                with attempts.sent(await attempts.route()) as (engine, own):
                    try:
                        output = await engine.generate(own)
                    except (EngineStoppedError, EngineOverloadedError) as error:
                        attempts.failed(error)  # nobody has seen any of it
                    else:
                        attempts.begun(None if output.times is None else output.times.first_token)
                        return output

    async def _attempts(self, request: Request) -> Attempts:
        await self._encode(request)
        self.limits.check_length(len(request.prompt))
        return Attempts(self._members, self._running, request, self._patience_s)

    async def update_weights(self, path: str, *, mode: PauseMode = "keep") -> str:
        """Refuse: replicas that change one after the other would answer by different weights meanwhile."""
        raise WeightUpdateError(
            "The weights of several replicas can't be changed while they run: restart them with the new "
            "ones, or serve one engine (without --replicas)"
        )

    async def abort(self, request_id: str) -> None:
        member = self._running.get(request_id)
        if member is not None:
            await member.engine.abort(request_id)

    async def close(self) -> None:
        if self._members.is_closed:
            return
        members = self._members.present()
        self._members.is_closed = True
        await asyncio.gather(*(member.engine.close() for member in members), return_exceptions=True)
        await asyncio.to_thread(self._beside.stop)
