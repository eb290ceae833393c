"""Fits conversations to a chat template.

Templates differ in the ids, calls, results, reasoning and roles that they read, and raise or drop what they do not
read. `find_history_format` finds out by rendering short conversations; `fit` then applies the same form to every
request, so that a longer conversation keeps its prefix.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from launch.client.chat_template import names, render, variables

Message = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names for the reasoning of earlier answers
THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables that switch reasoning on and off
EFFORT_VARIABLES = ("reasoning_effort", *THINKING_SWITCHES)  # variables that an effort sets
TOOL_VARIABLES = ("tools", "xml_tools")  # for tools; SmolLM3's `xml_tools` takes functions without their type
SYSTEM_FIELDS = ("system.tools", "system.functions")  # of the system message, for templates without such a variable
# What begins, separates and ends calls that are part of the text, for templates that render none.
TAGGED_CALLS = ("\n<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")  # SmolLM3's
CALL_MARKS = ("<|tool_call|>", "<|/tool_call|>")  # around a list, if the tokenizer has them: Phi-4-mini's, Granite 3's
REASONING_PART = "part"  # Mistral's reasoning: a part of the content


def _nine_characters(given: str, name: str, number: int) -> str:
    """Mistral's ids: nine letters and digits."""
    digest = hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()
    return given if re.fullmatch("[A-Za-z0-9]{9}", given) else digest[:9]


def _numbered_function(given: str, name: str, number: int) -> str:
    """Kimi's ids, in which the model reads the function's name."""
    known = not name or re.fullmatch(rf"functions\.{re.escape(name)}:\d+", given)
    return given if known else f"functions.{name}:{number}"


# From the client's id, the function, and the number of the call in the conversation, to the id for the template. A
# result of no call has no function.
ID_FORMS: dict[str, Callable[[str, str, int], str]] = {
    "given": lambda given, name, number: given,
    "nine characters": _nine_characters,
    "numbered function": _numbered_function,
}


@dataclass(frozen=True)
class HistoryFormat:
    """What a chat template reads.

    Attributes:
        tools: where: a variable, a field of the system message that has them as JSON, or empty.
        completes_tools: whether tools need a description and parameters.
        ids: form of call ids, see `ID_FORMS`.
        text_arguments: whether arguments are JSON text, not objects.
        raw_arguments: whether the template writes arguments that are text as they are.
        no_text: content of a message that has only calls: absent, None or empty.
        results: role of a result; `tool_responses`: a field of the message with the calls.
        names_results: whether results need the function's name.
        several_calls: whether a message may have several calls.
        calls_in_text: what begins, separates and ends calls if they must be part of the text.
        splits_text: whether text next to calls must be a message before them.
        drops_text: whether there is no place for text next to calls.
        reasoning: the field for reasoning, or `REASONING_PART`.
        merges_reasoning: whether text next to a call must be part of the reasoning.
        system: whether there is a system role.
        late_system: whether a system message may come after another message.
        user_after_user, user_after_result: whether a user's message may come there.
    """

    tools: str = "tools"
    completes_tools: bool = False
    ids: str = "given"
    text_arguments: bool = False
    raw_arguments: bool = False
    no_text: str | None = "absent"
    results: str = "tool"
    names_results: bool = False
    several_calls: bool = True
    calls_in_text: tuple[str, ...] | None = None
    splits_text: bool = False
    drops_text: bool = False
    reasoning: str = REASONING_FIELDS[0]
    merges_reasoning: bool = False
    system: bool = True
    late_system: bool = True
    user_after_user: bool = True
    user_after_result: bool = True

    @property
    def result_role(self) -> str:
        return "tool" if self.results == "tool_responses" else self.results


def fit(
    messages: Iterable[Message], tools: Sequence[Message] | None, form: HistoryFormat
) -> tuple[list[Message], dict[str, Any]]:
    """Converts a conversation and tools to what a template reads.

    Args:
        messages: content is a text, arguments are objects, or text that is no JSON object; not modified.

    Returns:
        The messages, and the variables of tools.
    """
    given = [_complete_tool(tool) if form.completes_tools else tool for tool in tools or ()]
    fitted = _place_roles(_fit_calls([_with_reasoning(message, form) for message in messages], form), form)
    if given and form.tools in SYSTEM_FIELDS:
        if not fitted or fitted[0]["role"] != "system":
            fitted.insert(0, {"role": "system", "content": ""})
        fitted[0] = fitted[0] | {form.tools.removeprefix("system."): _json([tool["function"] for tool in given])}
    tool_variables: dict[str, Any] = {"tools": None}
    if given and form.tools in TOOL_VARIABLES:
        tool_variables[form.tools] = given if form.tools == "tools" else [tool["function"] for tool in given]
    return fitted, tool_variables


