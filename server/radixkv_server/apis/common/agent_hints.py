# SPDX-License-Identifier: Apache-2.0
"""Other servers' words for our mechanisms: Dynamo's `nvext` and SGLang's sessions.

| their word                                                    | here                                    |
|---------------------------------------------------------------|-----------------------------------------|
| `nvext.agent_hints.priority`, `strict_priority`               | `priority`, with the other sign         |
| `nvext.agent_context.session_id`, `session_id`,               | the session: its requests come back     |
| `session_params.id`                                           | together; `POST /close_session` ends it |
| `nvext.agent_context.session_final`                           | `radixkv.session_done`                  |
| `nvext.cache_control`                                         | a pin of the prompt for that time       |
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from radixkv_server.http.body import StrictModel
from radixkv_server.http.fields import Refused, WithoutEffect
from radixkv_server.http.request_record import MAX_SESSION_ID

_TTL = re.compile(r"([1-9][0-9]{0,4})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
MAX_TTL_S = 86400
MAX_HINT = 2**15
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)]


class AgentHints(StrictModel):
    """Dynamo's hints of a request: a larger priority is more urgent, and the strict one decides first."""

    priority: Annotated[int, Field(ge=-MAX_HINT, lt=MAX_HINT)] | None = None
    strict_priority: Annotated[int, Field(ge=0, lt=MAX_HINT)] | None = None
    osl: Annotated[Any, WithoutEffect("no order depends on the length that an answer may have")] = None
    latency_sensitivity: Annotated[Any, WithoutEffect("say priority")] = None
    speculative_prefill: Annotated[Any, WithoutEffect("answers are cached as they are computed")] = None


class AgentContext(StrictModel):
    """Dynamo's identity of a session."""

    session_id: SessionId | None = None
    parent_session_id: Annotated[Any, WithoutEffect("a child finds its parent's prompt by its tokens")] = None
    session_final: bool | None = None


class NvextCacheControl(StrictModel):
    """Dynamo's time for which a prompt is kept.

    Args:
        ttl: as `300s`, `5m` or `1h`, at most 24 hours.
    """

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str = "5m"

    @field_validator("ttl")
    @classmethod
    def _time(cls, value: str) -> str:
        if not 0 < _seconds(value) <= MAX_TTL_S:
            raise ValueError("it must be a number of seconds, minutes or hours, as 5m; at most 24h.")
        return value


class Nvext(StrictModel):
    """Dynamo's extensions, as far as they name what this server has."""

    agent_hints: AgentHints | None = None
    agent_context: AgentContext | None = None
    cache_control: NvextCacheControl | None = None
    annotations: Annotated[Any, WithoutEffect("usage and headers tell it")] = None
    extra_fields: Annotated[Any, WithoutEffect("usage and headers tell it")] = None

    @property
    def priority(self) -> int | None:
        """The priority in the engine's direction; None: none is given."""
        hints = self.agent_hints
        if hints is None or (hints.priority is None and hints.strict_priority is None):
            return None
        return -((hints.strict_priority or 0) * 2 * MAX_HINT + (hints.priority or 0))

    @property
    def pin_s(self) -> float | None:
        """Seconds for which the prompt is to be pinned; None: it is not."""
        return None if self.cache_control is None else float(_seconds(self.cache_control.ttl))


class SessionParams(StrictModel):
    """SGLang's session of a request. A prompt is whole here, and not the end of an earlier one's."""

    id: SessionId | None = None
    rid: Annotated[Any, Refused("continuing an earlier request's prompt (send the whole prompt)")] = None
    offset: Annotated[Any, Refused("cutting an earlier request's prompt (send the whole prompt)")] = None
    replace: Annotated[Any, Refused("replacing an earlier request's prompt (send the whole prompt)")] = None
    drop_previous_output: Annotated[Any, Refused("dropping an earlier output (send the whole prompt)")] = None


def _seconds(ttl: str) -> int:
    found = _TTL.fullmatch(ttl)
    return int(found[1]) * _SECONDS[found[2]] if found else 0
