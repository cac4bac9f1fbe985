# SPDX-License-Identifier: Apache-2.0
"""OpenAI's dialect: chat and text completions."""
