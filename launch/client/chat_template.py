"""Chat templates: rendering, as transformers does it, and which variables and fields a template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Const, Getattr, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CUT = "CONTINUE_FINAL_MESSAGE_TAG "  # appended to the message that the answer continues, to find its end


class _Generation(Extension):
    """transformers' block `{% generation %}`, which marks assistant text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> Any:
        return caller()


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's filter would escape HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)
ENVIRONMENT.filters["tojson"] = _to_json
ENVIRONMENT.globals["raise_exception"] = _raise
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


@lru_cache
def _compiled(template: str) -> Template:
    return ENVIRONMENT.from_string(template)


@lru_cache
def variables(template: str) -> frozenset[str]:
    """Finds the variables that a chat template reads."""
    return frozenset(find_undeclared_variables(ENVIRONMENT.parse(template)))


@lru_cache
def names(template: str) -> frozenset[str]:
    """Finds all attribute names and string constants in a chat template."""
    tree = ENVIRONMENT.parse(template)
    texts = {const.value for const in tree.find_all(Const) if isinstance(const.value, str)}
    return frozenset(texts | {found.attr for found in tree.find_all(Getattr)})


def choose(templates: Mapping[str, str], tools: bool) -> str:
    """Selects the template for a conversation with or without tools.

    Raises:
        ValueError: there are several, and none is named default.
    """
    if tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        raise ValueError(f"there are several templates and none is named default: {', '.join(sorted(templates))}")
    return templates["default"]


def render(template: str, messages: list[dict[str, Any]], continues: bool, given: Mapping[str, Any]) -> str:
    """Renders a conversation.

    Args:
        continues: whether to end the text within the last message, for the answer to continue it.
        given: other template variables.

    Raises:
        ValueError: the continued message does not appear in the rendered text.
        Exception: templates are programs and may raise anything.
    """
    compiled = _compiled(template)
    if not continues:
        return compiled.render(messages=messages, **given)
    last = messages[-1].get("content")
    if last is None:
        raise ValueError('continue_final_message is set but the final message has no "content" to continue!')
    if "content" not in template:
        raise ValueError(
            'continue_final_message is set to "content" but this is not an accepted field in the chat_template'
        )
    marked = [*messages[:-1], messages[-1] | {"content": last + CUT}]
    text = compiled.render(messages=marked, **given)
    if last.strip() not in text or CUT.strip() not in text:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat "
            "template! This can happen if the chat template deletes portions of the final message. Please verify the "
            "chat template and final message in your chat to ensure they are compatible."
            f"Final message to continue: {last.strip()}\nRendered chat:\n{text}"
        )
    end = text.rindex(CUT.strip())
    # If the template trims messages, it would also have trimmed the message's trailing spaces.
    return text[:end] if text.startswith(CUT, end) else text[:end].rstrip()
