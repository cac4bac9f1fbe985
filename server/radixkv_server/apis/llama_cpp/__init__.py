# SPDX-License-Identifier: Apache-2.0
"""Routes that llama.cpp's clients need beside OpenAI's."""
