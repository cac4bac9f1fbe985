# SPDX-License-Identifier: Apache-2.0
"""Memory of a model on its device: K/V, states, windows, a step's own; found before the first request."""
