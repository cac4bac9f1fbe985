# SPDX-License-Identifier: Apache-2.0
"""Files to records: JSON lines, HAR, LiteLLM's payload; gzipped or not, streamed, what is broken counted."""
