# SPDX-License-Identifier: Apache-2.0
"""Several engines with one model as one engine: routed by cached prefixes, replaceable at runtime."""
