# SPDX-License-Identifier: Apache-2.0
"""LLM: the offline entry point. Prompts in, finished outputs back, with a progress bar.

Calls may be interleaved (`generate` inside a loop over `stream`, several streams in turns): each has an
inbox, and every step sorts its results into all of them.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radixkv.cache.keys import NamespaceName
from radixkv.engine.adapters import AdapterRegistry, adapted
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.output_processor import StepResult
from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.engine.weights import PauseMode, Tag, check_level, check_mode, check_tags
from radixkv.entrypoints.beam_search import BeamSearchParams, TokenArray, search_beams
from radixkv.entrypoints.given_images import (
    decoded,
    has_images_in_results,
    images_behind_results,
    split_messages,
    split_prompt,
)
from radixkv.errors import EnginePausedError, EngineStoppedError, InvalidRequestError, RequestFailedError
from radixkv.option_names import CALL_NAMES, check_names, fields_of
from radixkv.sampling.sampling_params import SamplingParams, require
from radixkv.scheduling.request import PromptLike, Request, plain_prompt
from radixkv.text.chat_formats.derive import shows_images_in_results
from radixkv.tiers.tier import Tier
from radixkv.tiers.tier_use import ASK_AGAIN_S, ASK_TIERS_S

if TYPE_CHECKING:
    from radixkv.cache.reporting.explain import MissReport

Message: TypeAlias = Mapping[str, Any]

P = ParamSpec("P")

#: Arguments that calls don't have, with what to write instead.
_NOT_OF_CALLS = fields_of(SamplingParams, "it goes into SamplingParams({}=...)") | CALL_NAMES


def _with_arguments_of(
    made: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a method the arguments of a class's constructor, for editors, type checkers and `help()`."""

    def declare(method: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = inspect.signature(method).parameters.values()
        first, named = next(iter(own)), [each for each in own if each.kind is each.KEYWORD_ONLY]
        arguments = inspect.signature(made).parameters.values()
        method.__signature__ = inspect.Signature([first, *arguments, *named])  # type: ignore[attr-defined]
        return method

    return declare


def progress_bar(progress: bool | None) -> Progress:
    """A bar on standard error; None: shown when that is a terminal."""
    show = sys.stderr.isatty() if progress is None else progress
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not show)


class _Inbox:
    """Results of all steps for the requests of one call.

    Attributes:
        running: the requests that have not ended.
        outputs: of ended requests, where whole outputs are given.
        deltas: increments not yet taken, where these are given.
    """

    __slots__ = ("deltas", "outputs", "running")

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.outputs: dict[str, RequestOutput] = {}
        self.deltas: deque[OutputDelta] = deque()


