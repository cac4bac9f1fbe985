# SPDX-License-Identifier: Apache-2.0
"""GuidedEngine: the engine that users have, whose model is made to say what its prompt tells it to.

A grammar with one text guides it, so that every token is sampled, computed and cached as usual. It is for
agents, whose model must call their tools over several turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from dataclasses import replace

from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.request import Request

#: The last thing in a prompt that is to be said.
_TOLD = re.compile(r"say\{\{(.*?)\}\}say", re.DOTALL)
_MARKS = re.compile(r"(</?tool_call>)")
#: At the end of a prompt, in which it is looked for.
_TAIL_TOKENS = 4000


class GuidedEngine(AsyncEngine):
    """As its base; what no prompt tells is noise."""

    def _guided(self, request: Request) -> Request:
        prompt = request.prompt
        ids = prompt.token_ids.tolist() if hasattr(prompt, "token_ids") else list(prompt)
        told = _TOLD.findall(self.tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False))
        if not told:
            return request
        parts = [self._part(part) for part in _MARKS.split(told[-1]) if part]
        grammar = StructuredOutputs(grammar=f"start: {' '.join(parts)}")
        return replace(request, params=replace(request.params, structured=grammar, max_tokens=1000))

    def _part(self, text: str) -> str:
        if _MARKS.fullmatch(text):
            return f"<[{self.tokenizer.encode(text, add_special_tokens=False)[0]}]>"
        return json.dumps(text)

    async def stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        async for delta in super().stream(self._guided(request)):
            yield delta

    async def generate(self, request: Request) -> RequestOutput:
        return await super().generate(self._guided(request))
