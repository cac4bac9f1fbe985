# SPDX-License-Identifier: Apache-2.0
"""Generation independent of APIs: from a request's body through the engine to a metered answer."""
