# SPDX-License-Identifier: Apache-2.0
"""Process that tries grammars out: `python -m radixkv.grammar.trial_server`.

It receives a vocabulary from its standard input, then jobs; each job is done by a fork of its own, which has
the vocabulary already, is limited in CPU time and memory by the system, and whose end gives everything back.
A fork that outlives its time is killed. Verdicts go to the standard output as JSON (no fork is trusted with a
pickle), each in one write, so that forks do not mix their verdicts. The end of the standard input is the end
of all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from radixkv.channel import Channel, ChannelEnded
from radixkv.grammar.trial import MAX_TRIAL_BYTES, MAX_TRIAL_S, Verdict, try_out
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.thread_priority import yield_to_steps

#: Compilers follow references by recursion.
STACK_BYTES = 256 * 2**20
#: Limit of a trial that finds no free core.
MAX_WALL_S = 60.0
#: Most bytes of a verdict: with its frame, the bytes that a pipe takes at once (POSIX says 512, Linux 4,096).
MAX_VERDICT_BYTES = (512 if sys.platform != "linux" else 4096) - 4
NICENESS = 10
_PR_SET_PDEATHSIG = 1


def _send(verdicts: Channel, job: int | None, verdict: Verdict) -> None:
    fields = dataclasses.asdict(verdict)
    while len(data := json.dumps({"job": job, **fields}).encode()) > MAX_VERDICT_BYTES:
        fields["refused"] = fields["refused"][: len(fields["refused"]) // 2]
    verdicts.send(data)


class _Forks:
    """Trials under way, each in a fork."""

    def __init__(self, vocabulary: Vocabulary, verdicts: Channel) -> None:
        self._vocabulary, self._verdicts = vocabulary, verdicts
        self._jobs: dict[int, tuple[int, float]] = {}  # process -> job, when it is given up

    def start(self, job: int, spec: StructuredOutputs) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                _be_limited()
                thread = threading.Thread(target=self._try_out, args=(job, spec))
                threading.stack_size(STACK_BYTES)
                thread.start()
                thread.join()
            finally:
                os._exit(0)
        self._jobs[pid] = (job, time.monotonic() + MAX_WALL_S)

    def _try_out(self, job: int, spec: StructuredOutputs) -> None:
        _send(self._verdicts, job, try_out(spec, self._vocabulary))

    def tend(self) -> None:
        """Report forks that ended without a verdict, and end forks whose time is over."""
        for pid, (_, ends) in self._jobs.items():
            if time.monotonic() > ends:
                os.kill(pid, signal.SIGKILL)
        while self._jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            job, _ = self._jobs.pop(pid)
            if status:
                # One that was killed after it had answered has two verdicts: the second is ignored.
                _send(self._verdicts, job, Verdict(_why(status), is_too_complex=True, cpu_s=MAX_TRIAL_S))

    def wait_s(self) -> float | None:
        """Seconds until a fork's time is over."""
        ends = [ends for _, ends in self._jobs.values()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def end(self) -> None:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)
        for pid in self._jobs:
            os.waitpid(pid, 0)


def _why(status: int) -> str:
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended == signal.SIGPROF:
        return f"it takes longer than {MAX_TRIAL_S:g} s to compile; simplify it"
    if ended == signal.SIGABRT:
        return f"it takes more than {MAX_TRIAL_BYTES >> 20} MiB of memory to compile; simplify it"
    if ended == signal.SIGSEGV:
        return "its parts are nested in each other too deeply to be compiled; simplify it"
    return "its compilation was ended by the system; simplify it"


def _be_limited() -> None:
    """Limit CPU time and memory of this process, and let it end with its parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        most = size + STACK_BYTES + MAX_TRIAL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # messages of panics are dropped
    signal.setitimer(signal.ITIMER_PROF, MAX_TRIAL_S)


def main() -> None:
    yield_to_steps(NICENESS)
    with contextlib.suppress(ChannelEnded, KeyboardInterrupt):  # the engine has gone
        jobs = Channel(Connection(os.dup(0), writable=False))
        verdicts = Channel(Connection(os.dup(1), readable=False))
        vocabulary = jobs.receive_object().make()
        _send(verdicts, None, Verdict())
        ended, telling = os.pipe()
        os.set_blocking(ended, False)
        os.set_blocking(telling, False)
        signal.set_wakeup_fd(telling)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        forks = _Forks(vocabulary, verdicts)
        try:
            while True:
                ready, _, _ = select.select([jobs.fileno(), ended], [], [], forks.wait_s())
                if ended in ready:
                    os.read(ended, 4096)
                forks.tend()
                if jobs.fileno() in ready:
                    forks.start(*jobs.receive_object())
        finally:
            forks.end()


if __name__ == "__main__":
    main()
