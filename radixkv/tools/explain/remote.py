"""Asking a running server for explanations."""

from __future__ import annotations

from typing import Any

from radixkv.errors import ConfigError
from radixkv.tools.explain.prompt_file import PromptFile


def explain_remotely(url: str, key: str | None, prompt: PromptFile) -> dict[str, Any]:
    """What the server says to a prompt; see docs/cache_api.md.

    Raises:
        ConfigError: the server does not answer, or refuses.
    """
    import httpx

    from radixkv.tools.openai_http import authorization

    try:
        answer = httpx.post(
            url.rstrip("/") + "/v1/cache/explain",
            json=prompt.body,
            headers=authorization(key),
            timeout=60,
            trust_env=False,
        )
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url} does not answer: {error or type(error).__name__}") from error
    except ValueError:
        body = None
    if not isinstance(body, dict) or answer.status_code != 200:
        problem = body.get("error") if isinstance(body, dict) else None
        message = problem.get("message") if isinstance(problem, dict) else "this is no answer of radixkv's"
        raise ConfigError(f"{url} answers {answer.status_code} to {prompt.path}: {message}")
    return body
