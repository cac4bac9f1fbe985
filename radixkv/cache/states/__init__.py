# SPDX-License-Identifier: Apache-2.0
"""States of recurrent and convolutional layers in the tree: slots, checkpoints, and their eviction."""
