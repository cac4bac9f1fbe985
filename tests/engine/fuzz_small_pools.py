# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests in pools with hardly enough blocks.

With `--interpreted` (and TRITON_INTERPRET=1) the models are tiny ones over the interpreted Triton kernels.
Prints what the runs were like; ends with an error at the first seed whose answers differ from those of an
engine without guesses and with room for all, or of transformers, or whose invariants break.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
os.environ["RADIXKV_CHECK_STEPS"] = "1"

import numpy as np
import torch
from broken_redis import BrokenOutcome, run_over_redis
from pool_traffic import Outcome, run

TELL_S = 10.0  # between two lines of what was done so far


def main() -> None:
    """Run seeds until enough requests were served."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--faults", action="store_true", help="a step in a hundred fails")
    parser.add_argument("--tier", action="store_true", help="with a tier that fails, hangs and lies")
    parser.add_argument("--controls", action="store_true", help="prewarms, breakpoints, what may stay")
    parser.add_argument("--ahead", action="store_true", help="steps are launched ahead")
    parser.add_argument("--quotas", action="store_true", help="namespaces have quotas, which change")
    parser.add_argument(
        "--agents", action="store_true", help="conversations go on and end; long prompts wait"
    )
    parser.add_argument("--states", action="store_true", help="the model has states")
    parser.add_argument("--images", action="store_true", help="prompts show pictures")
    parser.add_argument(
        "--mixed", action="store_true", help="each seed draws which of these (but --redis) it has"
    )
    parser.add_argument("--seconds", type=float, help="end after so long, whatever was served")
    parser.add_argument("--redis", action="store_true", help="two replicas over a Redis that fails")
    parser.add_argument("--interpreted", help="a kind of tiny model over the Triton kernels, or `all`")
    parser.add_argument("--each", type=int, default=60, help="requests of a seed")
    parser.add_argument("--folder", type=Path, help="with a host tier and a disk tier in this folder")
    options = parser.parse_args()
    logging.getLogger("radixkv").disabled = True  # which step failed
    torch.set_num_threads(1)  # on a busy machine threads that wait for each other cost most of the time
    if options.redis:
        over_redis(options.seed, options.requests, ahead=options.ahead)
        return
    total, seed, started = Outcome(), options.seed, time.monotonic()
    tell_at = started
    until = float("inf") if options.seconds is None else started + options.seconds
    names = ("faults", "tier", "controls", "ahead", "quotas", "agents", "images")
    models = _interpreted(options.interpreted) if options.interpreted else []
    if models:
        names = names[:-1]
    while total.requests < options.requests and time.monotonic() < until:
        wanted = {name: getattr(options, name) for name in names}
        if options.mixed:
            drawn = np.random.default_rng(seed).random(len(names)) < 0.6
            wanted = dict(zip(names, map(bool, drawn), strict=True))
        if models:
            wanted["interpreted"] = models[seed % len(models)]
        for _ in range(1 if options.folder is None else 2):  # the second time much of it is on the disk
            total.add(run(seed, options.each, **wanted, states=options.states, folder=options.folder))
        seed += 1
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + TELL_S
            print(f"{time.monotonic() - started:6.0f} s, seed {seed}: {total}", flush=True)
    print(f"{total}\nno difference")
    for model in models:
        print(f"{model.kind}: {model.num_checked} tokens, {model.num_near} of them by rounding")


def _interpreted(kind: str) -> list[Any]:
    """Models of a kind, or of all."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels" / "interpreted"))
    import interpreter_repairs
    import transformers
    from interpreted_models import KINDS, InterpretedModel

    interpreter_repairs.install()
    transformers.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp())
    return [InterpretedModel(each, folder / each) for each in ([kind] if kind != "all" else KINDS)]


def over_redis(seed: int, num_requests: int, *, ahead: bool) -> None:
    """The same for replicas over a Redis; every other seed has one of them in another process."""
    total, started = BrokenOutcome(), time.monotonic()
    while total.answers + total.cancelled < num_requests:
        total.add(run_over_redis(seed, 100, elsewhere=bool(seed % 2), ahead=ahead))
        seed += 1
        print(f"{time.monotonic() - started:6.0f} s, seed {seed}: {total}", flush=True)
    print("no difference")


if __name__ == "__main__":
    main()
