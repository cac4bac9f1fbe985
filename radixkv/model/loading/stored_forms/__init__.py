# SPDX-License-Identifier: Apache-2.0
"""Readers of quantised checkpoints, one for each family of formats: a folder's tensors -> stored weights."""
