# SPDX-License-Identifier: Apache-2.0
"""An engine for server tests: an `EngineClient` without a model, with answers and faults that a test scripts.

It answers a prompt whose text holds `say:TEXT` (the last of them) with TEXT (else with "ok"), one byte a
token, and obeys the parts of SamplingParams that a server test can see: max_tokens, n, stop strings,
logprobs. Tests hold it (`gate`) to look at requests in flight, make it fail at a token, and read what was
asked and aborted.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import uuid
from collections import abc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from told_deltas import collect_outputs

from radixkv import PrefixCache
from radixkv.cache.keys import TokenIds
from radixkv.engine.adapters import AdapterRegistry
from radixkv.engine.client import EngineClient, EngineFacts
from radixkv.engine.config import EngineConfig
from radixkv.engine.counts import EngineStats, TierCounts
from radixkv.engine.input_processor import InputProcessor, PromptLimits
from radixkv.engine.outputs import OutputDelta, PromptOutcome, RequestOutput
from radixkv.engine.weights import TAGS, PauseMode, Tag, check_mode, check_tags
from radixkv.entrypoints.async_cache import AsyncCache
from radixkv.errors import EngineStoppedError, InvalidRequestError, RequestFailedError, WeightUpdateError
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.masks import GrammarMask
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.grammar.work import Effort
from radixkv.images.image_processor import ImageProcessor
from radixkv.observe.advisor import Advisor
from radixkv.sampling.logprobs import Logprob, TokenLogprobs
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.request import FinishReason, PrefixPin, Request, RequestTimes
from radixkv.scheduling.sequence import Sequence
from radixkv.text.incremental_decoding import ByteLevelDecoder, IncrementalDecoder

#: What the template writes for an image.
IMAGE_PLACEHOLDER = "\0"
CONTROLS = {256: "<|im_start|>", 257: "<|im_end|>"}


class ByteTokenizer:
    """One token a UTF-8 byte, plus two control tokens that only the chat template writes."""

    vocab_size = 258
    eos_token_ids = (257,)
    has_chat_template = True
    chat_template: str | None = None

    def __init__(self) -> None:
        self.threads: set[str] = set()

    @property
    def facts(self) -> dict[str, Any]:
        named = {"bos_token": None, "eos_token": CONTROLS[257], "pad_token": None, "unk_token": None}
        return {"tokenizer_class": "ByteTokenizer", **named, "chat_template": self.chat_template}

    def encode(self, text: str, add_special_tokens: bool = True, *, allow_special: bool = True) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return list(text.encode("utf-8"))

    def decode(self, token_ids: abc.Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in token_ids if i < 256 or not skip_special_tokens)
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def stream(self, skip_special_tokens: bool = True, *, kept: object = ()) -> IncrementalDecoder:
        skipped = set(CONTROLS) if skip_special_tokens else set()
        return ByteLevelDecoder(lambda token: b"" if token in skipped else self.token_bytes(token))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else CONTROLS.get(token_id, "").encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_added_token(self, token_id: int) -> bool:
        return token_id in CONTROLS

    # What llguidance takes a tokenizer from.
    is_tokenizer_wrapper = True
    tokens: ClassVar = [bytes([i]) for i in range(256)] + [text.encode() for text in CONTROLS.values()]
    special_token_ids: ClassVar = list(CONTROLS)
    eos_token_id, bos_token_id = 257, None

    def grammar_source(self) -> ByteTokenizer:
        return self

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def apply_chat_template(
        self,
        messages: abc.Sequence[Mapping[str, Any]],
        tools: abc.Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        ids: list[int] = []
        if tools:
            ids += self.encode(f"tools:{[tool['function']['name'] for tool in tools]}\n")
        for message in messages:
            if message["content"] == "refused by the template":
                raise InvalidRequestError("the template refuses this", param="messages")
            thought = message.get("reasoning_content")
            content = message["content"]
            if isinstance(content, list):
                content = "".join(part.get("text", IMAGE_PLACEHOLDER) for part in content)
            text = f"{message['role']}\n" + (f"think {thought}\n" if thought else "") + content
            for call in message.get("tool_calls", ()):
                text += f"call {call['function']['name']}({_as_object(call['function']['arguments'])!r})"
            ids += [256, *self.encode(text), 257]
        if options:
            ids += self.encode(f"options:{sorted(options.items())}")
        if add_generation_prompt:
            ids += [256, *self.encode("assistant\n")]
        return ids


def _as_object(arguments: Any) -> Any:
    """Read arguments that come as JSON text, so that the template is one that takes objects."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


