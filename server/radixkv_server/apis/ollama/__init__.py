# SPDX-License-Identifier: Apache-2.0
"""Ollama's dialect: chats and completions as lines of JSON, and the routes that list models."""
