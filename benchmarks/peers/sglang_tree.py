# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix caches, loaded from its wheel without its dependencies and driven call by call.

Three of them, each with the same four calls (`match`, `insert`, `evict`, `evictable`):

- `DefaultCache`: `UnifiedRadixCache` with its Rust tree core, which is what SGLang's registry builds when no
  option is set. Called as its scheduler calls it: `match_prefix`; then lock, read the slots of the matched
  prefix, `insert`, unlock; `evict`.
- `BareCore`: the Rust tree core alone, called directly, *without* the Python that the default cache puts
  around each call: a lower bound of what SGLang pays.
- `PythonCache`: `RadixCache`, the older tree in Python.

What is not timed with any of them, in their favour: building keys (`array('q')` in a `RadixKey`) and slot
tensors, the request's bookkeeping around an insert, and a real allocator (freed slots are only counted).

The wheel imports hundreds of modules that a tree does not need (kernels, model configurations, web clients).
`load` takes only SGLang's own memory-cache modules from the wheel and puts empty modules in the place of
everything else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from benchmarks.peers.environment import PeerUnavailable, prepare_environment

VERSION = "0.5.23"
_REQUIREMENTS = ("--no-deps", f"sglang=={VERSION}", "msgspec")

# Loaded from the wheel (with all below them); any other module of sglang is replaced by an empty one.
_LOADED = (
    "sglang.srt.mem_cache",
    "sglang.srt.environ",
    "sglang.srt.runtime_context",
    "sglang.srt.rust_extensions",
    "sglang.srt.session",
    "sglang.srt.utils",
    "sglang.utils",
)
# Packages whose modules are loaded, but whose own initialisation imports half of SGLang.
_BARE_PACKAGES = ("sglang", "sglang.srt", "sglang.srt.utils")
_REAL_DEPENDENCIES = {"torch", "numpy", "msgspec", "typing_extensions"}


def install(timeout: float = 900) -> Path:
    """SGLang's wheel, without its dependencies, in the user's cache folder; returns its site-packages.

    Raises:
        PeerUnavailable: it can't be installed.
    """
    return prepare_environment("sglang", _REQUIREMENTS, timeout=timeout).site_packages


def slots(start: int, count: int) -> Any:
    """Slot numbers as SGLang's caches take them: an int64 tensor."""
    import torch  # optional: `load_tree` has checked that it is there

    return torch.arange(start, start + count)


class SlotCounter:
    """Stands in for the allocator of KV slots: frees are counted."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed = 0

    def free(self, slots: Sequence[int]) -> None:
        self.freed += len(slots)

    def free_segment(self, slots: Sequence[int], start_pos: int = 0) -> None:
        self.freed += len(slots)


@dataclass(frozen=True)
class Hit:
    """What a lookup found: tokens, the node it ended at, and the length of the prompt's key."""

    num_tokens: int
    node: Any


class TreePeer(Protocol):
    """A prefix cache beside ours. Keys are made outside the timed calls."""

    name: str

    def key(self, token_ids: list[int]) -> Any: ...
    def match(self, key: Any) -> Hit: ...
    def insert(self, key: Any, slots: Any, hit: Hit) -> None: ...
    def evict(self, num_tokens: int) -> None: ...
    def evictable(self) -> int: ...


# ---------------------------------------------------------------------- loading


