# SPDX-License-Identifier: Apache-2.0
"""ServerContext: objects shared by the routes of an app."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection

from radixkv.engine.adapters import AdapterCard
from radixkv.engine.client import EngineClient
from radixkv.errors import ConfigError, EngineOverloadedError
from radixkv.images.placed_image import FIRST_IMAGE_ID
from radixkv_server.activity.activity import Activity
from radixkv_server.activity.cache_feed import CacheFeed
from radixkv_server.activity.node_names import NodeNames
from radixkv_server.batches.folder import BatchFolder
from radixkv_server.batches.lines import BatchLimits
from radixkv_server.batches.worker import BatchWorker
from radixkv_server.chats.call_memory import CallMemory
from radixkv_server.chats.image_fetcher import ImageFetcher
from radixkv_server.chats.image_loader import ImageLoader
from radixkv_server.chats.shown_images import ShownImages
from radixkv_server.chats.templates import ChatTemplates
from radixkv_server.diagnostics.fingerprint import FingerprintStore
from radixkv_server.errors import ApiError, shutting_down
from radixkv_server.generation.background import Background
from radixkv_server.generation.prompts import PromptEncoder
from radixkv_server.http.body import BodyReader
from radixkv_server.http.middleware import RequestObserver
from radixkv_server.metrics.image_collector import ImageCollector
from radixkv_server.metrics.request_metrics import ServerMetrics
from radixkv_server.metrics.tracing import Tracing, otlp_exporter
from radixkv_server.response_file import make_store
from radixkv_server.response_store import ResponseStore
from radixkv_server.sessions import Sessions
from radixkv_server.settings import ServerSettings
from radixkv_server.tenants.registry import TenantRegistry
from radixkv_server.tenants.tenant import Tenant
from radixkv_server.weight_update import WeightUpdate

# A token is four or five characters of English or one of Chinese, which JSON may escape with six bytes.
BODY_BYTES_PER_TOKEN = 64
OTHER_BODY_BYTES = 1024 * 1024


@dataclass(slots=True)
class ServerContext:
    """The engine and its helpers; one per app, at `request.app.state.context`.

    Attributes:
        tasks: requests and background work, which the server finishes before it ends.
        applied_rules: rules for clients' own text that have changed a prompt, each logged once.
    """

    engine: EngineClient
    settings: ServerSettings
    bodies: BodyReader
    images: ImageLoader
    prompts: PromptEncoder
    templates: ChatTemplates
    metrics: ServerMetrics
    responses: ResponseStore
    batches: BatchWorker
    sessions: Sessions
    tenants: TenantRegistry
    cache_feed: CacheFeed
    background: Background
    observer: RequestObserver
    tracing: Tracing | None = None
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    activity: Activity = field(default_factory=Activity)
    fingerprints: FingerprintStore = field(default_factory=FingerprintStore)
    names: NodeNames = field(default_factory=NodeNames)
    calls: CallMemory = field(default_factory=CallMemory)
    shown_images: ShownImages = field(default_factory=ShownImages)
    applied_rules: set[str] = field(default_factory=set)
    weight_update: WeightUpdate = field(default_factory=WeightUpdate)
    is_draining: bool = False
    _sockets: Counter[str] = field(default_factory=Counter)
    _keeps_states: bool | None = None
    started: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def for_engine(cls, engine: EngineClient, settings: ServerSettings) -> ServerContext:
        endpoint = settings.otlp_traces_endpoint
        tenants = TenantRegistry(settings)
        tenants.warn_of_well_known_keys()
        tracing = None if endpoint is None else Tracing(otlp_exporter(endpoint), engine.model_name)
        metrics = ServerMetrics(engine, by_tenant=not tenants.is_open, vllm_names=settings.vllm_metrics)
        processor = engine.image_processor
        images = ImageLoader(
            max_images=settings.max_images,
            max_bytes=settings.max_image_bytes,
            max_pixels=settings.max_image_pixels,
            max_kept_bytes=settings.max_kept_image_bytes,
            fetcher=ImageFetcher(settings.max_image_bytes, settings.image_url_timeout_s)
            if settings.image_urls
            else None,
            check_size=None if processor is None else processor.num_tokens,
        )
        if processor is not None:
            metrics.registry.register(ImageCollector(engine, images))
        tasks = set[asyncio.Task[Any]]()
        return cls(
            engine=engine,
            settings=settings,
            bodies=BodyReader(
                settings.max_json_depth,
                settings.max_json_parts,
                takes_unknown=settings.unknown_fields == "warn",
                images=_images(engine, settings),
                image_urls=settings.image_urls,
            ),
            images=images,
            prompts=PromptEncoder(engine),
            templates=ChatTemplates(engine.tokenizer, settings.chat_format, tools_first=settings.tools_first),
            metrics=metrics,
            tenants=tenants,
            responses=make_store(
                settings.response_store, settings.max_stored_responses, settings.max_stored_bytes
            ),
            batches=_batch_worker(settings, engine),
            sessions=Sessions(engine.cache),
            cache_feed=CacheFeed(engine.cache),
            background=Background(settings.max_background_responses, settings.background_timeout_s, tasks),
            observer=RequestObserver(metrics, tracing, settings.access_log),
            tracing=tracing,
            tasks=tasks,
        )

    def drain(self) -> None:
        """Begin the shutdown: refuse new requests, finish running ones."""
        self.is_draining = True

    def check_serving(self) -> None:
        """Check that the server goes on; streams without an end of their own call this regularly.

        Raises:
            ApiError: 503 if the server is shutting down.
        """
        if self.is_draining:
            raise shutting_down()

    def check_admission(self) -> None:
        """Check that a generation request may begin.

        Raises:
            ApiError: 503 if the server is shutting down.
            EngineOverloadedError: the engine's queue is full.
        """
        self.check_serving()
        if self.engine.is_full:
            raise EngineOverloadedError("the queue is full (max_queue); try again later")

    @contextlib.contextmanager
    def count_socket(self, tenant: str) -> Iterator[None]:
        """Count a WebSocket of the tenant while the block runs.

        Raises:
            ApiError: 429; the tenant has too many.
        """
        most = self.settings.max_websockets
        if self._sockets[tenant] >= most:
            message = f"One API key may have {most} WebSockets open (max_websockets): close one."
            raise ApiError(429, message, code="too_many_websockets")
        self._sockets[tenant] += 1
        try:
            yield
        finally:
            self._sockets[tenant] -= 1
            if not self._sockets[tenant]:
                del self._sockets[tenant]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens spelt out; cut characters become U+FFFD.

        Words stand for images (`ShownImages`). 0.1 to 0.5 us a token, in whatever thread.
        """
        tokenizer = self.engine.tokenizer
        if max(token_ids, default=0) < FIRST_IMAGE_ID:
            return b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")
        pieces = self.shown_images.texts(list(map(int, token_ids)))
        return b"".join(
            piece.encode() if isinstance(piece, str) else b"".join(map(tokenizer.token_bytes, piece))
            for piece in pieces
        ).decode("utf-8", "replace")

    @property
    def keeps_states(self) -> bool:
        """True if requests resume at checkpoints only: the model has layers with states, or frees windows."""
        if self._keeps_states is None:
            cache = self.engine.stats().cache
            self._keeps_states = bool(cache.state_slots or cache.window_blocks)
        return self._keeps_states

    @property
    def is_ready(self) -> bool:
        """True if requests should be sent to this server."""
        return self.engine.is_healthy and not self.is_draining

    def max_body_bytes(self, num_prompts: int = 1) -> int:
        """Return the largest body of a route that takes up to `num_prompts` prompts.

        Where images are refused, a body that no context could hold is refused by its size.
        """
        if self.settings.images != "refuse":
            return self.settings.max_body_bytes
        needed = OTHER_BODY_BYTES + num_prompts * self.engine.limits.max_model_len * BODY_BYTES_PER_TOKEN
        return min(self.settings.max_body_bytes, needed)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may ask for; the first is the one that answers carry by default."""
        return self.settings.served_model_names or (self.engine.model_name,)

    def adapters_of(self, caller: Tenant) -> list[AdapterCard]:
        """Return the adapters that a tenant may use, by name."""
        return [card for card in self.engine.adapters.cards() if self.tenants.may_use(caller, card.name)]

    def adapter_names(self, caller: Tenant) -> dict[str, str]:
        """Names of the adapters that a tenant may use, by identity; of several names, the first."""
        return {card.identity: card.name for card in reversed(self.adapters_of(caller))}

    def adapter_name(self, model: str | None, caller: Tenant) -> str:
        """Return the adapter that a request's model names; empty: the base model.

        Raises:
            ApiError: 404; the tenant may not use that adapter: to it, there is none.
        """
        if model is None or model in self.model_names:
            return ""
        model = self.resolve_model(model)
        if model in self.model_names:
            return ""
        if not self.tenants.may_use(caller, model):
            raise self._no_model(model)
        return model

    def resolve_model(self, name: str | None) -> str:
        """Return the name for the answer, the base's or an adapter's; the base is the default.

        Raises:
            ApiError: 404; another model was asked for.
        """
        if name is None:
            return self.model_names[0]
        for known in (name, name.removesuffix(":latest")):  # Ollama's default tag
            if known in self.model_names or self.engine.adapters.card(known) is not None:
                return known
        raise self._no_model(name)

    def _no_model(self, name: str) -> ApiError:
        return ApiError(
            404,
            f"The model {name[:200]!r} does not exist; this server serves {', '.join(self.model_names)}.",
            param="model",
            code="model_not_found",
        )


def _images(engine: EngineClient, settings: ServerSettings) -> str:
    """Return the treatment of images, as `ServerSettings.images` has it, for this model.

    Raises:
        ConfigError: they are to be shown to a model that does not see.
    """
    if settings.images == "show" and engine.image_processor is None:
        raise ConfigError(
            "images is 'show', but this model does not see: leave --images out, or choose placeholder or "
            "refuse"
        )
    return "show" if settings.images == "auto" and engine.image_processor is not None else settings.images


def _batch_worker(settings: ServerSettings, engine: EngineClient) -> BatchWorker:
    """Make the worker of batches, whose folder lies beside the store of responses.

    Raises:
        ConfigError: the folder can't be made.
    """
    store = settings.response_store
    limits = BatchLimits(settings.max_files, settings.max_batch_lines, settings.max_batches)
    # Lines that wait must not fill the queue, which would refuse chats.
    most = max(1, min(engine.config.max_num_seqs, engine.config.max_queue // 2))
    folder = BatchFolder(None if store is None else f"{store}-batches", limits)
    return BatchWorker(folder, max_concurrent=most, max_lines=limits.max_batch_lines)


def context_of(request: HTTPConnection) -> ServerContext:
    """Return the context of the app that `request` belongs to."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context
