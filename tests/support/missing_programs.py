# SPDX-License-Identifier: Apache-2.0
"""The last lines of a test run: how many tests were skipped for lack of a program, and how to get it."""

from __future__ import annotations

import pytest

#: A program that skip reasons name -> the command that installs it.
PROGRAMS = {
    "chromium": ".venv/bin/playwright install --with-deps chromium",
    "redis-server": "apt-get install redis-server",
    "promtool": "apt-get install prometheus",
    "curl": "apt-get install curl",
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each program that tests were skipped for."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for program, command in PROGRAMS.items():
        count = sum(program in reason for reason in reasons)
        if count:
            tests = "1 test" if count == 1 else f"{count} tests"
            terminalreporter.write_line(f"{tests} skipped for lack of {program}: {command}", yellow=True)
