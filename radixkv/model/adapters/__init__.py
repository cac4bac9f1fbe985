# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: read from folders of PEFT, registered by name, and added to the products of a base model."""
