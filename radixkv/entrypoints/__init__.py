# SPDX-License-Identifier: Apache-2.0
"""Entry points: an engine built from its settings, and used synchronously (`LLM`) or from asyncio."""
