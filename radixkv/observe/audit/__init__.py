# SPDX-License-Identifier: Apache-2.0
"""What requests ask of a prefix cache, recorded or watched: a record of each, and rules that judge it."""
