"""Who gives way when blocks run out. Decided purely: the scheduler releases what these functions choose.

Three rules, the first one strongest:

 1. the least urgent class of the policy gives way (under `priority`: the largest number);
 2. a request that has got no token since it was last resumed is spared, so that every preemption is followed
    by progress (who asks for a block has just got a token, so there is always one to choose: itself);
 3. the latest arrival goes first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from radixkv.scheduling.policy import AdmissionPolicy
from radixkv.scheduling.sequence_state import SequenceState


def choose_victim(
    rivals: Iterable[SequenceState], in_step: Container[int], policy: AdmissionPolicy
) -> SequenceState:
    """The running request to preempt. O(rivals).

    Args:
        rivals: those whose release would help, the one that needs a block included.
        in_step: arrival orders of those that have tokens in this step already: never chosen.
    """

    def key(request: SequenceState) -> tuple[float, bool, int]:
        rank, order = policy.urgency(request)
        return rank, request.has_progressed, order

    return max((request for request in rivals if request.arrival_order not in in_step), key=key)
