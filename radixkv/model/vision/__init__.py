# SPDX-License-Identifier: Apache-2.0
"""Models that see: images in prompts, the tower that encodes them, and the rows that it gives to a step."""
