# SPDX-License-Identifier: Apache-2.0
"""Chats independent of APIs: rendering of prompts, parsing of answers, and pins of prompts."""
