"""The prefix cache: radix tree, block pool, eviction, retention and explanation. Imports no torch."""

from radixkv.cache.eviction import adaptive as adaptive  # registers the policy