def _complete_tool(tool: Message) -> Message:
    function = {"description": ""} | tool["function"]
    parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
    return tool | {"function": function | {"parameters": parameters}}


def _with_reasoning(message: Message, form: HistoryFormat) -> Message:
    """Renames the reasoning, drops an empty list of calls, and completes the text."""
    reasoning = next((text for name in REASONING_FIELDS if isinstance(text := message.get(name), str) and text), None)
    plain = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)  # templates that test for its presence would skip the text
        plain["content"] = plain.get("content") or ""
    if reasoning is None:
        return plain
    if form.merges_reasoning and "tool_calls" in plain and plain.get("content"):
        plain["content"], reasoning = None, f"{reasoning}\n\n{plain['content']}"
    if form.reasoning == REASONING_PART:
        parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": plain.get("content") or ""}]
        return plain | {"content": [part for part in parts if part.get("text") != ""]}
    return plain | {form.reasoning: reasoning}


def _fit_calls(messages: list[Message], form: HistoryFormat) -> Iterator[Message]:
    """Fits calls, and puts their results into the same order; one without a known id answers the next call."""
    number, at = 0, 0
    known: dict[str, Message] = {}  # calls by the client's id
    while at < len(messages):
        message, at = messages[at], at + 1
        if message["role"] == "tool":
            yield _fit_result(message, known.get(message.get("tool_call_id", "")), form)
            continue
        if "tool_calls" not in message:
            yield message
            continue
        given = [call.get("id") or f"call_{number + i}" for i, call in enumerate(message["tool_calls"])]
        calls = [
            call | {"id": ID_FORMS[form.ids](given[i], call["function"]["name"], number + i)}
            for i, call in enumerate(message["tool_calls"])
        ]
        known |= zip(given, calls, strict=True)
        number += len(calls)
        results: dict[int, Message] = {}  # by call
        while at < len(messages) and messages[at]["role"] == "tool":
            like = [i for i, one in enumerate(given) if one == messages[at].get("tool_call_id")]
            free = [i for i in like or range(len(calls)) if i not in results]
            if not free:
                break
            results[free[0]] = _fit_result(messages[at], calls[free[0]], form)
            at += 1
        for group in [range(len(calls))] if form.several_calls else [range(i, i + 1) for i in range(len(calls))]:
            found = [results[i] for i in group if i in results]
            yield from _exchange(message, [calls[i] for i in group], found, form)
            message = {"role": message["role"]}


def _fit_result(result: Message, call: Message | None, form: HistoryFormat) -> Message:
    if call is None:
        own = {"tool_call_id": ID_FORMS[form.ids](result.get("tool_call_id") or "", "", 0)}
    else:
        own = {"tool_call_id": call["id"]} | ({"name": call["function"]["name"]} if form.names_results else {})
    return result | own | {"role": form.result_role}


