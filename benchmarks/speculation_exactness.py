"""Does speculation change what requests get? Random requests twice, and a chi-square over sampled tokens."""
from __future__ import annotations
from typing import Any
def same_tokens(num_requests: int) -> dict[str, Any]:
    return {}
def chi_square(num_tokens: int) -> dict[str, Any]:
    return {}
