# SPDX-License-Identifier: Apache-2.0
"""OpenAI's APIs of files and batches: files of requests, answered when nobody else asks."""
