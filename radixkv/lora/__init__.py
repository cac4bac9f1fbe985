# SPDX-License-Identifier: Apache-2.0
"""Names of LoRA adapters: registered, read when they are asked for, replaced and forgotten."""