def _exchange(message: Message, calls: list[Message], results: list[Message], form: HistoryFormat) -> Iterator[Message]:
    """Yields a message with calls, and their results."""
    text = message.get("content") or ""
    message = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    functions = [
        call["function"] | {"arguments": _fit_arguments(call["function"]["arguments"], form)} for call in calls
    ]
    if form.calls_in_text is not None:
        begin, between, end = form.calls_in_text
        named = (_json({name: function[name] for name in ("name", "arguments")}) for function in functions)
        yield message | {"content": f"{text}{begin if text else begin.lstrip()}{between.join(named)}{end}"}
        yield from results
        return
    if form.drops_text:
        text = ""
    if text and form.splits_text:
        yield message | {"content": text}
        text, message = "", {"role": message["role"]}
    if text or form.no_text != "absent":
        message["content"] = text or form.no_text
    message["tool_calls"] = [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
    if results and form.results == "tool_responses":
        message["tool_responses"] = [{"name": result["name"], "response": result["content"]} for result in results]
        results = []
    yield message
    yield from results


def _fit_arguments(arguments: Any, form: HistoryFormat) -> Any:
    """Returns a call's arguments; other text than a JSON object is given as it is, or as a field of an object."""
    if isinstance(arguments, str):
        if form.raw_arguments:
            return arguments
        arguments = {"arguments": arguments}
    return _json(arguments) if form.text_arguments else arguments


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _place_roles(messages: Iterable[Message], form: HistoryFormat) -> list[Message]:
    """Puts system and user messages where the template allows them.

    System messages at the beginning become one. A later one becomes part of the text before it: in the first message
    it would change the prefix of all that follows.
    """
    placed: list[Message] = []
    for message in messages:
        role, last = message["role"], placed[-1]["role"] if placed else ""
        if role == "system" and not (form.system and (form.late_system or not placed)):
            joins = last in ("system", "user", form.result_role)
            message = message | {"role": "user"}
        else:
            joins = role == "user" and (
                (last == "user" and not form.user_after_user)
                or (last == form.result_role and not form.user_after_result)
            )
        if joins:
            before = placed[-1]["content"]
            placed[-1] = placed[-1] | {"content": f"{before}\n\n{message['content']}" if before else message["content"]}
        else:
            placed.append(message)
    return placed


# ---- what a template reads

# Texts to look for in a prompt.
SYSTEM, LATER, LATEST, ASKED, AGAIN, SAID = "sysfirst", "syslater", "syslatest", "askfirst", "askagain", "saidtext"
THOUGHT, FUNCTION, ARGUMENT, RESULT = "thoughttext", "callname", "argtext", "resulttext"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _assistant(calls: int = 0, **fields: str) -> Message:
    functions = [{"name": f"{FUNCTION}{i}", "arguments": {"a": f"{ARGUMENT}{i}"}} for i in range(calls)]
    made = [{"id": f"call_{i}0123456789", "type": "function", "function": one} for i, one in enumerate(functions)]
    return {"role": "assistant"} | fields | ({"tool_calls": made} if made else {})


def _results(count: int) -> list[Message]:
    return [{"role": "tool", "tool_call_id": f"call_{i}0123456789", "content": f"{RESULT}{i}"} for i in range(count)]


EMPTY = ("absent", None, "")
RESULTS = ("tool", "environment", "tool_responses", "user")
BARE_TOOL = {"type": "function", "function": {"name": FUNCTION}}


class _Probe:
    """Renders short conversations.

    Attributes:
        tools: of all conversations.
    """

    def __init__(self, template: str, special_tokens: Iterable[tuple[str, str]]) -> None:
        self.tools: list[Message] | None = None
        self._template = template
        self._given = dict(special_tokens) | {"documents": None, "add_generation_prompt": True}
        self._given |= dict.fromkeys(THINKING_SWITCHES, True)

    def prompt(self, form: HistoryFormat, messages: list[Message]) -> str:
        """Returns the prompt; empty if the template raises, or writes arguments or parts as Python does."""
        try:
            fitted, tool_variables = fit(messages, self.tools, form)
            text = render(self._template, fitted, False, self._given | tool_variables)
        except Exception:  # templates are programs and may raise anything
            return ""
        return "" if "{'a':" in text or "{'type':" in text else text

    def count(self, form: HistoryFormat, messages: list[Message], *wanted: str) -> int:
        prompt = self.prompt(form, messages)
        return sum(text in prompt for text in wanted)

    def shows(self, form: HistoryFormat, messages: list[Message], *wanted: str) -> bool:
        return self.count(form, messages, *wanted) == len(wanted)

    def best(self, forms: Iterable[HistoryFormat], messages: list[Message], *wanted: str) -> HistoryFormat:
        """Returns the first form that shows the most texts."""
        counts: list[tuple[int, HistoryFormat]] = []
        for form in forms:
            counts.append((self.count(form, messages, *wanted), form))
            if counts[-1][0] == len(wanted):
                break
        return max(counts, key=lambda one: one[0])[1]


@lru_cache
def find_history_format(
    template: str, special_tokens: frozenset[tuple[str, str]], marks: tuple[str, ...]
) -> HistoryFormat:
    """Finds out what a template reads; what it never shows keeps its plain form.

    Args:
        special_tokens: names and texts of special tokens, variables of the template.
        marks: what begins, separates and ends calls that are part of the text.
    """
    form, probe, asked = HistoryFormat(), _Probe(template, special_tokens), _user(ASKED)
    if not probe.shows(form, [asked], ASKED):
        probe.tools = [_complete_tool(BARE_TOOL)]  # some templates are only for conversations with tools
        if not probe.shows(form, [asked], ASKED):
            return form
    known = names(template)

    always, probe.tools = probe.tools, [BARE_TOOL]
    ways = [name for name in TOOL_VARIABLES if name in variables(template)] or [*SYSTEM_FIELDS]
    forms = [replace(form, tools=way, completes_tools=more) for way, more in product(ways, (False, True))]
    form = probe.best(forms, [_system(SYSTEM), asked], FUNCTION)
    if form.tools != "tools" and not probe.shows(form, [asked], FUNCTION):
        form = replace(form, tools="")
    probe.tools = always

    turn, in_turn = [asked, _assistant(1), *_results(1)], (f"{FUNCTION}0", f"{ARGUMENT}0", f"{RESULT}0")
    if "tool_calls" not in known:
        form = replace(form, calls_in_text=marks)
    # Some templates render any role: what a template names comes first.
    results = sorted(RESULTS, key=lambda name: (name == "user", name not in known))
    forms = [
        replace(
            form, results=one, names_results=one == "tool_responses", ids=ids, text_arguments=is_text, no_text=empty
        )
        for one, ids, is_text, empty in product(results, ID_FORMS, (False, True), EMPTY)
    ]
    form = probe.best(forms, turn, *in_turn)
    with_name = replace(form, names_results=True)
    if probe.count(with_name, turn, *in_turn) and probe.prompt(with_name, turn) != probe.prompt(form, turn):
        form = with_name
    raw, as_text = replace(form, raw_arguments=True), _assistant(1)
    as_text["tool_calls"][0]["function"]["arguments"] = _json({"a": f"{ARGUMENT}0"})
    if probe.shows(form, turn, f"{ARGUMENT}0"):
        is_same = probe.prompt(raw, [asked, as_text, *_results(1)]) == probe.prompt(form, turn)
        form = replace(form, raw_arguments=is_same)
    forms = [replace(form, several_calls=several) for several in (True, False)]
    in_both = [f"{text}{i}" for text in (ARGUMENT, RESULT) for i in range(2)]
    form = probe.best(forms, [asked, _assistant(2), *_results(2)], *in_both)

    fields = sorted(REASONING_FIELDS, key=lambda name: name not in known)
    forms = [replace(form, reasoning=name) for name in (*fields, REASONING_PART)]
    form = probe.best(forms, [asked, _assistant(1, thinking=THOUGHT), *_results(1)], THOUGHT)
    forms = [replace(form, merges_reasoning=merges) for merges in (False, True)]
    form = probe.best(forms, [asked, _assistant(1, thinking=THOUGHT, content=SAID), *_results(1)], THOUGHT, SAID)
    beside = [asked, _assistant(1, content=SAID), *_results(1)]
    shown = probe.count(form, turn, *in_turn)
    if probe.count(form, beside, *in_turn, SAID) <= shown > 0:
        split, longer = replace(form, splits_text=True), [*beside, _assistant(content=LATER), _user(AGAIN)]
        splits = probe.count(split, longer, *in_turn, SAID, LATER, AGAIN) == shown + 3
        form = split if splits else replace(form, drops_text=True)

    systems = [_system(SYSTEM), _system(LATER), asked, _assistant(content=SAID), _system(LATEST), _user(AGAIN)]
    return replace(
        form,
        system=all(probe.shows(form, [_system(SYSTEM), *rest], SYSTEM, ASKED) for rest in ([asked], turn)),
        late_system=probe.shows(form, systems, SYSTEM, LATER, ASKED, LATEST, AGAIN)
        and SAID in probe.prompt(form, systems).partition(LATEST)[0]  # some move all to the beginning
        and probe.shows(form, [asked, _system(LATER), _user(AGAIN)], LATER, AGAIN),  # roles may have to alternate
        user_after_user=probe.shows(form, [asked, _user(AGAIN)], ASKED, AGAIN),
        user_after_result=probe.shows(form, [*turn, _user(AGAIN)], f"{RESULT}0", AGAIN),
    )
