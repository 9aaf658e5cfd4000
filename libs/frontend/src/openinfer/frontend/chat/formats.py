"""The formats by the names of the command line, and which a model speaks."""

from collections.abc import Mapping
from types import MappingProxyType

from openinfer.frontend.chat.dsml import DsmlFormat
from openinfer.frontend.chat.hermes import HermesFormat
from openinfer.frontend.chat.output import ToolFormat
from openinfer.frontend.chat.qwen_xml import QwenXmlFormat

__all__ = ["REASONING_FORMATS", "TOOL_FORMATS", "default_formats"]

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "deepseek_v4": DsmlFormat(),
        "hermes": HermesFormat(),
        "qwen3_coder": QwenXmlFormat(),
        "qwen3_xml": QwenXmlFormat(),
    }
)
"""--tool-call-parser: name to format, under the names that users of vLLM know."""

REASONING_FORMATS = ("deepseek_v4", "qwen3")
"""--reasoning-parser: all of them are `<think>...</think>` at the start, opened by the prompt or by the model."""

_DEFAULTS = (("qwen3_5", "qwen3_xml", "qwen3"), ("qwen3", "hermes", "qwen3"), ("deepseek_v4",) * 3)


def default_formats(model_type: str) -> tuple[str | None, str | None]:
    """Names of the tool and the reasoning format of config.json's model_type; None where we know none."""
    for prefix, tools, reasoning in _DEFAULTS:
        if model_type.startswith(prefix):
            return tools, reasoning
    return None, None
