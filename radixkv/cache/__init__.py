"""The prefix cache: radix tree, block pool, eviction, retention and explanation. Imports no torch."""

from radixkv.cache import adaptive_policy as adaptive_policy  # registers the policy
