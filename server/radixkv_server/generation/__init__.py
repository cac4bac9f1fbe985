# SPDX-License-Identifier: Apache-2.0
"""From the body of a request, through the engine, to an answer that is counted; in no dialect."""
