# SPDX-License-Identifier: Apache-2.0
"""Several engines as one: block events, routing, engine processes, replicas."""
