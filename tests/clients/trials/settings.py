# SPDX-License-Identifier: Apache-2.0
"""The settings that docs/agents.md prints for an agent, for the servers of a trial."""

import os
import re
from pathlib import Path

import report

#: What the page shows, and users replace with their own.
SHOWN_URL, SHOWN_KEY = "http://127.0.0.1:8000", "any-key"
#: Both servers know the model by the page's name, too.
MODEL = os.environ["PAGE_MODEL"]


def blocks(agent: str, url: str) -> list[str]:
    """The fenced blocks of the agent's section, with a server's address and the trial's key."""
    text = Path(os.environ["PAGE"]).read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(agent)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for block in found:
        assert MODEL in block, f"{agent}: a block does not name the page's model"
    return [block.replace(SHOWN_URL, url).replace(SHOWN_KEY, report.KEY) for block in found]


def variables(block: str) -> dict[str, str]:
    """The variables that a block of `export NAME=VALUE` sets."""
    return dict(re.findall(r"^export (\w+)=(\S+)$", block, re.MULTILINE))
