# SPDX-License-Identifier: Apache-2.0
"""State layers on a GPU: one recurrence, row by row, for prompts, decodes and guesses alike."""
