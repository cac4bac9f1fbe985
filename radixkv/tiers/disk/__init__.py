# SPDX-License-Identifier: Apache-2.0
"""The disk tier: blocks in append-only files, which outlive the process."""
