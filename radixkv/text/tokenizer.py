# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: encoding, chat templates, and decoding one token at a time.

`Tokenizer` wraps a Hugging Face fast tokenizer. Two things go beyond it:

- **Control tokens can't be injected.** Text that merely spells a control token (`<|im_end|>` in a user's
  message) is encoded as the characters it is made of; only the chat template writes control tokens. The
  message's text is rendered with its control-token spellings broken by a secret mark, the template's own
  spellings are then wrapped in another, and a copy of the tokenizer that knows only the wrapped ones encodes
  the whole in one pass, so that normalisation and pre-tokenisation are as always. Text without such spellings
  takes the ordinary path and gives the ids that `apply_chat_template` gives.
- **Streaming never emits half a character** and its pieces concatenate to the result of `decode` for all ids,
  at constant cost per token (see `IncrementalDecoder`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from radixkv.errors import ConfigError, InvalidRequestError, ModelLoadError
from radixkv.text.control_tokens import ControlTokens
from radixkv.text.incremental_decoding import (
    DecoderChain,
    IncrementalDecoder,
    byte_level_bytes,
    is_byte_token,
)
from radixkv.text.json_text import JsonText, render_json_texts
from radixkv.text.segments import Encode, KnownSegments, SegmentEncoder, decode_ids, encode_ids

#: Deepest nesting of a message's or tool's JSON.
_MAX_DEPTH = 100
#: Fields of a message whose value a template compares rather than prints.
_STRUCTURAL_FIELDS = frozenset({"role", "type"})
#: Arguments of the rendering itself, which a caller's template arguments must not set.
_RESERVED_ARGUMENTS = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors", "padding"),
        *("truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"),
        *("sanitize_control_tokens", "raise_exception", "strftime_now"),
    }
)


_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOLD_OPTIONS = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"),
    *("padding_side", "truncation_side"),
)