@dataclass
class Asked:
    """One request as the engine got it."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    tenant: str
    salt: str
    priority: int
    pins: abc.Sequence[PrefixPin] = ()
    aborted: bool = False
    outcome: PromptOutcome | None = None
    cache_key_hint: str = ""
    keep_tokens: int | None = None
    session_done: bool = False
    background: bool = False
    images: abc.Sequence[Any] = ()

    @property
    def owner(self) -> tuple[str, str]:
        return (self.tenant, self.salt)

    @property
    def text(self) -> str:
        return bytes(i for i in self.prompt if i < 256).decode("utf-8", "replace")


def what_to_say(prompt: str) -> str:
    """TEXT of the last `say:TEXT`, or "ok"."""
    found = re.search(r".*say:(.*?)(?:assistant\n)?$", prompt, re.DOTALL)
    return found.group(1) if found else "ok"


def scripted_stats(cache: PrefixCache) -> EngineStats:
    """Figures that a test can recognise."""
    return EngineStats(
        num_waiting=3,
        num_running=2,
        num_preemptions=1,
        prompts_waiting_for_turn=1,
        reserved_tokens=700,
        prompt_tokens=1000,
        cached_prompt_tokens=750,
        computed_prompt_tokens=250,
        computed_tokens=310,
        generated_tokens=60,
        finished_requests=12,
        failed_requests=0,
        aborted_requests=0,
        steps=40,
        steps_ahead=0,
        model_time_s=2.0,
        gap_time_s=0.05,
        num_rebuilds=0,
        cache=replace(
            cache.stats, total_blocks=100, free_blocks=70, cached_blocks=20, held_blocks=10, evicted_blocks=5
        ),
        tiers=(TierCounts("disk", hits=7, misses=2, errors={"load": 1}, refused={"checksum": 1}),),
    )


class ScriptedEngine(EngineClient):
    """See the module's text.

    Args:
        tokenizer: what stands in for a `ByteTokenizer`.
        caches: prompts are cached, as if they had been computed.
        clock: seconds, of the cache.
        num_blocks: of 16 tokens each, in the cache: what a tenant may have at most.
        script: what to answer a prompt with.
        step: tokens in each delta of a stream.
        fail: called with the request and the number of tokens already given; may return an error to raise
            there, or a finish reason to end with.
        image_processor: how images become tokens; None: the model does not see.
    """

    is_healthy = True
    is_full = False

    def __init__(
        self,
        *,
        max_model_len: int = 4096,
        num_blocks: int = 100,
        tokenizer: Any = None,
        context_length: int | None = None,
        model_fingerprint: str = "scripted-weights",
        default_sampling: Mapping[str, Any] | None = None,
        caches: bool = False,
        clock: Callable[[], float] = time.monotonic,
        script: Callable[[str], str] = what_to_say,
        step: int = 1,
        fail: Callable[[Asked, int], BaseException | FinishReason | None] | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        tokenizer = tokenizer or ByteTokenizer()
        limits = PromptLimits(
            max_model_len,
            context_length or max_model_len,
            block_size=16,
            vocab_size=tokenizer.vocab_size,
            takes_images=image_processor is not None,
        )
        self._facts = EngineFacts(
            EngineConfig(),
            "scripted",
            model_fingerprint,
            limits,
            default_sampling or {},
            tokenizer,
            image_processor,
        )
        # Nothing is computed, but what a test puts there is found.
        self.prefix_cache = PrefixCache(num_blocks, 16, observer=Advisor(16), clock=clock)
        self._caches = caches
        self._is_paused = self._is_asleep = False
        self._script = script
        self.step = step
        self.cache = AsyncCache(self._run_on_cache, self.model_fingerprint)
        self._adapters = AdapterRegistry()
        self._grammars = GrammarCompiler(lambda: Vocabulary(self.tokenizer, {257}))
        self._input_processor = InputProcessor(
            self.limits,
            cast(Any, self.tokenizer),
            seed=None,
            end_token_ids=frozenset({257}),
            max_blocks=self._max_blocks,
            clock=time.monotonic,
            grammars=self._grammars,
        )
        self._running: dict[str, Asked] = {}
        self.fail = fail or (lambda asked, given: None)
        self.requests: list[Asked] = []
        self.closed = threading.Event()
        # Open: tokens flow. A test closes it to keep requests in flight at `hold_at` tokens.
        self.gate = threading.Event()
        self.gate.set()
        self.hold_at = 0
        self._changed = threading.Condition()

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def adapters(self) -> AdapterRegistry:
        return self._adapters

    def stats(self) -> EngineStats:
        return scripted_stats(self.prefix_cache)

    async def _run_on_cache(self, function: Callable[[PrefixCache], Any]) -> Any:
        self._raise_if_closed()
        return function(self.prefix_cache)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        return self._input_processor.tokenize(
            text, add_special_tokens=add_special_tokens, allow_special=allow_special
        )

    async def render_chat(
        self,
        messages: abc.Sequence[Mapping[str, Any]],
        *,
        tools: abc.Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt, **options)

    def note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120.0) -> None:
        """Block a test's thread until the engine has got where it should."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), "the engine never got there"

    def release(self) -> None:
        self.gate.set()

    async def _at_gate(self, given: int) -> None:
        # Waits in a thread only while a test holds the gate.
        if given == self.hold_at and not self.gate.is_set():
            await wait_for_event(self.gate)
        self._raise_if_closed()

    def _raise_if_closed(self) -> None:
        if self.closed.is_set():
            raise EngineStoppedError("the engine has been closed")

    def _max_blocks(self, tokens: TokenIds, namespace: Any) -> int:
        """Of a ceiling, if there is one: what is computed here takes nothing of the pool."""
        most = self.prefix_cache.max_blocks(tokens, namespace)
        return self.limits.max_model_len if most == self.prefix_cache.num_blocks else most

    def _prepare(self, request: Request) -> None:
        request.namespace = self.cache.namespace(request.tenant, request.salt)
        self._input_processor.prepare(request)
        self._input_processor.check_quota(request)

    async def check_quota(self, requests: abc.Sequence[Request]) -> None:
        for request in requests:
            self._prepare(request)

    async def stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        self._prepare(request)
        self._input_processor.compile(request.params, request.namespace)  # refuses what the engine refuses
        self._raise_if_closed()
        request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        if request_id in self._running:
            raise InvalidRequestError(f"a request with the id {request_id!r} is running already")
        asked = Asked(
            request_id,
            request.prompt.token_ids.tolist(),
            request.params,
            request.tenant,
            request.salt,
            request.priority,
            request.pins,
            cache_key_hint=request.cache_key_hint,
            keep_tokens=request.keep_tokens,
            session_done=request.session_done,
            background=request.background,
            images=request.images,
        )
        asked.outcome = self._look_up(asked)
        self.requests.append(asked)
        self._running[request_id] = asked
        self.note()
        finished = False
        try:
            async for delta in self._deltas(asked):
                yield delta
            finished = True
        finally:
            del self._running[request_id]
            asked.aborted = not finished
            self.note()

    def _look_up(self, asked: Asked) -> PromptOutcome:
        """Half of the prompt is cached, or with `caches` as much as was asked for before."""
        num_tokens, namespace, report = len(asked.prompt), self.cache.namespace(*asked.owner), None
        cached = num_tokens // 2
        if self._caches:
            lease = self.prefix_cache.acquire(asked.prompt, namespace)
            cached, report = lease.num_cached_tokens, lease.report
            lease.commit(num_tokens)
        pinned = [
            self.prefix_cache.pin(asked.prompt[: pin.num_tokens], namespace, pin.ttl, at_least=True)
            for pin in asked.pins
        ]
        if self._caches:
            lease.release(keep=asked.keep_tokens, done=asked.session_done)
        return PromptOutcome(
            num_tokens,
            cached,
            num_tokens - cached,
            max((0 if pin is None else pin.num_tokens for pin in pinned), default=None),
            report,
            _prompt_logprobs(asked),
        )

    def _start(self, spec: StructuredOutputs) -> GrammarMask:
        """A grammar at its beginning, which no tenant's account pays for."""
        return self._grammars.compile(spec).start(effort=UnlimitedEffort())

    async def _deltas(self, asked: Asked) -> AsyncIterator[OutputDelta]:
        params, end = asked.params, self.tokenizer.eos_token_ids[0]
        times = RequestTimes(first_scheduled=0.0)
        if params.samples_nothing:
            times = replace(times, finished=0.0)
            ended: Any = {"finish_reason": "length", "prompt": asked.outcome, "times": times, "is_last": True}
            yield OutputDelta(asked.request_id, 0, "", [], **ended)
            return
        said = self._script(self.tokenizer.decode(asked.prompt))
        tokens = [*self.tokenizer.encode(said, add_special_tokens=False), end]
        room = self.limits.max_model_len - len(asked.prompt)
        sample = Sequence(Request(asked.prompt, params))  # all samples are alike
        sample.begin_output(self.tokenizer, frozenset({end}), min(params.max_tokens or room, room))
        mask = self._start(params.grammar) if params.grammar is not None else None
        given = 0
        await self._at_gate(given)
        arrival = time.monotonic()
        while sample.finish_reason is None:
            fault = self.fail(asked, given)
            if isinstance(fault, BaseException):
                raise fault
            new: list[int] = []
            while sample.finish_reason is None and len(new) < self.step:
                token = tokens[given] if given < len(tokens) else end
                if mask is not None:
                    token = allowed_token(mask, token)
                    mask.accept(token)
                new.append(token)
                given += 1
                sample.push(token, is_complete=mask is not None and mask.is_complete)
            if fault is not None or asked.aborted:
                sample.abort(fault or "abort")
            reason, (text, _) = sample.finish_reason, sample.take()
            now, is_first = time.monotonic() - arrival, given == len(new)
            times = replace(times, first_token=times.first_token or now, finished=now if reason else None)
            for index in range(params.num_samples):
                tells = is_first and index == 0
                yield OutputDelta(
                    asked.request_id,
                    index,
                    text,
                    new,
                    logprobs=None
                    if not params.reports_logprobs
                    else [_logprobs(t, params.logprobs or 0, params.logprob_token_ids or ()) for t in new],
                    finish_reason=reason,
                    stop_reason=sample.stop_reason,
                    prompt=asked.outcome if tells else None,
                    times=times if tells or reason else None,
                    error="scripted failure" if reason == "error" else None,
                    is_last=reason is not None and index == params.num_samples - 1,
                )
            if reason == "error":
                raise RequestFailedError("scripted failure")
            await self._at_gate(given)
            await asyncio.sleep(0)

    async def generate(self, request: Request) -> RequestOutput:
        outputs = collect_outputs([delta async for delta in self.stream(request)])
        (output,) = outputs.values()
        output.prompt, output.prompt_token_ids = request.text, request.prompt.token_ids.tolist()
        del output.outputs[request.params.n :]
        return output

    async def pause(self, *, mode: PauseMode = "abort") -> None:
        check_mode(mode)
        self._is_paused = True

    async def resume(self) -> None:
        self._is_paused = False

    async def is_paused(self) -> bool:
        return self._is_paused or self._is_asleep

    async def update_weights(self, path: str, *, mode: PauseMode = "keep") -> str:
        raise WeightUpdateError(f"The weights were not changed: {path} has none for a script.")

    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        check_mode(mode)
        self._is_asleep = True

    async def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        self._is_asleep = self._is_asleep and check_tags(tags) != TAGS

    async def is_sleeping(self) -> bool:
        return self._is_asleep

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].aborted = True

    async def close(self) -> None:
        self.is_healthy = False
        self.closed.set()
        self.gate.set()
        self.cache.fail_all(EngineStoppedError("the engine has been closed"))


