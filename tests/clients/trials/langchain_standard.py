# SPDX-License-Identifier: Apache-2.0
"""The classes that `use_langchain_standard` runs."""

import report
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests


class _Tests(ChatModelIntegrationTests):
    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False


class _OpenAITests(_Tests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "model": report.MODEL,
            "base_url": report.SCRIPTED_URL + "/v1",
            "api_key": report.KEY,
            "max_retries": 0,
            "stream_usage": True,
            "use_responses_api": report.API == "responses",
        }

    @property
    def supports_json_mode(self) -> bool:
        return report.API == "chat"


class _AnthropicTests(_Tests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict:
        return {
            "model": report.MODEL,
            "base_url": report.SCRIPTED_URL,
            "api_key": report.KEY,
            "max_retries": 0,
            "max_tokens": 400,
        }


class TestChatModel(_AnthropicTests if report.API == "messages" else _OpenAITests):
    pass