class _AnyType(type):
    """Attributes of a placeholder class are placeholders too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


class _Placeholder(metaclass=_AnyType):
    """Takes the place of whatever a module that is not loaded would define; as a decorator, does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _EmptyModule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for what SGLang imports and the tree does not need."""

    def __init__(self, site_packages: Path) -> None:
        self._site_packages = str(site_packages)
        self._replaced: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top == "sglang":
            if any(fullname == name or fullname.startswith(name + ".") for name in _LOADED):
                return None
        elif top == "msgspec":
            return importlib.machinery.PathFinder.find_spec(fullname, path or [self._site_packages])
        elif top not in self._replaced:
            if top in _REAL_DEPENDENCIES or top in sys.stdlib_module_names or not self._asked_by_sglang():
                return None
            self._replaced.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def forget_replaced(self) -> None:
        """From now on, others who import those packages get the real ones."""
        for name in list(sys.modules):
            if name.partition(".")[0] in self._replaced:
                del sys.modules[name]
        self._replaced.clear()

    def _asked_by_sglang(self) -> bool:
        frame = sys._getframe(2)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame.f_code.co_filename.startswith(self._site_packages)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """SGLang logs at import and start."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def load(site_packages: Path, page_size: int) -> list[TreePeer]:
    """The caches that can be loaded from this folder, the default one first.

    Args:
        site_packages: a folder that holds `sglang`, as `pip install --no-deps sglang` leaves it, for this
            interpreter's version of Python. torch is the running interpreter's own.
        page_size: tokens per page.

    Raises:
        PeerUnavailable: there is no sglang, or none of its caches can be loaded; the message says why.
    """
    site_packages = site_packages.resolve()
    if not (site_packages / "sglang" / "srt" / "mem_cache").is_dir():
        raise PeerUnavailable(f"{site_packages}: no sglang in it")
    try:  # optional: the cache itself needs no torch
        import torch
    except ImportError as error:
        raise PeerUnavailable("SGLang's caches need torch") from error
    torch.set_num_threads(1)
    finder = _Finder(site_packages)
    for name in _BARE_PACKAGES:
        module = _EmptyModule(name)
        module.__path__ = [str(site_packages.joinpath(*name.split(".")))]
        sys.modules[name] = module
    sys.meta_path.insert(0, finder)
    loaded: list[TreePeer] = []
    problems = []
    with _quiet():
        for kind in (DefaultCache, BareCore, PythonCache):
            try:
                loaded.append(kind(page_size))
            except Exception as error:  # another version of SGLang: leave out what has changed
                problems.append(f"{kind.name}: {error!r}")
    finder.forget_replaced()
    if not loaded:
        raise PeerUnavailable(f"none of SGLang's caches can be loaded: {'; '.join(problems)}")
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    return loaded


