# SPDX-License-Identifier: Apache-2.0
"""The loop that serves requests: input, the step, output, recovery from faults."""
