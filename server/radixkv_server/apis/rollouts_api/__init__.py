# SPDX-License-Identifier: Apache-2.0
"""Routes that training loops use to change weights, pause and sleep, as vLLM spells them."""
