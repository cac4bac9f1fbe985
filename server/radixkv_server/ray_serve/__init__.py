# SPDX-License-Identifier: Apache-2.0
"""Several replicas of a server's engine on Ray Serve, with one HTTP address."""
