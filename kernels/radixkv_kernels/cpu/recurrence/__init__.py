# SPDX-License-Identifier: Apache-2.0
"""State layers on a CPU: one compiled kernel for each kind of state, all for the same plan."""
