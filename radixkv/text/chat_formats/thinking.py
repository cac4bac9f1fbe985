# SPDX-License-Identifier: Apache-2.0
"""Thinking: the wishes of a request about it, and the variables by which a chat template is told.

Requests turn thinking on or off, name an effort, or give a budget of tokens. Templates know some of these,
under names and values of their own: `enable_thinking`, `thinking_mode="disabled"`,
`reasoning_effort="no_think"`, ... Rendering probes once finds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.errors import InvalidRequestError

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: Variables that turn thinking off and on, with their values for it.
_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "thinking_option": ("off", "on"),
}
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_BUDGET = "thinking_budget"
#: Values that mean `none`, the most usual first.
_NO_EFFORTS = ("none", "no_think", "minimal", "low")
#: Levels of templates that print any value.
_USUAL = ("low", "medium", "high")
_PROBE = "probe_level"


@dataclass(frozen=True, slots=True)
class Thinking:
    """A request's wishes about thinking.

    Args:
        enabled: turn it on or off; None: as the effort says, or as the template has it.
        effort: one of `LEVELS`, or a level of the template's own.
        budget: most tokens of thought.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """The variables by which a template is told how to think.

    Attributes:
        switch: a variable with its values for off and on; None: the template has none.
        is_off: the template does not think unless it is told to.
        effort: a variable for the effort; None: the template knows no levels.
        levels: level -> the template's value for it; levels that it does not know have the nearest one.
        has_budget: it reads `thinking_budget`.
    """

    switch: tuple[str, Any, Any] | None = None
    is_off: bool = False
    effort: str | None = None
    levels: Mapping[str, str] = field(default_factory=dict)
    has_budget: bool = False

    @property
    def can_think(self) -> bool:
        """Return True if a request can change how the model thinks."""
        return self.switch is not None or self.effort is not None or self.has_budget

    def variables(self, wanted: Thinking) -> dict[str, Any]:
        """Return the variables that tell the template these wishes."""
        told: dict[str, Any] = {}
        enabled, level = wanted.enabled, wanted.effort
        if enabled is None and level is not None:
            # A template that thinks by itself need not be told to.
            enabled = False if level == "none" else self.is_off or None
        if self.switch is not None and enabled is not None:
            name, off, on = self.switch
            told[name] = on if enabled else off
        if enabled is False:
            level = "none" if self.switch is None else None
        elif enabled and level is None and self.is_off and self.switch is None:
            level = "medium"
        if self.effort is not None and level is not None and (value := self.levels.get(level, level)):
            told[self.effort] = value
        if self.has_budget and (enabled is False or wanted.budget is not None):
            told[_BUDGET] = 0 if enabled is False else wanted.budget
        return told

    def unheeded(self, wanted: Thinking) -> list[str]:
        """Return the wishes that change nothing with this template, in words."""
        told = self.variables(wanted)
        lost = []
        if wanted.enabled is not None and not told and not (wanted.enabled and self.can_think):
            lost.append("thinking (the chat template can't switch it)")
        if wanted.effort is not None and self.effort is None and not (wanted.effort == "none" and told):
            lost.append("effort of thinking (the chat template knows no levels)")
        if wanted.budget is not None and _BUDGET not in told:
            lost.append("budget of thinking (the chat template reads none)")
        return lost


def find_switch(render: Callable[[Mapping[str, Any]], str], source: str | None) -> ThinkingSwitch:
    """Return the variables that a template reads, by small renderings.

    Args:
        render: a short chat with these variables, as text; raises InvalidRequestError.
        source: the template, whose words say which variables need no probe; None: all are tried.
    """

    def shown(**variables: Any) -> str | None:
        try:
            return render(variables)
        except InvalidRequestError:
            return None

    def is_named(name: str) -> bool:
        return source is None or re.search(rf"\b{name}\b", source) is not None

    default = shown()
    if default is None:
        return ThinkingSwitch()
    switch, off_text = None, None
    for name, (off, on) in _SWITCHES.items():
        texts = [shown(**{name: off}), shown(**{name: on})] if is_named(name) else [None, None]
        if None not in texts and texts[0] != texts[1]:
            switch, off_text = (name, off, on), texts[0]
            break
    on = {} if switch is None else {switch[0]: switch[2]}
    effort, levels = None, {}
    for name in filter(is_named, _EFFORTS):
        found = {level: shown(**on, **{name: level}) for level in (*LEVELS, *_NO_EFFORTS, _PROBE)}
        if len({text for text in found.values() if text is not None}) > 1:
            effort, levels = name, _levels(found)
            break
    if switch is None and effort is not None and (lowest := levels.get("none")):
        off_text = shown(**{effort: lowest})
    budget_texts = [shown(**{_BUDGET: budget}) for budget in (0, 1024)] if is_named(_BUDGET) else []
    return ThinkingSwitch(switch, default == off_text, effort, levels, len(set(budget_texts)) > 1)


def _levels(found: Mapping[str, str | None]) -> dict[str, str]:
    """Return the value that a template takes for each level.

    Args:
        found: value -> the template's rendering; None: it refuses the value.
    """
    printed = found[_PROBE]
    prints_any = printed is not None and _PROBE in printed
    known: Sequence[str] = (
        _USUAL if prints_any else [level for level in LEVELS[1:] if found[level] is not None]
    )
    if not known:
        return {}
    highest = found[max(known, key=LEVELS.index)]
    lowest = [level for level in _NO_EFFORTS if found[level] is not None and found[level] != highest]
    none = "low" if prints_any else next(iter(lowest), "")

    def nearest(level: str) -> str:
        rank = LEVELS.index(level)
        return min(known, key=lambda other: (abs(LEVELS.index(other) - rank), -LEVELS.index(other)))

    return {"none": none, **{level: nearest(level) for level in LEVELS[1:]}}
