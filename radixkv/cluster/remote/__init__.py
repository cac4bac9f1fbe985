# SPDX-License-Identifier: Apache-2.0
"""An engine in another process: what `EngineClient` offers, as messages over a channel."""