class UnlimitedEffort(Effort):
    """What a busy machine adds to the CPU time of masks ends no answer."""

    @property
    def is_too_much(self) -> bool:
        return False


def allowed_token(mask: GrammarMask, wanted: int) -> int:
    """The token that is wanted, or else one that brings the answer to its end."""
    logits = torch.zeros(1, ByteTokenizer.vocab_size)
    type(mask).apply(logits, [0], [mask])
    allowed = torch.isfinite(logits[0]).nonzero()[:, 0].tolist()
    if wanted in allowed:
        return wanted
    return next((token for token in (257, *b'}]"0') if token in allowed), allowed[0])


def _logprobs(token: int, num_top: int, named: Iterable[int] = ()) -> TokenLogprobs:
    """The chosen token at -0.5; the likeliest are it and its neighbours; named at -1, -2, ..."""
    top = tuple(Logprob((token + i) % 256, -0.5 - i, i + 1) for i in range(num_top))
    return TokenLogprobs(Logprob(token, -0.5, 1), top, {one: -1.0 - i for i, one in enumerate(named)})


def _prompt_logprobs(asked: Asked) -> list[TokenLogprobs | None] | None:
    wanted = asked.params.prompt_logprobs
    return None if wanted is None else [None, *(_logprobs(token, wanted) for token in asked.prompt[1:])]


async def wait_for_event(event: threading.Event) -> None:
    """Await a thread's event without polling; cancellable."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    stop = threading.Event()

    def wait() -> None:
        event.wait()
        if not stop.is_set():
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=wait, daemon=True).start()
    try:
        await done.wait()
    finally:
        stop.set()
