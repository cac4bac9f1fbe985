# SPDX-License-Identifier: Apache-2.0
"""RedisTier: blocks in a Redis server that several replicas share, or that outlives them.

    engine's thread    lookup: RETRY, then the result of the lookups' thread  save: to the queue
    lookups            EXISTS of all blocks at once; of each, if some are missing, and of each state
    loads              GET of one block after the other, the last first, verified; then their life is renewed
    saves              present blocks are renewed, the rest is SET, the last first, to live for `ttl` seconds

Redis evicts least recently used keys: of a text, its end. All calls have a time-out and threads of their
own. A failing call takes the tier down: it has nothing and wants nothing, and no request waits for it until a
PING gets through; a thread tries that after half a second, then after twice as long, up to half a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from radixkv.cache.block_run import BlockRun
from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError
from radixkv.text.thread_priority import yield_to_steps
from radixkv.tiers.queued_bytes import QueuedBytes
from radixkv.tiers.record import BlockKind, BlockName, RecordError, pack_record, unpack_record
from radixkv.tiers.redis.owner_keys import OwnerKeys
from radixkv.tiers.selection import Selection
from radixkv.tiers.speed import Speed
from radixkv.tiers.tier import BlocksBeforeDamage, Bytes, OpenTier, TierBlocks, TierState

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger("radixkv")

#: Seconds that one call of Redis may take.
TIMEOUT_S = 1.0
# Seconds between two tries of a Redis that can't be reached, first and at most; and between two warnings.
_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_WARNING_PAUSE_S = 60.0
# Answers of lookups that are kept, and for how many seconds they hold.
_MAX_ANSWERS = 4096
_ANSWER_S = 1.0
# Blocks that are remembered as being there.
_MAX_KNOWN = 1 << 17
# Longest that the end of the tier waits for queued writes.
_CLOSE_S = 5.0
_PREFIX = b"radixkv:kv:"


def make_client(url: str) -> Any:
    """Make a client with time-outs and without retries; it connects at its first call.

    Raises:
        ConfigError: the package is missing, or the URL is none.
    """
    try:  # optional: the extra `redis`
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError(f"--kv-tier redis: {error}; {install_command('redis')}") from None
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
        client.connection_pool.make_connection()  # what the URL asks of it is known only now
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigError(f"--kv-tier redis: {error}; write redis://HOST:PORT/DATABASE") from None
    return client


class RedisTier(OpenTier):
    """Tier of blocks in a Redis server; see the module.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, as redis-py takes it.
        kind: the blocks' kind.
        owners: names blocks, and encrypts them.
        ttl_s: seconds that a block lives after its last use.
        states: the kind of the states kept beside them; None: the model has none.
        selection: blocks to save; None: see `Selection`.

    Attributes:
        failures: call -> number of its failures in Redis.

    Raises:
        ConfigError: the package is missing, or the URL is none.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        kind: BlockKind,
        owners: OwnerKeys,
        *,
        ttl_s: int,
        states: BlockKind | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.selection = selection or Selection()
        self.keeps_states = states is not None
        self._owners = owners
        self._ttl_s = ttl_s
        # A thread each, and a connection: a save that takes its time holds up no lookup.
        self._lookups, self._loads, self._saves = (
            _Calls(url, "lookups"),
            _Calls(url, "loads"),
            _Calls(url, "saves", yields=True),
        )
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[bytes, bytes], tuple[float, int] | None] = OrderedDict()
        self._known: OrderedDict[bytes, float] = OrderedDict()  # keys that are there -> when last touched
        self._answer_speed = Speed()
        self._is_up = True
        self._is_closed = threading.Event()
        self.failures: Counter[str] = Counter()
        self._next_warning = 0.0
        self._queued = QueuedBytes()
        self._record_bytes = kind.block_bytes, 0 if states is None else states.block_bytes

    def __repr__(self) -> str:
        return f"RedisTier({'up' if self._is_up else 'down'})"

    @property
    def dropped_blocks(self) -> int:
        """Blocks that it lacked, when the queue had no room."""
        return self._queued.dropped_blocks

    # ------------------------------------------------------------------ on the engine's thread

    @property
    def is_up(self) -> bool:
        """True if the last call got through."""
        return self._is_up

    @property
    def answer_s(self) -> float:
        """Seconds from a lookup to its answer, as measured."""
        return self._answer_speed.seconds(1)

    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        """See `Tier`."""
        count = self._count(run)
        if count is None:
            return TierState.RETRY, 0
        return (TierState.HIT, count) if count else (TierState.MISS, 0)

    def last(self, run: BlockRun) -> int | None:
        """See `Tier`."""
        count = self._count(run)
        return None if count is None else count - 1

    def _count(self, run: BlockRun) -> int | None:
        """Leading blocks of a run that are there, or states up to the last one; None: not known yet."""
        now = time.monotonic()
        if not self._is_up or not len(run):
            return 0
        which = run.identities[0], run.identities[-1]
        with self._lock:
            if which in self._answers:
                answer = self._answers[which]
                if answer is None:
                    return None
                if now - answer[0] < _ANSWER_S:
                    return answer[1]
            self._answers[which] = None
            self._answers.move_to_end(which)
            if len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)
        self._lookups.submit(self._look_up, run, which, now)
        return None

    def load(self, run: BlockRun) -> Future[Sequence[TierBlocks]]:
        """See `Tier`."""
        future: Future[Sequence[TierBlocks]] = Future()
        self._loads.submit(self._load, run, future)
        return future

    def wants(self, run: BlockRun) -> range:
        """See `Tier`: missing or long unused blocks, as far as there is room."""
        if not self._is_up:
            return range(0)
        oldest = time.monotonic() - self._ttl_s / 4
        missing = [
            index
            for index, name in enumerate(self._owners.names(run))
            if self._known.get(name.key, oldest) <= oldest
        ]
        return self._queued.wanted(missing, self._record_bytes[run.is_state])

    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """See `Tier`."""
        if self._is_up:
            self._queued.add(data.nbytes)
            self._saves.submit(self._save, run, data)

    def flush(self, timeout: float) -> None:
        """See `OpenTier`: written blocks are kept."""
        self._queued.wait(timeout, or_until=lambda: not self._is_up)

    def close(self) -> None:
        """Write the queued saves, for some seconds, and close the connections. May be called again."""
        self.flush(_CLOSE_S)
        self._is_closed.set()
        for calls in (self._lookups, self._loads, self._saves):
            calls.close()

    # ------------------------------------------------------------------ on the threads

    def _look_up(self, run: BlockRun, which: tuple[bytes, bytes], asked: float) -> None:
        if not self._is_up:  # it has failed since
            with self._lock:
                self._answers.pop(which, None)
            return
        names = list(self._owners.names(run))
        count = 0
        try:
            found = self._exist(names, are_states=run.is_state)
            if run.is_state:
                count = max((place + 1 for place, is_there in enumerate(found) if is_there), default=0)
            else:
                count = found.index(False) if False in found else len(names)
        except Exception as error:
            self._failed("look up", error)
            count = 0
        now = time.monotonic()
        self._answer_speed.measured(1, now - asked)
        with self._lock:
            self._answers[which] = now, count

    def _exist(self, names: Sequence[BlockName], *, are_states: bool) -> list[bool]:
        """Tell for each record if it is there: blocks mostly are, so that one call tells of all."""
        client, keys = self._lookups.client, [_key(name) for name in names]
        if not are_states and int(client.exists(*keys)) == len(keys):
            found = [True] * len(keys)
        else:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(key)
            found = [bool(is_there) for is_there in pipeline.execute()]
        for name, is_there in zip(names, found, strict=True):
            if not is_there:  # it may be saved again
                self._forget(name)
        self._note_known(
            [name for name, is_there in zip(names, found, strict=True) if is_there], touched=False
        )
        return found

    def _load(self, run: BlockRun, future: Future[Sequence[TierBlocks]]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        blocks: list[Bytes] = []
        is_damaged = False
        try:
            if self._is_up:
                blocks, is_damaged = self._get(run, list(self._owners.names(run)))
        except Exception as error:
            self._failed("load", error)  # the load then brings no blocks
        piece = run.part(0, len(blocks))
        future.set_result([BlocksBeforeDamage(piece, blocks) if is_damaged else TierBlocks(piece, blocks)])

    def _get(self, run: BlockRun, names: Sequence[BlockName]) -> tuple[list[Bytes], bool]:
        """Return the leading blocks that are present and intact, and whether the next one is damaged."""
        client, is_damaged = self._loads.client, False
        blocks: list[Bytes] = []
        for index in reversed(range(len(names))):
            value = client.get(_key(names[index]))
            if value is None:
                self._forget(names[index])
                blocks, is_damaged = [], False
                continue
            try:
                record = self._owners.opened(run, names[index], value)
                blocks.append(unpack_record(record, names[index], run.tokens_of(index)))
            except RecordError:
                client.delete(_key(names[index]))
                self._forget(names[index])
                blocks, is_damaged = [], True
        blocks.reverse()
        self._renew(client, names[: len(blocks)])
        return blocks, is_damaged

    def _renew(self, client: Any, names: Sequence[BlockName]) -> list[BlockName]:
        """Renew the life of blocks, the last first; return the missing ones."""
        pipeline = client.pipeline(transaction=False)
        for name in reversed(names):
            pipeline.expire(_key(name), self._ttl_s)
        done = pipeline.execute() if names else []
        there = [name for name, renewed in zip(reversed(names), done, strict=True) if renewed]
        self._note_known(there, touched=True)
        return [name for name, renewed in zip(reversed(names), done, strict=True) if not renewed]

    def _save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        try:
            if not self._is_up:
                return
            client, names = self._saves.client, list(self._owners.names(run))
            indices = {name: index for index, name in enumerate(names)}
            for name in self._renew(client, names):
                index = indices[name]
                start, block = pack_record(name, run.tokens_of(index), data[index])
                value = self._owners.closed(run, name, b"".join((start, block)))
                client.set(_key(name), value, ex=self._ttl_s)
                self._note_known([name], touched=True)
        except Exception as error:
            self._failed("save", error)
        finally:
            self._queued.add(-data.nbytes)

    def _note_known(self, names: Sequence[BlockName], *, touched: bool) -> None:
        now = time.monotonic()
        with self._lock:
            for name in names:
                if touched or name.key not in self._known:
                    self._known[name.key] = now
                    self._known.move_to_end(name.key)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _forget(self, name: BlockName) -> None:
        with self._lock:
            self._known.pop(name.key, None)

    # ------------------------------------------------------------------ when it can't be reached

    def _failed(self, what: str, error: Exception) -> None:
        """Take the tier down after a failed call. A refusal by Redis (no memory, say) is no
        reason not to ask it."""
        self.failures[what] += 1
        if not _is_refusal(error):
            with self._lock:
                was_up, self._is_up = self._is_up, False
                self._answers.clear()
            if was_up:
                threading.Thread(target=self._come_back, name="radixkv-redis-ping", daemon=True).start()
            self._queued.add(0)  # wakes `flush`
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + _WARNING_PAUSE_S
            logger.warning(
                "the K/V tier redis failed to %s (%d failures so far): %s: %s; prompts are computed instead",
                what,
                self.failures.total(),
                type(error).__name__,
                error,
            )

    def _come_back(self) -> None:
        """Ping until Redis answers, on a thread that lives while the tier is down."""
        pause_s = _PAUSE_S
        while not self._is_closed.wait(pause_s):
            try:
                self._lookups.client.ping()
            except Exception as error:
                self._failed("answer", error)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                with self._lock:
                    self._is_up = True
                logger.info("the K/V tier redis answers again")
                return


class _Calls:
    """A thread with a connection."""

    def __init__(self, url: str, name: str, *, yields: bool = False) -> None:
        self.client = make_client(url)
        self._thread = ThreadPoolExecutor(
            1, f"radixkv-redis-{name}", initializer=yield_to_steps if yields else None
        )

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        self._thread.submit(call, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def _is_refusal(error: Exception) -> bool:
    import redis  # optional; a client has been made, so it is there

    return isinstance(error, redis.ResponseError)


def _key(name: BlockName) -> bytes:
    return _PREFIX + name.key.hex().encode()
