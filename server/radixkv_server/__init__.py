# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: OpenAI's API over a `radixkv.engine.client.EngineClient`."""
