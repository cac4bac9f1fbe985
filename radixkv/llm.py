"""LLM: the offline door. Prompts in, finished outputs back, with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radixkv.config import EMBEDDED_MODEL, EngineConfig
from radixkv.engine.beam_search import BeamSearchParams
from radixkv.engine.engine import Engine
from radixkv.errors import InvalidRequestError, RequestFailedError
from radixkv.request import OutputDelta, RequestOutput, SamplingParams
from radixkv.scheduling.request_state import Namespace

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]


class LLM:
    """An engine in this process, used synchronously.

    Args:
        model: the embedded model's name, a folder, a hub id or a GGUF file.
        options: any field of `EngineConfig`.

    Raises:
        ConfigError, ModelLoadError: see `radixkv.engine.builder.build_engine`.

    Example::

        llm = LLM("smollm2-135m-instruct")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32, temperature=0.0))
        print(outputs[0].outputs[0].text, outputs[0].num_cached_tokens)
    """

    def __init__(self, model: str = EMBEDDED_MODEL, **options: Any) -> None:
        from radixkv.engine.builder import build_engine

        self.engine: Engine = build_engine(EngineConfig.from_options(model, options))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """The same door around an engine that exists already."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace = "",
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; all run together, each shared prefix is computed once.

        Args:
            prompts: one prompt or several, each text or token ids.
            params: for all prompts, or one per prompt.
            progress: show a progress bar; None: when standard error is a terminal.

        Returns:
            One output per prompt, in order. A request that failed has `error` set; the others are unharmed.

        Raises:
            InvalidRequestError: a prompt or a parameter is bad; nothing was started.
        """
        several = self._as_list(prompts)
        each = self._params_for(several, params)
        encoded = [self._encode(prompt) for prompt in several]
        for token_ids, own in zip(encoded, each, strict=True):
            self.engine.check_request(token_ids, own)
        ids = []
        texts: dict[str, str | None] = {}
        for prompt, token_ids, own in zip(several, encoded, each, strict=True):
            request_id = self.engine.add_request(token_ids, own, namespace=namespace, priority=priority)
            ids.append(request_id)
            texts[request_id] = prompt if isinstance(prompt, str) else None
        outputs = self._run(ids, progress)
        for request_id, output in outputs.items():
            output.prompt = texts[request_id]
        return [outputs[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        namespace: Namespace = "",
        priority: int = 0,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of OpenAI-style messages.

        Raises:
            InvalidRequestError: bad messages, or the model has no chat template.
        """
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message", param="messages")
        first = messages[0]
        conversations: Any = [messages] if isinstance(first, Mapping) else messages
        prompts = [self._template(conversation, tools, template_options) for conversation in conversations]
        return self.generate(prompts, params, namespace=namespace, priority=priority, progress=progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        namespace: Namespace = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """The best beams of each prompt, best first, with their scores. The prompt is computed once.

        Raises:
            InvalidRequestError: a prompt or a parameter is bad.
        """
        several = [self._encode(prompt) for prompt in self._as_list(prompts)]
        ids = [self.engine.add_beam_search(prompt, params, namespace=namespace) for prompt in several]
        outputs = self._run(ids, progress)
        return [outputs[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: Namespace = ""
    ) -> Iterator[OutputDelta]:
        """Complete one prompt, yielding each step's increment; closing the iterator aborts the request.

        Raises:
            RequestFailedError: the request failed while it ran.
        """
        request_id = self.engine.add_request(self._encode(prompt), params, namespace=namespace)
        finished = False
        try:
            while not finished:
                result = self.engine.step()
                for delta in result.deltas:
                    if delta.request_id == request_id:
                        yield delta
                for output in result.finished:
                    if output.request_id == request_id:
                        finished = True
                        if output.error is not None:
                            raise RequestFailedError(output.error)
        finally:
            if not finished:
                self.engine.abort(request_id)
                self.engine.take_result()

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[OutputDelta]:
        """`stream` for a conversation."""
        return self.stream(self._template(messages, None, template_options), params)

    def _template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        if self.engine.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer, so no chat template: use generate")
        ids: list[int] = self.engine.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, **options
        )
        return ids

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.engine.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer: give token ids", param="prompt")
        return self.engine.tokenizer.encode(prompt)

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        several: list[Any] = list(prompts)
        return [several] if several and isinstance(several[0], int) else several

    @staticmethod
    def _params_for(
        prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(params)} sampling parameters were given for {len(prompts)} prompts; "
                "give one, or one for each"
            )
        return list(params)

    def _run(self, ids: Sequence[str], progress: bool | None) -> dict[str, RequestOutput]:
        wanted = set(ids)
        outputs: dict[str, RequestOutput] = {}
        show = sys.stderr.isatty() if progress is None else progress
        columns = (
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
            task = bar.add_task("Generating", total=len(wanted), rate="")
            tokens = 0
            try:
                while len(outputs) < len(wanted):
                    result = self.engine.step()
                    tokens += sum(len(delta.token_ids) for delta in result.deltas)
                    for output in result.finished:
                        if output.request_id in wanted:
                            outputs[output.request_id] = output
                    elapsed = bar.tasks[0].elapsed or 0.0
                    rate = f"{tokens / elapsed:.1f} tokens/s" if elapsed else ""
                    bar.update(task, completed=len(outputs), rate=rate)
            finally:  # an interrupt must not leave requests behind
                for request_id in wanted - outputs.keys():
                    self.engine.abort(request_id)
                if len(outputs) < len(wanted):
                    self.engine.take_result()
        return outputs
