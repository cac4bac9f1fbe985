# SPDX-License-Identifier: Apache-2.0
"""WritingEngine: an engine for server tests whose model writes given texts with a real tokenizer.

A prompt that holds `write:NAME:` is answered with the text of that name. Tokens become text as in the engine
that users have: special tokens are skipped or kept, stop strings cut, and an answer ends at its most tokens.
"""

from __future__ import annotations

import asyncio
import re
from collections import abc
from collections.abc import AsyncIterator, Mapping
from typing import Any

from scripted_engine import Asked, ScriptedEngine
from tiny_models import byte_level_tokenizer
from tokenizers import AddedToken

from radixkv.engine.outputs import OutputDelta
from radixkv.scheduling.request import Request, RequestTimes
from radixkv.scheduling.sequence import Sequence
from radixkv.text.tokenizer import Tokenizer

_WANTED = re.compile(r"write:(\w+):")


def tokenizer_with(
    special: abc.Sequence[str] = (), chat_template: str | None = None, **facts: Any
) -> Tokenizer:
    """Return a byte-level tokenizer with further special tokens.

    Args:
        facts: attributes of the tokenizer of transformers.
    """
    hf = byte_level_tokenizer()
    hf.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    for name, value in facts.items():
        setattr(hf, name, value)
    return Tokenizer(hf, chat_template=chat_template)


class WritingEngine(ScriptedEngine):
    """See the module's text.

    Args:
        texts: name -> what the model writes.
        step: tokens in each delta of a stream.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Mapping[str, str], *, step: int = 1) -> None:
        super().__init__(tokenizer=tokenizer, num_blocks=2048, max_model_len=16384)
        self.texts = texts
        self.step = step

    async def _deltas(self, asked: Asked) -> AsyncIterator[OutputDelta]:
        prompt = self.tokenizer.decode(asked.prompt, skip_special_tokens=False)
        text = self.texts[_WANTED.findall(prompt)[-1]]
        end = self.tokenizer.eos_token_ids[0]
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), end]
        params, most = asked.params, asked.params.max_tokens or len(tokens)
        times = RequestTimes(first_scheduled=0.0, first_token=0.0)
        request = Request(asked.prompt, params)
        samples = [Sequence(request) for _ in range(params.num_samples)]
        for sample in samples:
            sample.begin_output(self.tokenizer, frozenset({end}), most)
        for at in range(0, len(tokens), self.step):
            given = tokens[at : at + self.step]
            for index, sample in enumerate(samples):
                used = []
                for token in given:
                    if sample.finish_reason is None:
                        sample.push(token)
                        used.append(token)
                if not used:
                    continue
                shown, _ = sample.take()
                is_last = sample.finish_reason is not None and index == len(samples) - 1
                yield OutputDelta(
                    asked.request_id,
                    index,
                    shown,
                    used,
                    finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason,
                    prompt=asked.outcome if (index, at) == (0, 0) else None,
                    times=times,
                    is_last=is_last,
                )
            if samples[-1].finish_reason is not None:
                return
            await asyncio.sleep(0)
