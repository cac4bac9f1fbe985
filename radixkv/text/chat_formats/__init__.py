# SPDX-License-Identifier: Apache-2.0
"""Chats: what an assistant's answer consists of, and how model families write it down."""
