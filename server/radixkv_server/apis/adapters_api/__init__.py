# SPDX-License-Identifier: Apache-2.0
"""Routes that load and unload LoRA adapters, as vLLM spells them."""
