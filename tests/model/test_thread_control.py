# SPDX-License-Identifier: Apache-2.0
"""ThreadControl with a made-up clock and made-up waiting times."""

from __future__ import annotations

import pytest

from radixkv.model.cpu_layers.thread_control import ThreadControl, seconds_waited


class Machine:
    """A clock, and threads that wait for a core as told."""

    def __init__(self, most: int) -> None:
        self.now = 100.0
        self.waited = 0.0
        self.threads = most
        self.readable = True
        self.control = ThreadControl(
            most, waited=self.read, clock=lambda: self.now, apply=lambda n: setattr(self, "threads", n)
        )

    def read(self) -> float:
        if not self.readable:
            raise OSError("no schedstats here")
        return self.waited

    def compute(self, seconds: float, *, waiting: float) -> int:
        """Steps of 20 ms during which `waiting` threads wait on average; the threads of the last one."""
        for _ in range(round(seconds / 0.02)):
            self.control.before_step()
            self.now += 0.02
            self.waited += waiting * 0.02
        self.control.before_step()
        return self.threads


def test_alone_all_threads_compute() -> None:
    machine = Machine(4)
    assert machine.compute(30, waiting=0.05) == 4


def test_one_program_beside_it_costs_one_thread() -> None:
    machine = Machine(4)
    assert machine.compute(0.5, waiting=0.5) == 3
    assert Machine(2).compute(0.5, waiting=0.5) == 1


def test_many_programs_leave_one_thread() -> None:
    assert Machine(4).compute(0.5, waiting=6) == 1


def test_threads_come_back_when_the_other_program_ends() -> None:
    machine = Machine(2)
    machine.compute(0.5, waiting=0.5)
    assert machine.threads == 1
    assert machine.compute(1, waiting=0.0) == 2


def test_trials_become_rare_while_cores_stay_short() -> None:
    machine = Machine(2)
    slow = 0
    for _ in range(1500):  # 30 s of steps of 20 ms
        slow += machine.threads == 2
        machine.compute(0.02, waiting=0.5 if machine.threads == 2 else 0.0)
    assert 15 < slow < 150


def test_a_short_burst_of_another_program_changes_nothing() -> None:
    machine = Machine(2)
    for _ in range(20):
        machine.compute(0.06, waiting=1.0)
        assert machine.compute(0.44, waiting=0.0) == 2


def test_a_step_is_not_interrupted_by_looking_too_often() -> None:
    machine = Machine(2)
    machine.waited = 100.0
    machine.now += 0.05
    machine.control.before_step()
    assert machine.threads == 2


def test_without_counters_nothing_changes() -> None:
    machine = Machine(2)
    machine.readable = False
    assert machine.compute(1, waiting=5) == 2


def test_the_counters_of_this_system() -> None:
    try:
        before = seconds_waited()
    except OSError:
        pytest.skip("this system has no /proc/self/task/*/schedstat")
    assert 0 <= before <= seconds_waited()
