# SPDX-License-Identifier: Apache-2.0
"""Fields of chat completions about reasoning: its settings, and its place in the answer.

`reasoning_effort` is OpenAI's, `reasoning` and `include_reasoning` OpenRouter's (vLLM takes these, too),
`thinking` Anthropic's, DeepSeek's and LiteLLM's, `enable_thinking` and `thinking_budget` Qwen's,
`separate_reasoning` SGLang's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from radixkv.text.chat_formats.thinking import Thinking
from radixkv_server.chats.chat import ReasoningPlace
from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import EmptyCounts, WithoutEffect

Budget = Annotated[int, Field(ge=0)]


class ThinkingSetting(StrictModel):
    """Anthropic's form: on, off, or the template's default."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


class ReasoningSetting(StrictModel):
    """OpenRouter's form."""

    effort: str | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None
    enabled: bool | None = None
    summary: Annotated[Any, WithoutEffect("reasoning is given in full", usual=("auto",))] = None


class ReasoningFields(StrictModel):
    """Fields of reasoning: effort, budget, and the place of its text."""

    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: (
        Annotated[
            Annotated[bool, Tag("[switch]")] | Annotated[ThinkingSetting, Tag("[setting]")],
            Discriminator(lambda value: "[switch]" if isinstance(value, bool) else "[setting]"),
        ]
        | None
    ) = None
    thinking_budget: Budget | None = None
    reasoning: Annotated[ReasoningSetting, EmptyCounts] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @model_validator(mode="after")
    def _one_wish(self) -> ReasoningFields:
        effort = self._effort
        effort_of_reasoning = None if self.reasoning is None else self.reasoning.effort
        for name, values in (
            ("enable_thinking", {value for _, value in self._switches}),
            ("reasoning_effort", {self.reasoning_effort, effort_of_reasoning} - {None}),
        ):
            if len(values) > 1:
                raise ParamError(f"{name}: the fields about thinking contradict each other.", name)
        if effort is not None and any(value is (effort == "none") for _, value in self._switches):
            raise ParamError(
                f"reasoning_effort {effort[:40]!r} and {self._switches[0][0]} contradict each other.",
                "reasoning_effort",
            )
        if self.separate_reasoning is False and self.reasoning_place == "hidden":
            raise ParamError(
                "separate_reasoning false keeps the reasoning in the content, and include_reasoning false "
                "leaves it out: give one of them.",
                "separate_reasoning",
            )
        return self

    @property
    def _effort(self) -> str | None:
        return self.reasoning_effort or (None if self.reasoning is None else self.reasoning.effort)

    @property
    def _switches(self) -> list[tuple[str, bool]]:
        """Fields that turn thinking on or off, and their values."""
        setting = self.thinking
        if isinstance(setting, ThinkingSetting):
            setting = {"enabled": True, "disabled": False}.get(setting.type)
        given = {
            "enable_thinking": self.enable_thinking,
            "thinking": setting,
            "reasoning": None if self.reasoning is None else self.reasoning.enabled,
        }
        return [(name, value) for name, value in given.items() if value is not None]

    @property
    def wanted_thinking(self) -> Thinking:
        """Settings of thinking, independent of APIs."""
        setting, budget = self.thinking, self.thinking_budget
        if budget is None and isinstance(setting, ThinkingSetting):
            budget = setting.budget_tokens
        if budget is None and self.reasoning is not None:
            budget = self.reasoning.max_tokens
        enabled = self._switches[0][1] if self._switches else None
        return Thinking(enabled, self._effort, budget)

    @property
    def reasoning_place(self) -> ReasoningPlace:
        """Place of the reasoning in the answer."""
        if self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude):
            return "hidden"
        return "in_content" if self.separate_reasoning is False else "apart"
