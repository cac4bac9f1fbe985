# SPDX-License-Identifier: Apache-2.0
"""GGUF files of 4 and 8 bits out of models in safetensors folders."""
