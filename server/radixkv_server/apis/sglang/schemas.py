# SPDX-License-Identifier: Apache-2.0
"""Bodies of SGLang's routes of sessions."""

from __future__ import annotations

from typing import Annotated, Any

from radixkv_server.apis.common.agent_hints import SessionId
from radixkv_server.http.body import StrictModel
from radixkv_server.http.fields import WithoutEffect

_Unneeded = Annotated[Any, WithoutEffect("a session holds no memory of its own")]


class OpenSessionBody(StrictModel):
    """Body of POST /open_session."""

    session_id: SessionId | None = None
    capacity_of_str_len: _Unneeded = None
    streaming: _Unneeded = None
    timeout: _Unneeded = None


class CloseSessionBody(StrictModel):
    """Body of POST /close_session."""

    session_id: SessionId
