# SPDX-License-Identifier: Apache-2.0
"""Choice of the requests of the next step, and of their numbers of tokens. Imports no torch."""
