# SPDX-License-Identifier: Apache-2.0
"""The model side of a step: weights, paged K/V, the attention hook, the forward pass. torch lives here."""
