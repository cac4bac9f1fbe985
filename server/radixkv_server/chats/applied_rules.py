# SPDX-License-Identifier: Apache-2.0
"""AppliedRules: the rules for clients' own text that have been applied; each is logged once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from radixkv.text.chat_formats.client_rules import ClientRule

logger = logging.getLogger("radixkv.server")


def in_words(rule: ClientRule) -> str:
    """Describe the effect of a rule, for people."""
    return f"{rule.what}, which {rule.client} writes at the head of the system prompt, is held constant"


@dataclass(slots=True)
class AppliedRules:
    """Used on the event loop."""

    _told: set[str] = field(default_factory=set)

    def note(self, rule: ClientRule) -> None:
        """Note that a rule has changed a prompt."""
        if rule.what not in self._told:
            self._told.add(rule.what)
            logger.info(
                "%s, so that prompts are found again; --normalize-clients off leaves it", in_words(rule)
            )
