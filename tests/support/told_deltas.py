# SPDX-License-Identifier: Apache-2.0
"""Whole outputs out of deltas, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.engine.outputs import CompletionOutput, OutputDelta, RequestOutput


def collect_outputs(deltas: Iterable[OutputDelta]) -> dict[str, RequestOutput]:
    """By request, what its deltas add up to; without its prompt, which no delta tells."""
    outputs: dict[str, RequestOutput] = {}
    for delta in deltas:
        output = outputs.setdefault(delta.request_id, RequestOutput(delta.request_id, None, [], []))
        while len(output.outputs) <= delta.index:
            output.outputs.append(CompletionOutput(len(output.outputs)))
        _add(output.outputs[delta.index], delta)
        prompt = delta.prompt
        if prompt is not None:
            output.num_cached_tokens = prompt.num_cached_tokens
            output.num_cache_write_tokens = prompt.num_cache_write_tokens
            output.num_pinned_tokens = prompt.num_pinned_tokens
            output.cache_report = prompt.cache_report
            output.prompt_logprobs = prompt.logprobs
        output.times = delta.times or output.times
        output.num_generated_tokens += len(delta.token_ids)
        output.accepted_draft_tokens += delta.accepted_draft_tokens
        output.rejected_draft_tokens += delta.rejected_draft_tokens
        output.error, output.error_code = delta.error or output.error, delta.error_code or output.error_code
    return outputs


def _add(sample: CompletionOutput, delta: OutputDelta) -> None:
    assert sample.finish_reason is None, "a sample that has ended gets nothing more"
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    if delta.logprobs is not None:
        sample.logprobs = [*(sample.logprobs or []), *delta.logprobs]
        sample.cumulative_logprob = sum(entry.chosen.logprob for entry in sample.logprobs)
    sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
