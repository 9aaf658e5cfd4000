"""Chat templates of the two Qwen families: short ones of our own, in the published formats. (DeepSeek-V4 has code.)"""

from __future__ import annotations

_HEAD = """\
{%- set ns = namespace(query=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- set system = messages[0].content | trim if messages and messages[0].role == 'system' else '' -%}
"""
_TURNS = """\
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.query -%}
{{- '<think>\\n' + (m.reasoning_content or m.reasoning or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n' if m.content or not loop.first else '' -}}
CALL
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' -}}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' -}}
{%- elif m.role != 'system' -%}
{{- raise_exception('unknown role ' + m.role) -}}
{%- endif -%}
{%- endfor -%}
"""

QWEN3 = (
    _HEAD
    + """\
{%- if tools -%}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') -}}
{{- '# Tools\\n\\nCall a tool like this:\\n<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>\\n\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- elif system -%}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
"""
    + _TURNS.replace(
        "CALL",
        """\
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}""",
    )
    + """\
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
)
"""JSON calls; the model opens its thoughts itself."""

QWEN3_5 = (
    _HEAD
    + """\
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '</tools>\\n\\nCall a tool like this:\\n<tool_call>\\n<function=NAME>\\n<parameter=PARAMETER>\\nvalue\\n</parameter>\\n' -}}
{{- '</function>\\n</tool_call>' + ('\\n\\n' + system if system else '') + '<|im_end|>\\n' -}}
{%- elif system -%}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
"""
    + _TURNS.replace(
        "CALL",
        """\
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}""",
    )
    + """\
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
)
"""XML calls; the prompt opens the thoughts."""
