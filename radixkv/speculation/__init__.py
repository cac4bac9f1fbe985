# SPDX-License-Identifier: Apache-2.0
"""Speculation without a draft model: where guesses of the next tokens come from, and how many pay."""
