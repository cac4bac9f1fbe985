# SPDX-License-Identifier: Apache-2.0
"""The kept orders of the queue are those that sorting all of it in each step would give."""

from hypothesis import given
from hypothesis import strategies as st

from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.policy import FairPolicy, PriorityPolicy, tenant_of
from radixkv.scheduling.request import Request
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.waiting_queue import WaitingQueue

BOUND = 32
PARAMS = SamplingParams(max_tokens=1)
REQUESTS = st.tuples(
    st.sampled_from(["a", ("a", "salt"), "b", ("c", "x")]),
    st.integers(1, 50),
    st.integers(0, 3),
)


def arrivals(plan):
    for i, (namespace, length, priority) in enumerate(plan):
        request = Sequence(
            Request([1] * length, PARAMS, request_id=str(i), namespace=namespace, priority=priority)
        )
        request.arrival_order = i
        yield request


def fair_order(policy, waiting, cached):
    """Each request counts for its tenant once it is tried: the least served tenant is next, then arrival.

    So places go to tenants. In its own, a tenant's aged requests come first, then each namespace's longest
    prefixes.
    """
    levels, keyed = {}, []
    for request in waiting:
        tenant = tenant_of(request.namespace)
        level = levels.get(tenant, policy.served.get(tenant, 0.0))
        keyed.append((level, request.arrival_order, request))
        levels[tenant] = level + request.num_tokens / policy.weights.get(tenant, 1.0)
    places = [item[2] for item in sorted(keyed, key=lambda item: item[:2])]
    ordered = places
    for namespace in {request.namespace for request in places}:
        ordered = rearranged(
            ordered, namespace, lambda r: r.namespace, lambda r: (-cached[r], r.arrival_order)
        )
    for tenant in levels:
        # Only the aged ones are moved: `sorted` keeps the others' order.
        ordered = rearranged(
            ordered,
            tenant,
            lambda r: tenant_of(r.namespace),
            lambda r: (0, r.arrival_order) if policy.passed.overtaken[r] >= BOUND else (1, 0),
        )
    return ordered


def rearranged(requests, kind, kind_of, key):
    """The requests of one kind sorted among the places that they have."""
    own = iter(sorted((r for r in requests if kind_of(r) == kind), key=key))
    return [next(own) if kind_of(request) == kind else request for request in requests]


@given(st.lists(REQUESTS, max_size=30), st.data())
def test_kept_orders_equal_sorting(plan, data):
    fair = FairPolicy({"a": 2.0, "b": 0.5})
    fair.served = {"a": 40.0, "c": 7.0}
    for policy in (fair, PriorityPolicy()):
        queue = WaitingQueue(policy, BOUND)
        requests = list(arrivals(plan))
        taken = []
        for request in requests:
            queue.add(request)
            if data.draw(st.integers(0, 3)) == 0:
                taken.append(data.draw(st.sampled_from(queue.in_arrival_order())))
                queue.remove(taken[-1])
            elif taken and data.draw(st.booleans()):
                queue.put_back(taken.pop(0))
            queue.check()
        waiting = [r for r in requests if r in queue]
        cached = {request: data.draw(st.integers(0, 3)) for request in waiting}
        assert queue.in_arrival_order() == waiting
        if policy is fair:
            for request in waiting:
                policy.passed.overtaken[request] = data.draw(st.sampled_from([0, 1, BOUND]))
            expected = fair_order(policy, waiting, cached)
        else:
            expected = sorted(waiting, key=policy.urgency)
            assert next(queue.firsts(), None) is (expected[0] if expected else None)
        assert (
            queue.in_order_of_trial(lambda ordered, cached=cached: [cached[r] for r in ordered]) == expected
        )
