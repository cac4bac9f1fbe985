# SPDX-License-Identifier: Apache-2.0
"""The Redis tier: blocks that several replicas share."""
