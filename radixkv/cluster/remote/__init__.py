# SPDX-License-Identifier: Apache-2.0
"""An engine in another process: what `EngineClient` offers, as pickled messages over a connection."""
