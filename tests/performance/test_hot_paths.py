# SPDX-License-Identifier: Apache-2.0
"""The hot paths may not become slower unnoticed: match, acquire, step build, plan, sampling.

No seconds: instructions and calls are counted, and times are ratios within one process. The costs to hold are
in costs.json; `python tests/performance/record_costs.py --write` records them anew.
"""

import json
import time
from pathlib import Path

import pytest
from hot_paths import PATHS, acquire, match, step_build
from measuring import count_work, relative_time

COSTS = json.loads(Path(__file__).with_name("costs.json").read_text(encoding="utf-8"))["paths"]
# Of the recorded counts. They are exact for one version of Python; other versions differ by up to a quarter.
MAX_WORK = 1.5
# Of the recorded ratio of times: processors differ, and sharing caches slows one part more than another.
MAX_TIME = 2.5
ATTEMPTS = 6
ADVICE = "; if that is meant: python tests/performance/record_costs.py --write"


def check_work(name, run):
    """Assert that a path executes at most so many instructions and calls."""
    work, cost = count_work(run), COSTS[name]
    for what in ("instructions", "c_calls"):
        most, found = MAX_WORK * cost[what], getattr(work, what)
        assert found <= most, (
            f"{name}: {found} {what}, recorded were {cost[what]}, at most {most:.0f}{ADVICE}"
        )


def check_time(name, run, attempts=ATTEMPTS):
    """Assert that a path takes at most so long, beside a reference. Noise passes in one of the attempts."""
    most = MAX_TIME * COSTS[name]["relative_time"]
    smallest = float("inf")
    for _ in range(attempts):
        smallest = min(smallest, relative_time(run, PATHS[name].repeats))
        if smallest <= most:
            return
    raise AssertionError(f"{name}: {smallest:.2f} times the reference, at most {most:.2f}{ADVICE}")


@pytest.mark.parametrize("name", PATHS)
def test_a_hot_path_executes_no_more_than_recorded(name):
    check_work(name, PATHS[name].make())


@pytest.mark.parametrize("name", PATHS)
def test_a_hot_path_takes_no_longer_than_recorded_beside_a_reference(name):
    check_time(name, PATHS[name].make())


@pytest.mark.parametrize("make", [match, acquire, step_build])
def test_work_does_not_grow_with_what_is_cached(make):
    small, large = (count_work(make(num_blocks=n)) for n in (1_000, 100_000))
    assert large.instructions <= 1.1 * small.instructions + 50
    assert large.c_calls <= 1.1 * small.c_calls + 10


def test_a_decode_costs_no_more_among_many():
    few, many = (count_work(step_build(num_running=n)).instructions for n in (16, 256))
    admissions = count_work(step_build(num_running=1)).instructions
    assert (many - admissions) / 256 <= 1.25 * (few - admissions) / 16


def twice(run):
    def slow():
        run()
        run()

    return slow


@pytest.mark.parametrize("name", PATHS)
def test_the_guard_notices_a_path_that_does_everything_twice(name):
    slow = twice(PATHS[name].make())
    with pytest.raises(AssertionError, match="record_costs"):
        check_work(name, slow)


@pytest.mark.parametrize("name", PATHS)
def test_the_guard_notices_what_is_slow_without_executing_more(name):
    """Processor time that Python's instructions and calls do not account for, as of a slower library."""
    run = PATHS[name].make()
    run()
    start = time.thread_time()
    run()
    wait = 4 * (time.thread_time() - start)

    def slow():
        run()
        end = time.thread_time() + wait
        while time.thread_time() < end:
            pass

    with pytest.raises(AssertionError, match="record_costs"):
        check_time(name, slow, attempts=1)
