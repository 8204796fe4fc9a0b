"""The Jinja chat template that goes with an exported model, and the protocol's fixed words."""

from __future__ import annotations

import json

# The words of the Qwen3 protocol: models were trained on exactly these, so they stand here letter by letter.
TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

_HEAD_FULL = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if system is not none %}
        {{- system + '\\n\\n' }}
    {%- endif %}
    {{- @TOOLS_HEAD@ }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- @TOOLS_TAIL@ + '<|im_end|>\\n' }}
{%- elif system is not none %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
"""
_HEAD_NONE = """\
{%- if system is not none %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
"""
_SHOWN = {
    "strip": "{%- set shown = loop.index0 > found.query and (loop.last or thinking) %}",
    "keep": "{%- set shown = thinking is not none or not think %}",
}
_TEMPLATE = """\
{%- set think = enable_thinking if enable_thinking is defined else @THINKING@ %}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else none %}
@HEAD@
{%- set found = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set text = message.content %}
        {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
            {%- set found.query = loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if found.query < 0 %}
    {%- set found.query = messages | length - 1 %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thinking = message.reasoning_content if message.reasoning_content is defined else none %}
        {%- if thinking is none and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        @SHOWN@
        {%- if shown %}
            {{- '<think>\\n' + (thinking or '').strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for entry in message.tool_calls or [] %}
            {%- set call = entry.function if entry.function else entry %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if not think %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def jinja(*, thinking: bool, tool_docs: str, old_thinking: str) -> str:
    """Template text for a chat format; `enable_thinking` given at rendering time overrides `thinking`."""
    parts = {
        "@HEAD@": _HEAD_FULL if tool_docs == "full" else _HEAD_NONE,
        "@SHOWN@": _SHOWN[old_thinking],
        "@THINKING@": "true" if thinking else "false",
        "@TOOLS_HEAD@": json.dumps(TOOLS_HEAD),
        "@TOOLS_TAIL@": json.dumps(TOOLS_TAIL),
    }
    text = _TEMPLATE
    for mark, part in parts.items():
        text = text.replace(mark, part.rstrip("\n"))
    return text
