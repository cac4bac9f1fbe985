# SPDX-License-Identifier: Apache-2.0
"""Parts shared by several APIs: fields, chat messages and tools, logprobs, usage, OpenAI's errors."""
