"""The language of chats: messages to prompts, and a model's text back to reasoning, content and tool calls.

Needs no web framework; a frontend of your own can use it with any text generator.
"""

from openinfer.frontend.chat.deepseek_v4 import DeepSeekV4Renderer
from openinfer.frontend.chat.deepseek_v32 import DeepSeekV32Renderer, coded_renderer
from openinfer.frontend.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ToolFormat, default_formats
from openinfer.frontend.chat.output import OutputParser
from openinfer.frontend.chat.parts import (
    Arguments,
    Content,
    Message,
    Part,
    Reasoning,
    Renderer,
    RendererSpec,
    ToolCall,
    text_of,
)

__all__ = [
    "REASONING_FORMATS", "TOOL_FORMATS", "Arguments", "Content", "DeepSeekV4Renderer",
    "DeepSeekV32Renderer", "Message", "OutputParser", "Part", "Reasoning", "Renderer", "RendererSpec",
    "ToolCall", "ToolFormat",
    "coded_renderer", "default_formats", "text_of",
]  # fmt: skip