class Tokenizer:
    """A fast tokenizer with its chat template. Methods may be called from several threads.

    Args:
        hf_tokenizer: a transformers tokenizer backed by the `tokenizers` library.
        chat_template: Jinja text that replaces the tokenizer's own template; None: its own.
        eos_token_ids: ids that end an output besides the tokenizer's own end token.

    Attributes:
        vocab_size: ids that the tokenizer knows, added tokens included. A model's logits may be wider.
        eos_token_ids: ids that end an output.

    Raises:
        ModelLoadError: the tokenizer has no fast implementation.
    """

    def __init__(
        self, hf_tokenizer: Any, *, chat_template: str | None = None, eos_token_ids: Iterable[int] = ()
    ) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError(
                f"The tokenizer {type(hf_tokenizer).__name__} has no fast implementation, and radixkv needs "
                "a tokenizer.json. Where transformers can convert it, load it with AutoTokenizer and save it "
                "again with save_pretrained, then serve that folder."
            )
        self._hf = hf_tokenizer
        self._backend = backend
        # A tokenizer.json may carry truncation or padding from its training; serving wants neither.
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        own_eos = [] if hf_tokenizer.eos_token_id is None else [int(hf_tokenizer.eos_token_id)]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_token_ids, *own_eos]))
        self._chat_template = chat_template
        self._lists_in_template: dict[str, bool] = {}

        added = backend.get_added_tokens_decoder()
        framing = {*self.eos_token_ids, hf_tokenizer.bos_token_id, hf_tokenizer.pad_token_id}
        self._special_ids = {i: token.content for i, token in added.items() if token.special}
        self._controls = ControlTokens(
            backend, {i: token.content for i, token in added.items() if token.special or i in framing}
        )
        self._segments = KnownSegments()
        self._added_ids = frozenset(added)
        self._decoders = DecoderChain(backend)
        # What asks for thousands of tokens' bytes has no time for a call of Python each.
        self.token_bytes = functools.cache(self._compute_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the constructor's arguments."""
        make = functools.partial(
            Tokenizer, chat_template=self._chat_template, eos_token_ids=self.eos_token_ids
        )
        return make, (self._hf,)

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} ids, decoder {'+'.join(self._decoders.types) or 'none'})"

    @property
    def has_chat_template(self) -> bool:
        """True if `apply_chat_template` works without a template."""
        return self._chat_template is not None or bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The template that `apply_chat_template` uses when it is given tools; None: there is none."""
        return self._template(None, [{}]) if self.has_chat_template else None

    @functools.cached_property
    def facts(self) -> Mapping[str, Any]:
        """See `TextTokenizer`. No paths are among them."""
        hf = self._hf
        tokens = {
            name: None if (token := getattr(hf, name, None)) is None else str(token) for name in _NAMED_TOKENS
        }
        fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        added = {
            str(i): {field: getattr(token, field) for field in fields}
            for i, token in sorted(self._backend.get_added_tokens_decoder().items())
        }
        options = {name: getattr(hf, name) for name in _TOLD_OPTIONS if hasattr(hf, name)}
        response = getattr(hf, "response_template", None)
        return {
            "tokenizer_class": type(hf).__name__,
            **tokens,
            "added_tokens_decoder": added,
            **{name: value for name, value in options.items() if isinstance(value, bool | str)},
            "chat_template": self.chat_template,
            **({} if response is None else {"response_template": response}),
        }

    # -- text to ids ------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, *, allow_special: bool = True) -> list[int]:
        """Return token ids of a text. O(len(text)).

        Args:
            add_special_tokens: let the tokenizer add its tokens around a text (such as a begin token).
            allow_special: spellings of control tokens in the text mean these tokens; False: they are text.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which no encoding can represent.
        """
        _encodable(text, "prompt")
        if allow_special:
            return encode_ids(self._backend, text, add_special_tokens=add_special_tokens)
        return self._controls.encode_plain(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Return token ids of a conversation; see `prepare_chat`."""
        _, encode = self.prepare_chat(messages, tools, add_generation_prompt, **options)
        return encode().tolist()

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> tuple[int, Encode]:
        """Render a conversation and look up its segments; control tokens come from the template alone.

        Returns:
            The number of unknown characters, and a function that encodes them and returns all ids, int32 [n].

        Args:
            messages: `{"role": ..., "content": ...}` and what else the template knows. Content given as text
                parts is joined by line breaks where the template expects a string. A `JsonText` is printed
                as its text.
            tools: JSON schemas of functions, for templates that show them to the model.
            add_generation_prompt: end with the beginning of an assistant's message.
            continue_final_message: leave the last message open, for the model to go on with it.
            chat_template: Jinja text used instead of the model's.
            template_kwargs: further variables for the template, e.g. `enable_thinking=False`.

        Raises:
            InvalidRequestError: no template, or messages that it refuses; says what to do.
        """
        template = self._template(chat_template, tools)
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        reserved = sorted(_RESERVED_ARGUMENTS & set(template_kwargs))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {', '.join(reserved)}", param="chat_template_kwargs"
            )
        data = {"messages": list(messages), "tools": tools, "kwargs": template_kwargs}
        data = _map_strings(data, _encodable)
        if not self._template_takes_lists(template):
            data["messages"] = [_with_joined_parts(message) for message in data["messages"]]

        def render(values: dict[str, Any]) -> str:
            return render_json_texts(
                values,
                lambda plain: self._render(plain, template, add_generation_prompt, continue_final_message),
            )

        rendered = render(data)
        _encodable(rendered)
        if not _any_string(data, self._controls.needs_mark):
            return self._encoder.begin(rendered)
        marked = render(_map_strings(data, self._controls.mark))
        if self._controls.unmark(marked) == rendered:
            return self._controls.begin_marked(marked, self._segments)
        if _any_string(data, self._controls.spelled_in):
            raise InvalidRequestError(
                "a message spells one of the model's control tokens in a place where its chat template acts "
                "on it; leave that text out",
                param="messages",
            )
        return self._encoder.begin(rendered)

    @functools.cached_property
    def _encoder(self) -> SegmentEncoder:
        return SegmentEncoder(self._backend, self._segments)

    def _template(self, chat_template: str | None, tools: object) -> str:
        if chat_template is not None:
            return chat_template
        if self._chat_template is not None:
            return self._chat_template
        try:
            return str(self._hf.get_chat_template(None, tools))
        except ValueError:
            raise InvalidRequestError(
                "this model has no chat template, so it can't take messages: use plain completions, serve an "
                "instruction-tuned model, or give a template with --chat-template",
                param="messages",
                code="missing_chat_template",
            ) from None

    def _render(
        self, data: dict[str, Any], template: str, add_generation_prompt: bool, continue_final_message: bool
    ) -> str:
        try:
            rendered = self._hf.apply_chat_template(
                data["messages"],
                tools=data["tools"],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **data["kwargs"],
            )
        except Exception as error:  # a template is a program: it may raise anything
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InvalidRequestError(
                f"the model's chat template can't render these messages: {self._controls.unmark(reason)}",
                param="messages",
                code="chat_template_error",
            ) from error
        return str(rendered)

    def _template_takes_lists(self, template: str) -> bool:
        """Return whether the template prints a list of content parts as their texts; tried once each."""
        known = self._lists_in_template.get(template)
        if known is None:
            parts = [{"type": "text", "text": "part-one"}, {"type": "text", "text": "part-two"}]
            probe: dict[str, Any] = {
                "messages": [{"role": "user", "content": parts}],
                "tools": None,
                "kwargs": {},
            }
            try:
                shown = self._render(probe, template, False, False)
            except InvalidRequestError:
                shown = ""
            known = (
                "part-one" in shown
                and "part-two" in shown
                and "'text'" not in shown
                and '"text"' not in shown
            )
            if len(self._lists_in_template) >= 64:  # templates may come with requests
                self._lists_in_template.clear()
            self._lists_in_template[template] = known
        return known

    def grammar_source(self) -> str:
        """Return the tokenizer as JSON text, added tokens included, for compiling grammars. O(vocab)."""
        return str(self._backend.to_str())

    # -- ids to text ------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; unknown ids add nothing, bytes that are no UTF-8 become U+FFFD. O(n)."""
        ids = [int(token) for token in token_ids]
        return decode_ids(self._backend, ids, skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, *, kept: Collection[str] = ()) -> IncrementalDecoder:
        """Return a decoder for one growing output; its pieces concatenate to the result of `decode`.

        Args:
            kept: spellings of special tokens that are not skipped.
        """
        skipped = self._special_ids if skip_special_tokens else {}
        if kept:
            skipped = {token: text for token, text in skipped.items() if text not in kept}
        return self._decoders.decoder(self.token_bytes, skipped.__contains__)

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for incomplete characters; special tokens included."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_added_token(self, token_id: int) -> bool:
        """See `TextTokenizer`."""
        return token_id in self._added_ids

    def _compute_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text; part of a character, or none for unknown ids."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._decoders.byte_level:
            return byte_level_bytes(token)
        if token_id in self._added_ids:
            return str(token).encode("utf-8")
        if is_byte_token(token) and "ByteFallback" in self._decoders.types:
            return bytes([int(token[3:5], 16)])
        if "WordPiece" in self._decoders.types:
            return (token[2:] if token.startswith("##") else " " + token).encode("utf-8")
        return token.replace("\u2581", " ").encode("utf-8")


