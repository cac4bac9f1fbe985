# SPDX-License-Identifier: Apache-2.0
"""Batches: files of requests in OpenAI's form, answered in the order of their shared prefixes."""
