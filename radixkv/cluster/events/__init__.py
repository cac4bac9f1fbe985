# SPDX-License-Identifier: Apache-2.0
"""Block events on the wire: which whole blocks a replica holds, published and followed over ZeroMQ."""