class LLM:
    """An engine in this process, used synchronously.

    Its arguments are those of `EngineConfig`: the model, and any setting by name. Beside them, `tier` is a
    memory of your own below the cache's, see `radixkv.tiers.tier`. In a `with` block it is closed at the end.

    Raises:
        ConfigError, ModelLoadError: see `radixkv.entrypoints.builder.build_engine`.

    Example::

        llm = LLM("smollm2-135m-instruct")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32, temperature=0.0))
        print(outputs[0].outputs[0].text, outputs[0].num_cached_tokens)
    """

    @_with_arguments_of(EngineConfig)
    def __init__(self, *args: Any, tier: Tier | None = None, **options: Any) -> None:
        from radixkv.entrypoints.builder import build_engine  # heavy: torch or transformers

        self._begin(build_engine(EngineConfig(*args, **options), tier=tier))

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self._inboxes: dict[str, _Inbox] = {}
        self._written: Any = None  # the folder of weights that were given as tensors
        self._image_traits: dict[str | None, bool] = {}  # whether templates show images in results
        self._is_closed = False

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """The same around an existing engine; it must not be stepped elsewhere during a call."""
        llm = cls.__new__(cls)
        llm._begin(engine)
        return llm

    def __repr__(self) -> str:
        """Return the model, the sizes, and the use of the cache."""
        engine, stats = self.engine, self.engine.cache.stats
        if self._is_closed:
            return f"<LLM {engine.model.name}, closed>"
        used = stats.total_blocks - stats.free_blocks
        rate = f"{stats.hit_tokens / stats.queried_tokens:.0%}" if stats.queried_tokens else "none yet"
        return (
            f"<LLM {engine.model.name}: context of {engine.limits.max_model_len:,} tokens; cache of "
            f"{stats.total_blocks:,} blocks of {engine.cache.block_size} tokens, {used:,} in use; "
            f"hits: {rate} of {stats.queried_tokens:,} prompt tokens>"
        )

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    @property
    def adapters(self) -> AdapterRegistry:
        """The LoRA adapters by name; `load` and `unload` change them while requests run."""
        return self.engine.adapters

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of `generate` and `chat` if none are given: the model's own recommendations."""
        return SamplingParams(**self.engine.model.default_sampling)

    # ------------------------------------------------------------------ weights and sleep

    def update_weights(
        self, weights: str | Path | Mapping[str, Any] | Iterable[tuple[str, Any]], *, mode: PauseMode = "keep"
    ) -> str:
        """Serve other weights of the same model from now on; prefixes of the earlier ones are gone.

        They are read and checked whole first: where anything is wrong, the earlier ones stay. A folder of
        safetensors may be written over afterwards; after `sleep(2)` it is read again.

        Args:
            weights: a folder with config.json and safetensors (a GGUF file where the model is one); or
                tensors by the names of the model's checkpoint, or of transformers' `named_parameters()`.
                All of them are needed; tied ones once.
            mode: what becomes of running streams: `keep` lets them go on, with all of their tokens computed
                anew, `abort` ends them, `wait` runs them to their end first.

        Returns:
            The fingerprint of the model with these weights.

        Raises:
            WeightUpdateError: they can't be read, or don't fit the model.
            InvalidRequestError: there is no such mode.
            EngineStoppedError: the LLM was closed.
        """
        self._check_open()
        check_mode(mode)
        given = None
        if isinstance(weights, str | Path):
            path = str(weights)
        else:
            from radixkv.model.loading.written_weights import WrittenWeights  # heavy: torch

            given = WrittenWeights.of(self.engine.config, weights)
            path = str(given.path)
        try:
            new = self.engine.read_weights(path)
            self._drain(mode)
            self.engine.use_weights(new)
        except BaseException:
            if given is not None:
                given.close()
            raise
        self._written = given  # the folder of the earlier ones goes
        return new.fingerprint

    def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Give memory back until `wake_up`, as in training between rollouts.

        Args:
            level: 1: the K/V's memory; 2: that of the weights, too. 0: none.
            mode: what becomes of running streams; see `update_weights`. Kept ones go on once it is awake.

        Raises:
            InvalidRequestError: there is no such level or mode, or several ranks compute the model.
            EngineStoppedError: the LLM was closed.
        """
        self._check_open()
        check_mode(mode)
        check_level(level)
        self._drain(mode)
        self.engine.sleep(level)

    def wake_up(self, tags: Collection[Tag] | None = None) -> None:
        """Take memory again that `sleep` gave back. Weights that were given up are read from their files.

        Args:
            tags: `weights`, `kv_cache`; None: both.

        Raises:
            InvalidRequestError: there is no such tag.
            WeightUpdateError: the files have gone.
        """
        self._check_open()
        weights = None
        if "weights" in check_tags(tags) and self.engine.lacks_weights:
            weights = self.engine.read_weights(self.engine.weights_path)
        self.engine.wake_up(tags, weights)

    @property
    def is_sleeping(self) -> bool:
        """True from `sleep`, at whichever level, until all is awake."""
        return self.engine.is_sleeping

    def _drain(self, mode: PauseMode) -> None:
        """End running streams, or let them end, as a mode says."""
        if mode == "abort":
            for request in self.engine.requests:
                self.engine.abort(request.request_id)
            self._sort(self.engine.take_result())
        elif mode == "wait":
            while self.engine.requests:
                self._step()

    def close(self) -> None:
        """End the engine; its tiers write their data first. May be called again; other calls fail then."""
        self._is_closed = True
        self.engine.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineStoppedError(
                "this LLM was closed, by close() or at the end of its with block: make another one"
            )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @check_names(_NOT_OF_CALLS)
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: NamespaceName = "",
        lora: str = "",
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; all run together, each shared prefix is computed once.

        Args:
            prompts: one prompt or several, each text or token ids: a sequence of integers, or a
                one-dimensional array. A two-dimensional array is a prompt per row. `{"prompt": text}` and
                `{"prompt_token_ids": token_ids}` are prompts, too, and with `"multi_modal_data": {"image":
                images}` beside them have images at the model's own words for one. They may be more than the
                engine's queue holds.
            params: for all prompts, or one per prompt; None: `get_default_sampling_params()`.
            lora: name of the adapter that answers; empty: the base model alone.
            progress: show a progress bar; None: when standard error is a terminal.

        Returns:
            One output per prompt, in order. A request that failed has `error` set; the others are unharmed.

        Raises:
            InvalidRequestError: a prompt or a parameter is bad; nothing was started.
            EngineStoppedError: the LLM was closed.
            RuntimeError: somebody else steps the engine.
        """
        self._check_open()
        several = self._as_list(prompts)
        each = self._params_for(several, params)
        requests = [
            self._request(prompt, own, namespace=namespace, lora=lora, priority=priority)
            for prompt, own in zip(several, each, strict=True)
        ]
        return self._complete(requests, namespace, progress)

    @check_names(_NOT_OF_CALLS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        namespace: NamespaceName = "",
        lora: str = "",
        priority: int = 0,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of OpenAI-style messages.

        Args:
            messages: content in parts may have images: `{"type": "image", "image": image}`, one of Pillow's,
                or a file's bytes or `Path`; or `{"type": "image_url", "image_url": {"url": data URL}}`.
            tools: JSON schemas of functions, for templates that show them to the model.
            template_options: further names for the chat template, such as `enable_thinking=False`; and
                `add_generation_prompt`, `continue_final_message`, `chat_template`.

        Further arguments, the result and errors are those of `generate`.

        Raises:
            InvalidRequestError: bad messages, or the model has no chat template.
        """
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message", param="messages")
        first = messages[0]
        conversations: Any = [messages] if isinstance(first, Mapping) else messages
        prompts = [self._template(conversation, tools, template_options) for conversation in conversations]
        return self.generate(
            prompts, params, namespace=namespace, lora=lora, priority=priority, progress=progress
        )

    @check_names(_NOT_OF_CALLS)
    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        namespace: NamespaceName = "",
        lora: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """The best beams of each prompt, best first, with their scores. The prompt is computed once.

        Raises:
            InvalidRequestError: a prompt or a parameter is bad.
            EngineStoppedError: the LLM was closed.
        """
        self._check_open()
        require(isinstance(params, BeamSearchParams), "params", "must be BeamSearchParams", params)
        tokenizer, checks = self.engine.model.tokenizer, self.engine.input_processor
        placed = [self._placed(prompt) for prompt in self._as_list(prompts)]
        several = [checks.encode(prompt).token_ids for prompt, _ in placed]

        def generate(beams: Sequence[tuple[int, TokenArray]], step: SamplingParams) -> list[RequestOutput]:
            return self._complete(
                [
                    Request(
                        np.concatenate([several[at], tokens]),
                        step,
                        images=placed[at][1],
                        namespace=namespace,
                        lora=lora,
                    )
                    for at, tokens in beams
                ],
                namespace,
                progress=False,
            )

        with progress_bar(progress) as bar:
            task = bar.add_task("Searching", total=len(several), rate="")
            return search_beams(
                several,
                params,
                generate=generate,
                end_token_ids=self.engine.model.end_token_ids,
                room_after=partial(checks.room_after, namespace=namespace),
                decode=tokenizer.decode if tokenizer is not None else None,
                on_progress=lambda num_done: bar.update(task, completed=num_done),
            )

    @check_names(_NOT_OF_CALLS)
    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        namespace: NamespaceName = "",
        lora: str = "",
    ) -> Iterator[OutputDelta]:
        """Complete one prompt, yielding each step's increment; closing the iterator aborts the request.

        Raises:
            InvalidRequestError: the prompt or a parameter is bad.
            RequestFailedError: the request failed while it ran.
            EngineStoppedError: the LLM was closed.
            RuntimeError: somebody else steps the engine.
        """
        self._check_open()
        inbox = _Inbox()
        params = params or self.get_default_sampling_params()
        request = self._request(prompt, params, namespace=namespace, lora=lora, stream=True)
        self.engine.input_processor.prepare(request)
        try:
            while not self.engine.has_room:
                self._step()
            self._note(inbox, self.engine.add(request))
            while True:
                while not inbox.deltas:
                    self._step()
                delta = inbox.deltas.popleft()
                yield delta
                if delta.is_last:
                    break
            if delta.error is not None:
                raise RequestFailedError(delta.error, code=delta.error_code)
        finally:
            self._close(inbox)

    @check_names(_NOT_OF_CALLS)
    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        namespace: NamespaceName = "",
        lora: str = "",
        **template_options: Any,
    ) -> Iterator[OutputDelta]:
        """`stream` for a conversation."""
        prompt = self._template(messages, tools, template_options)
        return self.stream(prompt, params, namespace=namespace, lora=lora)

    def _template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> PromptLike:
        if self.engine.model.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer, so no chat template: use generate")
        shown: list[Any] = list(messages)
        images: list[Any] = []
        if self.engine.model.image_processor is not None:  # else the template's check names what was given
            shown, images = split_messages(messages)
            if has_images_in_results(shown) and not self._shows_images_in_results(options):
                shown = images_behind_results(shown)
        ids: list[int] = self.engine.model.tokenizer.apply_chat_template(
            shown, tools=list(tools) if tools else None, **options
        )
        if not images:
            return ids
        prompt: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
        return cast(PromptLike, prompt)

    def _shows_images_in_results(self, options: Mapping[str, Any]) -> bool:
        """Return False if the chat template in use shows images of the user's alone; probed once."""
        given = options.get("chat_template")
        tokenizer = self.engine.model.tokenizer
        assert tokenizer is not None

        def render(messages: Any, tools: Any, more: Mapping[str, Any]) -> str:
            chosen = more if given is None else {**more, "chat_template": given}
            ids = tokenizer.apply_chat_template(messages, tools, True, **chosen)
            return tokenizer.decode(ids, skip_special_tokens=False)

        if given not in self._image_traits:
            self._image_traits[given] = shows_images_in_results(render)
        return self._image_traits[given]

    def _request(self, prompt: PromptLike, params: SamplingParams, **options: Any) -> Request:
        """Return the request of a prompt, with its images placed."""
        prompt, images = self._placed(prompt)
        return Request(plain_prompt(prompt), params, images=images, **options)

    def _placed(self, prompt: PromptLike) -> tuple[PromptLike, Sequence[Any]]:
        """Return a prompt with the ids of its images' tokens, and the images at their places."""
        prompt, given = split_prompt(prompt)
        if not given:
            return prompt, ()
        processor = self.engine.model.image_processor
        if processor is None:
            raise InvalidRequestError("this model takes text only, and no images", param="images")
        ids = self.engine.input_processor.encode(prompt).token_ids
        return processor.place(cast(Sequence[int], ids), [decoded(image) for image in given])

    @staticmethod
    def _as_list(prompts: Any) -> list[PromptLike]:
        if isinstance(prompts, str | Mapping):
            return [cast(PromptLike, prompts)]
        dimensions = getattr(prompts, "ndim", None)  # of an array
        if dimensions is not None and dimensions not in (1, 2):
            raise InvalidRequestError(
                f"token ids must be a flat array, or one row per prompt, not of shape {tuple(prompts.shape)}",
                param="prompts",
            )
        if dimensions == 1:
            return [prompts]
        if not isinstance(prompts, Iterable):
            raise InvalidRequestError(
                f"a prompt is text or a sequence of token ids, not {prompts!r:.80}", param="prompts"
            )
        several = list(prompts)
        # An id is an integer: one of Python's, or an array's without dimensions.
        is_id = several and (isinstance(several[0], int) or getattr(several[0], "ndim", None) == 0)
        return [several] if is_id else several

    def _params_for(
        self, prompts: Sequence[PromptLike], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, Sequence):  # one for all; Request refuses what is no SamplingParams
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(params)} sampling parameters were given for {len(prompts)} prompts; "
                "give one, or one for each"
            )
        return list(params)

    def explain(self, prompt: PromptLike, namespace: NamespaceName = "", *, lora: str = "") -> MissReport:
        """Explain how much of a prompt is cached, why the rest is not, and a tier's part; changes nothing.

        Args:
            prompt: text or token ids, as for `generate`.

        Raises:
            InvalidRequestError: the prompt is bad, or there is no adapter of the name `lora`.
            EngineStoppedError: the LLM was closed.
        """
        self._check_open()
        token_ids = self.engine.input_processor.encode(self._placed(prompt)[0])
        if lora:
            self.engine.adapters.acquire(lora)
            card = self.engine.adapters.card(lora)
            namespace = adapted(namespace, card.namespace_part if card else "")
        cache = self.engine.cache
        namespace = self.engine.limits.namespace(cache.namespace_key(namespace), len(token_ids))
        report = cache.explain(token_ids, namespace)
        if self.engine.limits.lengths is not None:
            report = self.engine.limits.lengths.explained(report, cache, token_ids, namespace)
        end = time.monotonic() + ASK_TIERS_S
        while time.monotonic() < end:
            explained = self.engine.explain_by_tiers(report, token_ids, namespace)
            if explained is not None:
                return explained
            time.sleep(ASK_AGAIN_S)
        return report

    def explain_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        namespace: NamespaceName = "",
        lora: str = "",
        **template_options: Any,
    ) -> MissReport:
        """`explain` for a conversation."""
        return self.explain(self._template(messages, tools, template_options), namespace, lora=lora)

    # ------------------------------------------------------------------ steps

    def _complete(
        self, requests: Sequence[Request], namespace: NamespaceName, progress: bool | None
    ) -> list[RequestOutput]:
        """Check requests, before anything is started, and run them."""
        checks = self.engine.input_processor
        for request in requests:
            checks.prepare(request)
        for request in requests:
            request.grammar = checks.compile(request.params, namespace)
        return self._run(requests, progress)

    def _run(self, requests: Sequence[Request], progress: bool | None) -> list[RequestOutput]:
        """Start requests, as the queue takes them, and wait for all."""
        inbox, count = _Inbox(), len(requests)
        ids: list[str] = []
        with progress_bar(progress) as bar:
            task = bar.add_task("Generating", total=count, rate="")
            before = self.engine.stats().generated_tokens
            try:
                while len(inbox.outputs) < count:
                    while len(ids) < count and self.engine.has_room:
                        ids.append(self.engine.add(requests[len(ids)]))
                        self._note(inbox, ids[-1])
                    self._step()
                    if not bar.disable:
                        elapsed = bar.tasks[0].elapsed or 0.0
                        rate = (self.engine.stats().generated_tokens - before) / max(elapsed, 1e-9)
                        bar.update(task, completed=len(inbox.outputs), rate=f"{rate:.1f} tokens/s")
            finally:  # no request may outlive a failure or an interrupt
                self._close(inbox)
        return [inbox.outputs[request_id] for request_id in ids]

    def _note(self, inbox: _Inbox, request_id: str) -> None:
        inbox.running.add(request_id)
        self._inboxes[request_id] = inbox

    def _step(self) -> None:
        """Make one step of the engine, for all callers."""
        self._check_open()
        if self.engine.is_frozen:
            raise EnginePausedError("this LLM sleeps: call wake_up() first")
        if not self.engine.has_work:
            raise RuntimeError(
                "this LLM's requests have ended, but their outputs went to somebody else: only the LLM may "
                "step its engine while its calls are under way"
            )
        self.engine.wait()
        self._sort(self.engine.step())

    def _sort(self, result: StepResult) -> None:
        for delta in result.deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.deltas.append(delta)
                if delta.is_last:
                    self._forget(delta.request_id)
        for output in result.finished:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.outputs[output.request_id] = output
                self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        """A request has ended."""
        self._inboxes.pop(request_id).running.remove(request_id)

    def _close(self, inbox: _Inbox) -> None:
        """Its call is over: end what of it still runs."""
        for request_id in list(inbox.running):
            self._forget(request_id)
            self.engine.abort(request_id)
        self._sort(self.engine.take_result())
