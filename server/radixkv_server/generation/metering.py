# SPDX-License-Identifier: Apache-2.0
"""Meter: follows one request through the engine, for its usage, the metrics and the activity."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv_server.activity.activity import Activity, State
from radixkv_server.diagnostics.fingerprint import FingerprintStore
from radixkv_server.errors import to_api_error
from radixkv_server.generation.request import Asking
from radixkv_server.generation.usage import PromptProgress, SampleProgress, Usage
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.metrics.request_metrics import ServerMetrics, hit_class


class Meter:
    """Context manager that measures a request, from its outputs or from its deltas.

    Attributes:
        usage: tokens used so far.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        activity: Activity,
        fingerprints: FingerprintStore,
        record: RequestRecord,
        exchange: Asking,
    ) -> None:
        self._prompts = [
            PromptProgress(len(request.prompt), request.params.n) for request in exchange.requests
        ]
        hints = [facts.hint for facts in exchange.facts]
        self.usage = Usage(self._prompts, hints, exchange.written_ends)
        self._metrics = metrics
        self._record = record
        self._activity = activity
        self._fingerprints = fingerprints
        self._exchange = exchange

    def __enter__(self) -> Meter:
        self._seen = self._activity.begin(self._record, self._exchange, self._prompts)
        return self

    def take_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the whole outputs of all prompts."""
        now, tenant = time.monotonic(), self._record.tenant
        for index, (prompt, output) in enumerate(zip(self._prompts, outputs, strict=True)):
            prompt.take_output(output, now)
            self._admitted(index)
            for sample in prompt.samples.values():
                self._metrics.observe_sample(tenant, sample.finish_reason or "abort", sample.num_tokens)
            if prompt.first_token_at is not None:
                # When each token came is not known: they share the time between them.
                elapsed, later = now - prompt.first_token_at, prompt.samples[0].num_tokens - 1
                self._metrics.observe_tokens(tenant, _hit(prompt), elapsed, later)
        self._first_token_came()

    def take_delta(self, index: int, delta: OutputDelta) -> None:
        """Count a step's addition to a prompt's sample."""
        prompt, tenant, now = self._prompts[index], self._record.tenant, time.monotonic()
        is_first = all(prompt.first_token_at is None for prompt in self._prompts)
        since = prompt.take_delta(delta, now)
        if delta.prompt is not None:
            self._admitted(index)
        else:
            self._activity.changed(self._seen[index])
        if is_first:
            self._first_token_came()
        if since is not None:
            self._metrics.observe_tokens(tenant, _hit(prompt), since, len(delta.token_ids))
        if delta.finish_reason is not None:
            num_tokens = prompt.samples[delta.index].num_tokens
            self._metrics.observe_sample(tenant, delta.finish_reason, num_tokens)
        if delta.is_last:
            self._answered()

    def _admitted(self, index: int) -> None:
        """Count a prompt's match when the engine has admitted it."""
        exchange = self._exchange
        self._activity.admitted(
            self._seen[index], exchange.requests[index], exchange.facts[index], exchange.comparison
        )
        report = self._prompts[index].report
        if report is not None:
            self._metrics.observe_cache_report(self._record.tenant, report)
        self._keep_fingerprint(self._prompts[index])

    def _keep_fingerprint(self, prompt: PromptProgress) -> None:
        """Store the fingerprint, so that later requests can be compared with this one, however it ends."""
        fingerprint, outcome = self._exchange.fingerprint, prompt.outcome
        if fingerprint is None or outcome is None:
            return
        reusable, keep = prompt.num_tokens, self._exchange.requests[0].keep_tokens
        if keep is not None:
            reusable = min(reusable, max(keep, outcome.num_cached_tokens))
        if not outcome.num_cached_tokens + outcome.num_cache_write_tokens:
            reusable = 0  # nothing is cached
        fingerprint.reusable_tokens = reusable
        self._fingerprints.put(self._record.tenant, self._exchange.id, fingerprint)

    def _answered(self) -> None:
        """Count a complete answer, before its client has seen its end."""
        if self._exchange.fingerprint is not None:
            self._exchange.fingerprint.is_running = False

    def _first_token_came(self) -> None:
        """Count the time to the request's first token, if there is one."""
        came = [(prompt.first_token_at, _hit(prompt)) for prompt in self._prompts if prompt.first_token_at]
        if came:
            first_at, hit = min(came)
            self._metrics.observe_first_token(self._record.tenant, hit, first_at - self._record.started)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        has_left = isinstance(error, GeneratorExit | asyncio.CancelledError)
        has_begun = any(prompt.has_begun for prompt in self._prompts)
        # A request that the engine refused before any output is not counted.
        if has_begun:
            self._record.usage = self.usage
        if has_begun or has_left:
            self._count_ends()
        self._answered()
        state: State = "finished" if error is None else "aborted" if has_left else "failed"
        code = None if error is None or has_left else to_api_error(error).code
        for one in self._seen:
            self._activity.ended(one, state, code)

    def _count_ends(self) -> None:
        tenant = self._record.tenant
        for prompt, request in zip(self._prompts, self._exchange.requests, strict=True):
            if request.lora and prompt.outcome is not None:
                cached, generated = prompt.num_cached_tokens, prompt.num_generated_tokens
                self._metrics.observe_adapter(request.lora, prompt.num_tokens, cached, generated)
            for index in range(prompt.num_samples):
                sample = prompt.samples.setdefault(index, SampleProgress())
                if sample.finish_reason is None:
                    sample.finish_reason = "abort"
                    self._metrics.observe_sample(tenant, "abort", sample.num_tokens)
            self._metrics.observe_prompt(tenant, _hit(prompt), prompt.num_tokens, prompt.times)


def _hit(prompt: PromptProgress) -> str:
    return hit_class(prompt.num_cached_tokens, prompt.num_tokens)
