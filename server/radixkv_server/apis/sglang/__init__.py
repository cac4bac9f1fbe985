# SPDX-License-Identifier: Apache-2.0
"""SGLang's routes of sessions."""
