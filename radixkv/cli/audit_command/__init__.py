# SPDX-License-Identifier: Apache-2.0
"""`radixkv audit`: find out from recorded requests why prompts miss the cache, whoever serves them."""
