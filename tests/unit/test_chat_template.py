"""Chat templates: conversations are rendered, or refused, as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from launch.client.chat_template import choose, names, render, variables

DEMO = Path(__file__).parents[2] / "assets" / "demo-model"
TOKENIZER = AutoTokenizer.from_pretrained(DEMO)
# What templates are made of: one for each thing that transformers adds to jinja2, and for spaces that it strips.
SHOWN = ["{{ m.content }}", "{{ m.content | trim }}", "{{- m['content'] -}}", "", "{{ m.content[:3] }}", "{{ m.role }}"]
AROUND = [
    "",
    "  {% if m.role == 'user' %}\n  U{% endif %}\n",
    "{{ m | tojson }}",
    "{{ tools | tojson(indent=2, sort_keys=true) }}",
    "{{ m | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{{ bos_token }}{{ eos_token }}{{ style }}",
    "{% if loop.last %}{% break %}{% endif %}",
    "{% if m.role == 'tool' %}{{ raise_exception('no tools: ' ~ m.content) }}{% endif %}",
    "{% set n = 1 %}{% generation %}{% set n = 2 %}[{{ n }}]{%- endgeneration %}{{ n }}",
    "{%- for d in documents or [] %} [{{ d.title }}]{% endfor %}",
    "{{ strftime_now('%Y') }}",
    "{{ messages.append(m) }}",
    "{{ m.missing.part }}",
    "{{ ''.__class__ }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(m.role) }}",
    "{{ m.content | unknown }}",
    "{% if %}",
]
PROMPTS = ["", "{% if add_generation_prompt %}<|assistant|>\n{% endif %}", "\n\n"]
PIECES = st.lists(st.sampled_from(AROUND), max_size=3).map("".join)
TEMPLATES = st.builds(
    lambda before, shown, after, prompt: f"{{% for m in messages %}}{before}{shown}{after}{{% endfor %}}{prompt}",
    PIECES, st.sampled_from(SHOWN), PIECES, st.sampled_from(PROMPTS),
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"])},
        optional={
            "content": st.sampled_from(["", " a ", "é<b>&'", "{{ x }}", "content", "\n", "CONTINUE_FINAL", None])
        },
    ),
    min_size=1,
    max_size=3,
)
GIVEN = st.fixed_dictionaries(
    {"add_generation_prompt": st.booleans(), "tools": st.sampled_from([None, [{"type": "function", "x": "é<"}]])},
    optional={"style": st.text(max_size=2), "bos_token": st.just("B"), "documents": st.just([{"title": "T"}])},
)


def outcome(rendered: Any) -> tuple[str, str]:
    try:
        return "", rendered()
    except Exception as error:
        return type(error).__name__, str(error)


@settings(max_examples=300, deadline=None)
@given(template=TEMPLATES, messages=MESSAGES, more=GIVEN, continues=st.booleans())
@example("{% for m in messages %}{{ m.content | trim }}\n{% endfor %}", [{"role": "a", "content": "x "}], {}, True)
def test_conversations_are_rendered_as_by_transformers(
    template: str, messages: list[dict[str, Any]], more: dict[str, Any], continues: bool
) -> None:
    more = (
        {"add_generation_prompt": False, "tools": None} | more | ({"add_generation_prompt": False} if continues else {})
    )
    given_ = {"documents": None, **TOKENIZER.special_tokens_map, **more}
    ours = outcome(lambda: render(template, messages, continues, given_))
    theirs = outcome(
        lambda: TOKENIZER.apply_chat_template(
            messages, chat_template=template, tokenize=False, continue_final_message=continues, **more
        )
    )
    assert ours == theirs


def test_variables_and_names_of_a_template() -> None:
    template = (
        "{% set x = 1 %}{% generation %}{{ messages[0].role }}{{ x }}{{ a.b['c'] }}{% endgeneration %}{{ tools }}"
    )
    assert variables(template) == {"messages", "a", "tools"}
    assert names(template) == {"role", "b", "c"}


def test_a_template_for_tools_is_theirs_alone() -> None:
    both = {"default": "A", "tool_use": "B"}
    assert [choose(both, tools) for tools in (False, True)] == ["A", "B"]
    assert choose({"default": "A"}, True) == choose(both | {"tool_use": "A"}, True) == "A"
    with pytest.raises(ValueError, match="none is named default: a, rag"):
        choose({"rag": "A", "a": "B"}, True)
