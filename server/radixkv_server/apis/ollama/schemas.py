# SPDX-License-Identifier: Apache-2.0
"""Bodies of Ollama's routes, and their conversion into chat completions.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import field_validator

from radixkv.text.json_text import JsonText
from radixkv_server.apis.common.fields import RequestFields
from radixkv_server.chats.call_memory import Recall
from radixkv_server.dialect import Json
from radixkv_server.http.body import FAIL_FAST, StrictModel
from radixkv_server.http.fields import Refused, WithoutEffect

_OfLoading = Annotated[Any, WithoutEffect("the model is loaded as the server was started")]
_Mirostat = Annotated[Any, Refused("mirostat", usual=(0,))]
_KeepAlive = Annotated[Any, WithoutEffect("the model stays loaded")]


class OllamaSampling(StrictModel):
    """Options that completions share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaOptions(OllamaSampling):
    """Options of sampling; options of model loading have no effect."""

    num_predict: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[Any, WithoutEffect("penalties look at the whole text")] = None
    num_keep: Annotated[Any, WithoutEffect("nothing of a prompt is dropped")] = None
    penalize_newline: Annotated[Any, WithoutEffect("penalties treat all tokens alike", usual=(True,))] = None
    num_ctx: _OfLoading = None
    num_batch: _OfLoading = None
    num_gpu: _OfLoading = None
    main_gpu: _OfLoading = None
    num_thread: _OfLoading = None
    numa: _OfLoading = None
    low_vram: _OfLoading = None
    f16_kv: _OfLoading = None
    use_mmap: _OfLoading = None
    use_mlock: _OfLoading = None
    vocab_only: Annotated[Any, Refused("a vocabulary alone")] = None
    embedding_only: Annotated[Any, Refused("embeddings")] = None
    logits_all: _OfLoading = None
    mirostat: _Mirostat = None
    mirostat_tau: Annotated[Any, WithoutEffect("there is no mirostat")] = None
    mirostat_eta: Annotated[Any, WithoutEffect("there is no mirostat")] = None
    typical_p: Annotated[Any, Refused("locally typical sampling", usual=(1, 1.0))] = None
    tfs_z: Annotated[Any, Refused("tail-free sampling", usual=(1, 1.0))] = None


class _GenerateFields(RequestFields):
    """Fields of both routes that generate; a request without `stream` is answered as a stream."""

    stream: bool | None = True
    options: OllamaOptions | None = None
    format: Any = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: _KeepAlive = None

    @field_validator("stream")
    @classmethod
    def _streams_unless_refused(cls, value: bool | None) -> bool:
        return value is not False

    def sampling(self) -> Json:
        """Return the options and the format as fields of completions."""
        options = self.options or OllamaOptions()
        fields = {name: getattr(options, name) for name in OllamaSampling.model_fields}
        fields |= {"repetition_penalty": options.repeat_penalty, "priority": self.priority}
        if options.num_predict is not None and options.num_predict > 0:
            fields["max_tokens"] = options.num_predict
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format not in (None, "", {}):
            fields["json_schema"] = self.format
        fields["cache_salt"] = self.cache_salt
        return {name: value for name, value in fields.items() if value is not None}

    def completion(self, messages: list[Json], **more: Any) -> Json:
        """Return the body of a chat completion."""
        fields = {"messages": messages, **more, **self.sampling()}
        if self.think is not None:
            fields["reasoning_effort" if isinstance(self.think, str) else "enable_thinking"] = self.think
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return {name: value for name, value in fields.items() if value is not None}


class OllamaFunction(StrictModel):
    name: str
    arguments: dict[str, Any] | None = None
    description: Annotated[Any, WithoutEffect("the tool has it")] = None
    index: Annotated[Any, WithoutEffect("calls are in the order of the list")] = None


class OllamaCall(StrictModel):
    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(StrictModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[OllamaCall], FAIL_FAST] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(_GenerateFields):
    """Body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], FAIL_FAST] | None = None
    tools: list[Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Return True for a request that only wants the model to be loaded."""
        return not self.messages

    def chat(self, recall: Recall) -> Json:
        """Return the chat completion that this comes down to.

        Args:
            recall: arguments of calls by `call_key`, as the model wrote them where that is known.
        """
        messages: list[Json] = []
        waiting: list[tuple[str, str]] = []  # calls without a result: id and name
        for message in self.messages or ():
            plain: Json = {"role": message.role, "content": _content(message.content or "", message.images)}
            if message.thinking:
                plain["reasoning_content"] = message.thinking
            if message.tool_calls:
                names = (f"call_{len(messages)}_{at}" for at in range(len(message.tool_calls)))
                calls = [_call(*each, recall) for each in zip(message.tool_calls, names, strict=True)]
                plain["tool_calls"] = calls
                waiting += [(call["id"], call["function"]["name"]) for call in calls]
            if message.role == "tool":
                wanted, of_name = message.tool_call_id, message.tool_name
                known = next(
                    (
                        one
                        for one in waiting
                        if one[0] == wanted or (not wanted and of_name in (None, one[1]))
                    ),
                    ("", ""),
                )
                waiting = [one for one in waiting if one is not known]
                plain["tool_call_id"] = wanted or known[0] or None
                plain["name"] = message.tool_name or known[1] or None
            messages.append({name: value for name, value in plain.items() if value is not None})
        return self.completion(messages, tools=self.tools or None)


class OllamaGenerateRequest(_GenerateFields):
    """Body of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: Annotated[Any, Refused("text insertion", usual=("",))] = None
    template: Annotated[Any, Refused("a template of the request's own", usual=("",))] = None
    context: Annotated[Any, Refused("a context of token ids (send the messages to /api/chat)")] = None

    @property
    def is_empty(self) -> bool:
        """Return True for a request that only wants the model to be loaded."""
        return not self.prompt and not self.images

    def chat(self, recall: Recall) -> Json:
        """Return the chat completion that this comes down to."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": _content(self.prompt or "", self.images)}
        return self.completion([*system, user])


class OllamaModelRequest(StrictModel):
    """Body of POST /api/show; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[Any, WithoutEffect("all that is known is told")] = None
    system: Annotated[Any, Refused("another system prompt", usual=("",))] = None
    template: Annotated[Any, Refused("another template", usual=("",))] = None
    options: Annotated[Any, Refused("other options")] = None


def _content(text: str, images: list[str] | None) -> str | list[Json]:
    if not images:
        return text
    shown = [{"type": "image", "data": image} for image in images]
    return [*([{"type": "text", "text": text}] if text else []), *shown]


def _call(call: OllamaCall, call_id: str, recall: Recall) -> Json:
    name, arguments = call.function.name, call.function.arguments or {}
    written = recall(call_key(name, arguments), arguments)
    text = written.text if isinstance(written, JsonText) else json.dumps(written, ensure_ascii=False)
    return {"id": call.id or call_id, "type": "function", "function": {"name": name, "arguments": text}}


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the key of a call's text in the memory of calls: clients send no ids back."""
    return f"ollama {name} " + json.dumps(arguments, sort_keys=True, ensure_ascii=False)
