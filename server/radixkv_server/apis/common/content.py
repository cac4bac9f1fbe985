# SPDX-License-Identifier: Apache-2.0
"""Content as OpenAI's APIs have it: a text, or a list of parts of which each is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import Refused, WithoutEffect

Media = Annotated[Any, Refused("all but text")]
_OfAnswer = Annotated[Any, WithoutEffect("it is of an answer's text, which is there")]


class PromptCacheBreakpoint(StrictModel):
    """The prompt up to the end of this part is to stay cached; `ttl`: else the request's."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(StrictModel):
    """One part; the field of its text is `refusal` in those of that type, and `text` in all others."""

    KINDS: ClassVar[Sequence[str]]

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: _OfAnswer = None
    logprobs: _OfAnswer = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None
    image_url: Media = None
    input_audio: Media = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str):
            if kind not in cls.KINDS:
                raise ParamError(
                    f"content of type {kind[:40]!r} is not supported: this server takes text, and fetches "
                    "nothing.",
                    code="unsupported_content",
                )
            if not isinstance(value.get("refusal" if kind == "refusal" else "text"), str):
                raise ParamError(f"content of type {kind!r} needs its text.")
        return value

    @property
    def words(self) -> str:
        """What it says."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


def joined(content: str | Sequence[TextPart]) -> str:
    """A text, or parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(part.words for part in content)
