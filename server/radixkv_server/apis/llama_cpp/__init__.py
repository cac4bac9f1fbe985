# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp's clients ask of a server beside OpenAI's routes."""
