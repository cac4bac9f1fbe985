# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API."""
