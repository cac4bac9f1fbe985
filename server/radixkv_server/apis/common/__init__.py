# SPDX-License-Identifier: Apache-2.0
"""What several APIs share: fields, messages and tools of chats, logprobs, usage, OpenAI's errors."""
