# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv chat`: a conversation in the terminal, with a server or a model in this process."""
