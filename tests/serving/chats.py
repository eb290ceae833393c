"""A model for chats: the demo model's tokenizer with a template of the kind that Qwen's models have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from tests.serving.front import DEMO, Front

Talk = Callable[..., Awaitable[Front]]  # the fixture `talk`
BEGIN, END = SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Answer with <tool_call> for: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'developer' %}{{ raise_exception('no such role: developer') }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking %}<think>
{% endif %}{% endif %}"""
# Templates as families have them: of thoughts that a switch turns off, of an effort, of texts that are trimmed.
SWITCHED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' and '</think>' in m.content %}
{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}
{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}{# <tool_call> #}"""
OF_EFFORT = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}
{%- macro head(role) %}<|im_start|>{{ role }}
{% endmacro %}Reasoning: {{ reasoning_effort }}, {{ style or 'plain' }}
{%- for d in documents or [] %} [{{ d.title }}]{% endfor %}
{% for m in messages %}{{ head(m.role) }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{%- endgeneration %}{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
TRIMMED = """\
{% for m in messages %}<|im_start|>{{ m.role }}

{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
TEMPLATES = {"trimmed": TRIMMED, "of effort": OF_EFFORT}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
USER = {"role": "user", "content": "Hello, what is the weather like?"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


REFUSALS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


def chat_model(directory: Path, template: str = TEMPLATE) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