def check_chat_template(hf_tokenizer: Any, template: str) -> None:
    """Refuse Jinja text that can't be parsed; its effect on messages is only seen with messages.

    Args:
        hf_tokenizer: a transformers tokenizer; its own way of reading templates is what counts.

    Raises:
        ConfigError: names the line and the mistake there.
    """
    from jinja2 import TemplateSyntaxError  # optional: transformers brings it, where templates are used

    try:
        hf_tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], chat_template=template, tokenize=False
        )
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message} "
            "(flag --chat-template)"
        ) from None
    except Exception:  # a program may refuse this conversation, and take another
        return


def _encodable(text: str, param: str = "messages") -> str:
    """Return the text, if an encoding can represent it.

    Raises:
        InvalidRequestError: it holds half of a surrogate pair.
    """
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds a lone surrogate (U+{ord(text[error.start]):04X}), which is not a character",
            param=param,
        ) from None
    return text


def _map_strings(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Copy JSON-like data with every string changed, keys included, structural fields left alone.

    Raises:
        InvalidRequestError: it is nested too deep, or is no JSON data.
    """
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"messages are nested deeper than {_MAX_DEPTH} levels", param="messages")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (dict, Mapping)):  # the first is the usual one, and quicker to see
        members = {
            change(key) if isinstance(key, str) else key: (
                item if _is_structural(key, item) else _map_strings(item, change, depth + 1)
            )
            for key, item in value.items()
        }
        return JsonText(members, change(value.text)) if isinstance(value, JsonText) else members
    if isinstance(value, list | tuple):
        return [_map_strings(item, change, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    # Other objects could carry text past the change.
    raise InvalidRequestError(
        f"messages, tools and template arguments must be JSON data, not {type(value).__name__}",
        param="messages",
    )


def _is_structural(key: object, value: object) -> bool:
    # Only plain words: arguments of a tool may have a key of that name, with anything after it.
    return key in _STRUCTURAL_FIELDS and isinstance(value, str) and value.isidentifier()


def _any_string(value: Any, test: Callable[[str], bool]) -> bool:
    """Return whether any string that `_map_strings` would change passes a test."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, (dict, Mapping)):
        if isinstance(value, JsonText) and test(value.text):
            return True
        for key, item in value.items():
            if isinstance(key, str) and test(key):
                return True
            if not _is_structural(key, item) and _any_string(item, test):
                return True
        return False
    if isinstance(value, list):
        return any(_any_string(item, test) for item in value)
    return False


def _with_joined_parts(message: Any) -> Any:
    """Join content given as text parts into one string.

    Raises:
        InvalidRequestError: a part is no text.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"this model takes text only, and no part of the type {str(kind)[:40]!r}: each part of a "
                'message\'s content must be {"type": "text", "text": "..."}',
                param="messages",
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
