# SPDX-License-Identifier: Apache-2.0
"""Each tenant's share of the compiler: its queue, its compiled grammars, its CPU time.

Not synchronised: the compiler's lock is held where these are used, but for the accounts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from radixkv.cache.keys import NamespaceKey
from radixkv.errors import EngineOverloadedError, InvalidRequestError
from radixkv.grammar.masks import Grammar
from radixkv.grammar.work import WorkAccount
from radixkv.sampling.structured import StructuredOutputs

#: Cached grammars of all tenants; the tenant with the most gives way.
MAX_KNOWN = 256
MAX_KNOWN_BYTES = 512 * 2**20
#: A grammar whose automaton has grown beyond this is compiled again when it is asked for again.
_MAX_GROWN_BYTES = 64 * 2**20
#: Grammars of one tenant that may wait.
MAX_WAITING = 64
#: CPU time of a tenant, as a balance and the share of time that refills it: for the work of trials and
#: compiles beyond the common, on cores that steps leave free; and for the work of masks beyond the
#: promised time, in the steps themselves.
COMPILING = (5.0, 0.25)
FOLLOWING = (1.0, 0.05)
_MAX_IDLE_TENANTS = 1_000

_Key = tuple[NamespaceKey, StructuredOutputs]


@dataclass(slots=True, eq=False)
class CompileTask:
    """Grammar that waits to be compiled."""

    namespace: NamespaceKey
    spec: StructuredOutputs
    future: Future[Grammar] = field(default_factory=Future)


class TenantGrammars:
    """Grammars of one tenant.

    Attributes:
        compiling, following: accounts of its CPU time.
        waiting: tasks that no worker has begun.
        is_served: a worker compiles for it.
    """

    def __init__(self, compiling: WorkAccount, following: WorkAccount) -> None:
        self.compiling = compiling
        self.following = following
        self.waiting: deque[CompileTask] = deque()
        self.is_served = False
        self.kept: OrderedDict[_Key, Future[Grammar]] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        accounts = (self.compiling, self.following)
        return not (self.waiting or self.is_served or self.kept) and all(one.is_full for one in accounts)

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.kept.values()))

    def known(self, namespace: NamespaceKey, spec: StructuredOutputs) -> Future[Grammar] | None:
        """Return a grammar that is compiled or about to be, or a refusal that was costly to find."""
        key = (namespace, spec)
        future = self.kept.get(key)
        grammar = _grammar(future)
        if grammar is not None:
            automaton = grammar.automaton
            if automaton.is_broken or automaton.num_bytes > _MAX_GROWN_BYTES:
                del self.kept[key]
                return None
        if future is not None:
            self.kept.move_to_end(key)
        return future

    def add(self, namespace: NamespaceKey, spec: StructuredOutputs) -> CompileTask:
        task = CompileTask(namespace, spec)
        self.kept[namespace, spec] = task.future
        self.waiting.append(task)
        return task


class Tenants:
    """Tenants with grammars or waiting tasks, or with recent use of CPU time.

    Args:
        max_known, max_known_bytes: bounds of the cached compiled grammars.
        max_waiting: grammars of one tenant that may wait.
        compiling, following: its accounts, seconds and share.
    """

    def __init__(
        self,
        *,
        max_known: int = MAX_KNOWN,
        max_known_bytes: int = MAX_KNOWN_BYTES,
        max_waiting: int = MAX_WAITING,
        compiling: tuple[float, float] = COMPILING,
        following: tuple[float, float] = FOLLOWING,
    ) -> None:
        self._accounts = (compiling, following)
        self._max_known = max_known
        self._max_known_bytes = max_known_bytes
        self._max_waiting = max_waiting
        self._tenants: OrderedDict[str, TenantGrammars] = (
            OrderedDict()
        )  # in the order in which workers come to them

    def __getitem__(self, name: str) -> TenantGrammars:
        """Return the tenant of that name, a new one if it is unknown."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MAX_IDLE_TENANTS:
                for other in [other for other, known in self._tenants.items() if known.is_idle]:
                    del self._tenants[other]
            tenant = self._tenants[name] = TenantGrammars(*(WorkAccount(*one) for one in self._accounts))
        return tenant

    @property
    def num_known(self) -> int:
        return sum(len(tenant.kept) for tenant in self._tenants.values())

    @property
    def num_ready(self) -> int:
        """Number of tenants that keep a worker busy, or could."""
        return sum(bool(tenant.waiting) or tenant.is_served for tenant in self._tenants.values())

    def check(self, tenant: TenantGrammars) -> None:
        """Refuse a further grammar of a tenant that has too many waiting, or has used its CPU time up.

        Raises:
            EngineOverloadedError: says which, and when to try again.
        """
        if len(tenant.waiting) >= self._max_waiting:
            raise EngineOverloadedError(
                f"{len(tenant.waiting)} of your grammars wait to be compiled, the most allowed; try "
                "again later"
            )
        for account, what in (
            (tenant.compiling, "to compile"),
            (tenant.following, "to follow in answers"),
        ):
            if account.is_empty:
                raise EngineOverloadedError(
                    f"your grammars have taken too much CPU time {what}; try again later, or simplify them",
                    retry_after_s=account.wait_s,
                )

    def take(self) -> tuple[TenantGrammars, CompileTask] | None:
        """Return the next task: tenants take turns, and none has two tasks at the same time."""
        for name, tenant in self._tenants.items():
            if tenant.waiting and not tenant.is_served:
                self._tenants.move_to_end(name)
                tenant.is_served = True
                return tenant, tenant.waiting.popleft()
        return None

    def finish(self, tenant: TenantGrammars, task: CompileTask, result: Grammar | BaseException) -> None:
        """Record the result of a task. A refusal is kept only if it was costly to find."""
        tenant.is_served = False
        if isinstance(result, BaseException) and not _was_costly(result):
            key = (task.namespace, task.spec)
            if tenant.kept.get(key) is task.future:
                del tenant.kept[key]
        self._make_room()

    def _make_room(self) -> None:
        while self.num_known > self._max_known:
            if not _drop_oldest(max(self._tenants.values(), key=lambda tenant: len(tenant.kept))):
                return
        sizes = {name: tenant.num_bytes for name, tenant in self._tenants.items()}
        while sum(sizes.values()) > self._max_known_bytes:
            name = max(sizes, key=sizes.__getitem__)
            if not _drop_oldest(self._tenants[name]):
                return
            sizes[name] = self._tenants[name].num_bytes


def _drop_oldest(tenant: TenantGrammars) -> bool:
    """Forget the tenant's least recently used grammar; False: all of them are being compiled."""
    key = next((key for key, future in tenant.kept.items() if future.done()), None)
    if key is None:
        return False
    del tenant.kept[key]
    return True


def _was_costly(error: BaseException) -> bool:
    return isinstance(error, InvalidRequestError) and error.code == "grammar_too_complex"


def _grammar(future: Future[Grammar] | None) -> Grammar | None:
    if future is None or not future.done() or future.exception() is not None:
        return None
    return future.result()


def _num_bytes(future: Future[Grammar]) -> int:
    grammar = _grammar(future)
    return grammar.automaton.num_bytes if grammar is not None else 0
