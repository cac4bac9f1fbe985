# SPDX-License-Identifier: Apache-2.0
"""Chats in no dialect: to a prompt, and back to the parts of an answer; what of a prompt is to be pinned."""
