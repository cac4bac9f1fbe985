# SPDX-License-Identifier: Apache-2.0
"""Chats: the parts of an assistant's answer, and the ways in which model families write them."""
