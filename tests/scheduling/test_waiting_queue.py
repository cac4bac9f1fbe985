"""The kept orders of the queue are those that sorting all of it in each step would give."""

from hypothesis import given
from hypothesis import strategies as st

from radixkv.request import SamplingParams
from radixkv.scheduling.policy import FairPolicy, PriorityPolicy, tenant_of
from radixkv.scheduling.request_state import Request
from radixkv.scheduling.waiting_queue import WaitingQueue

PARAMS = SamplingParams(max_tokens=1)
REQUESTS = st.tuples(
    st.sampled_from(["a", ("a", "salt"), "b", ("c", "x")]),
    st.integers(1, 50),
    st.integers(0, 3),
)


def arrivals(plan):
    for i, (namespace, length, priority) in enumerate(plan):
        request = Request(str(i), [1] * length, PARAMS, namespace=namespace, priority=priority)
        request.arrival_order = i
        yield request


def fair_order(policy, waiting):
    """Each request counts for its tenant once it is tried: the least served tenant is next, then arrival."""
    levels, keyed = {}, []
    for request in waiting:
        tenant = tenant_of(request.namespace)
        level = levels.get(tenant, policy.served.get(tenant, 0.0))
        keyed.append((level, request.arrival_order, request))
        levels[tenant] = level + request.num_tokens / policy.weights.get(tenant, 1.0)
    return [item[2] for item in sorted(keyed, key=lambda item: item[:2])]


@given(st.lists(REQUESTS, max_size=30), st.data())
def test_kept_orders_equal_sorting(plan, data):
    fair = FairPolicy({"a": 2.0, "b": 0.5})
    fair.served = {"a": 40.0, "c": 7.0}
    for policy in (fair, PriorityPolicy()):
        queue = WaitingQueue(policy, 32)
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
        assert queue.in_arrival_order() == waiting
        if policy is fair:
            expected = fair_order(policy, waiting)
        else:
            expected = sorted(waiting, key=policy.urgency)
            assert queue.most_urgent() is (expected[0] if expected else None)
        assert queue.in_order_of_trial(lambda _: []) == expected