def _module(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.mem_cache.{name}")


# ---------------------------------------------------------------------- the caches


class _CacheClass:
    """What SGLang's two cache classes have in common: keys and parameters."""

    def __init__(self) -> None:
        base = _module("base_prefix_cache")
        self._match_params = base.MatchPrefixParams
        self._insert_params = base.InsertParams
        self._evict_params = base.EvictParams
        self._radix_key = _module("radix_cache").RadixKey
        self.allocator = SlotCounter()

    def key(self, token_ids: list[int]) -> Any:
        return self._radix_key(array("q", token_ids))


class DefaultCache(_CacheClass):
    """UnifiedRadixCache over the Rust core, as `create_unified_radix_cache` makes it for a plain model."""

    name = "SGLang default cache"

    def __init__(self, page_size: int) -> None:
        super().__init__()
        component = _module("unified_cache.component_type").ComponentType
        params = _module("cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tree_components=(component.FULL,),
        )
        self._cache = _module("unified_radix_cache").UnifiedRadixCache(params)
        core = type(self._cache.tree_core).__name__
        if core != "RustUnifiedTreeCore":
            raise PeerUnavailable(f"its tree core is {core}, not the default one in Rust")

    def match(self, key: Any) -> Hit:
        found = self._cache.match_prefix(self._match_params(key=key))
        return Hit(found.device_prefix_len, found.last_device_node)

    def insert(self, key: Any, slots: Any, hit: Hit) -> None:
        cache = self._cache
        lock = cache.lock(hit.node)
        if hit.num_tokens:
            cache.path_device_indices(hit.node)
        cache.insert(self._insert_params(key=key, value=slots, prev_prefix_len=hit.num_tokens))
        cache.unlock(lock)

    def evict(self, num_tokens: int) -> None:
        self._cache.evict(self._evict_params(num_tokens=num_tokens))

    def evictable(self) -> int:
        return int(self._cache.evictable_size())


class PythonCache(_CacheClass):
    """RadixCache, SGLang's tree in Python."""

    name = "SGLang RadixCache (Python)"

    def __init__(self, page_size: int) -> None:
        super().__init__()
        params = _module("cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        self._cache = _module("radix_cache").RadixCache(params)

    def match(self, key: Any) -> Hit:
        found = self._cache.match_prefix(self._match_params(key=key))
        return Hit(found.device_prefix_len, found.last_device_node)

    def insert(self, key: Any, slots: Any, hit: Hit) -> None:
        cache = self._cache
        lock = cache.inc_lock_ref(hit.node)
        if hit.num_tokens:
            cache.path_device_indices(hit.node)
        cache.insert(self._insert_params(key=key, value=slots, prev_prefix_len=hit.num_tokens))
        cache.dec_lock_ref(hit.node, lock.to_dec_params())

    def evict(self, num_tokens: int) -> None:
        self._cache.evict(self._evict_params(num_tokens=num_tokens))

    def evictable(self) -> int:
        return int(self._cache.evictable_size())


class BareCore:
    """The Rust tree core, called directly."""

    name = "SGLang bare core (Rust)"

    def __init__(self, page_size: int) -> None:
        self._bindings = _module("rust_tree_core.extension").bindings
        params = self._bindings.TreeCoreInitParamsBinding(
            eviction_policy="lru",
            slru_protected_threshold=2,
            tlru_tail_budget=0,
            tlru_float_config=None,
            page_size=page_size,
            is_write_back=False,
            enable_hicache=False,
            write_through_threshold=256,
            device="cpu",
            swa_sliding_window_size=None,
            swa_req_ring=False,
            enable_kv_cache_events=False,
            dynamo_kv_event_format=False,
            mamba_cache_chunk_size=None,
            mamba_max_states_per_path=None,
        )
        self._core = self._bindings.RustUnifiedTreeCoreBinding(params, [0])

    def key(self, token_ids: list[int]) -> Any:
        return array("q", token_ids)

    def match(self, key: Any) -> Hit:
        found = self._core.match_prefix(
            self._bindings.MatchParamsBinding(key=key, extra_key=None, cache_salt=None)
        )
        return Hit(found.device_prefix_len, found.last_device_node_id)

    def insert(self, key: Any, slots: Any, hit: Hit) -> None:
        core, bindings = self._core, self._bindings
        lock = core.inc_lock_ref(hit.node)
        if hit.num_tokens:
            core.collect_full_device_indices(hit.node, 0)
        params = bindings.InsertParamsBinding(
            key=key,
            value=slots,
            extra_key=None,
            cache_salt=None,
            session_id=None,
            mamba_value=None,
            prev_prefix_len=hit.num_tokens,
            swa_evicted_seqlen=0,
            swa_branching_seqlen=None,
            inserted_len=0,
            priority=0,
            track_adopted_ranges=False,
            rotation_base=None,
        )
        core.begin_insert(params)
        core.end_insert()
        receipt = bindings.DecLockRefParamsBinding(
            node_id=lock.node_id,
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
            skipped_lock_components=lock.skipped_lock_components,
        )
        core.dec_lock_ref(hit.node, receipt)

    def evict(self, num_tokens: int) -> None:
        core = self._core
        freed = 0
        core.evict_device_start(0, num_tokens)
        while freed < num_tokens:
            step = core.evict_device_next_node(0, {0: freed})
            if step.node_id is None:
                if not step.made_progress:
                    break
                continue
            freed += core.evict_device_leaf(step.node_id).tracker.get(0, 0)
        core.evict_device_end(0)

    def evictable(self) -> int:
        return int(self._core.evictable_size())
