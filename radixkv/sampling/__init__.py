# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: penalties, masks, random streams, log probabilities."""
