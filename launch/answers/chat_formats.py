"""Formats in which model families write reasoning and tool calls, as data, and a parser of chat answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.answers.answer_reader import CALLS, AnswerReader, Event
from launch.answers.arguments import read_arguments
from launch.answers.call_bodies import SPACE, json_values

AT_ONCE = r"(?=[\s\S])"  # closes a region at once, for marks without content
JSON = {"content": "json"}
THINKING_FIELD = "thinking"  # fields of a response template
TEXTS = ("content", "unnamed")
LINE_BREAKS = r"\n{0,2}"  # after reasoning

THINK_MARKS = ("<think>", "</think>", "\n\n")
CLOSE_THINK = ("<think>", "</think>", "")


@dataclass(frozen=True)
class ToolCallFormat:
    """A chat format's syntax of tool calls, for answers that must be calls.

    Attributes:
        call: one call, with NAME, ARGUMENTS and, if calls are numbered, INDEX.
        before, after: texts around all calls.
        between: text between two calls; None allows only one call.
        argument: one argument, with KEY and VALUE, and KIND where it says whether the value is text; None: ARGUMENTS
            is one value.
        separator: text between two arguments.
        values: how values are written: `text` without quotes where the schema allows text, `json`, or `gemma`.
    """

    call: str
    before: str = ""
    after: str = ""
    between: str | None = None
    argument: str | None = None
    separator: str = ""
    values: str = "json"


@dataclass(frozen=True)
class ChatFormat:
    """A model family's syntax of messages.

    Attributes:
        marks: texts that all of its chat templates contain.
        fields: of a response template, for `AnswerReader`: content, thinking, tool_calls.
        anchors: texts of a prompt after which the assistant's turn begins.
        calls: syntax of tool calls; None if there is none.
        thinking_marks: marks around reasoning before the answer, and the text after it; None: no reasoning.
        content_prefix: text before an answer's content.
        excluded: texts that none of its chat templates contains.
        model_types: families, by `model_type` of their configs, that use it.
    """

    name: str
    marks: tuple[str, ...]
    fields: dict[str, Any]
    anchors: tuple[str, ...] = ()
    calls: ToolCallFormat | None = None
    thinking_marks: tuple[str, str, str] | None = None
    content_prefix: str = ""
    excluded: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()


def _format(
    name: str,
    marks: tuple[str, ...],
    anchors: tuple[str, ...],
    reads: dict[str, Any] | None = None,
    calls: ToolCallFormat | None = None,
    thinking: tuple[str, str, str] | None = None,
    in_thought: bool = False,
    **more: Any,
) -> ChatFormat:
    """Makes a format.

    Args:
        reads: the field of calls.
        in_thought: whether a complete head of a call ends reasoning that is still open.
    """
    fields: dict[str, Any] = {"content": {}}
    if thinking is not None:
        fields[THINKING_FIELD] = {"open": thinking[0], "close": thinking[1]}
        if thinking[1].endswith(":"):  # words, which a space follows
            fields[THINKING_FIELD]["after_pattern"] = r"\s{0,2}"
        if in_thought and reads is not None:
            fields[THINKING_FIELD]["ahead"] = reads["open_pattern"]
    if reads is not None:
        fields[CALLS] = reads
    return ChatFormat(name, marks, fields, anchors, calls, thinking, **more)


def _tags(
    name: str,
    marks: tuple[str, ...],
    anchors: tuple[str, ...],
    calls: ToolCallFormat,
    thinking: tuple[str, str, str],
    wrapper: tuple[str, str] = ("", ""),
    **more: Any,
) -> ChatFormat:
    """Makes a format whose arguments are written one by one between tags, from the syntax of its calls.

    Args:
        wrapper: marks around a call or around all calls, which models may leave out; those of `calls` are wrappers too.
    """
    before, after = calls.before.strip() or wrapper[0], calls.after.strip() or wrapper[1]
    head, close = (text.strip() for text in calls.call.split("ARGUMENTS"))
    head, close = head.removeprefix(wrapper[0]).strip(), close.removesuffix(wrapper[1]).strip()
    key_open, key_close, value_close = re.split("KEY|VALUE", calls.argument or "")
    kind = re.escape(' string="KIND"')
    key_end = _loose(key_close.strip()).replace(kind, '(?: string="(?P<kind>true|false)")?')
    argument = rf"{_loose(key_open.strip())}(?P<key>[^\n]{{1,256}}?){key_end}"
    opens = _loose(head).replace("NAME", r'(?P<name>[^\s<>"]{1,256})')
    opens += rf"(?={SPACE}(?:{argument}|{_loose(close)}))"
    reads = {
        "open_pattern": (rf"(?:{_loose(before)}{SPACE})?" if before else "") + opens,
        "close_pattern": _loose(close),
        "content": "tags",
        "argument_pattern": argument,
        "argument_end": value_close.strip(),
        "trims": key_close.endswith("\n") and value_close.startswith("\n"),
    }
    reads |= {"after_pattern": _loose(after)} if after else {}
    calls = replace(calls, values="text")
    return _format(name, marks, anchors, reads, calls, thinking, in_thought=True, **more)


def _loose(text: str) -> str:
    """Returns a pattern of marks with any space between them."""
    tags = re.split(r"\s*\n\s*|(?<=>)(?=<)", text)
    return SPACE.join(map(re.escape, tags))


def _hy3(suffix: str) -> ChatFormat:
    """Returns Hy3's format; all of its marks end with a suffix of the tokenizer's, such as `:opensource`."""

    def marks(text: str) -> str:
        return re.sub(r"(</?\w+)>", rf"\1{suffix}>", text)

    calls = ToolCallFormat(
        marks("<tool_call>NAME<tool_sep>\nARGUMENTS</tool_call>\n"),
        before=marks("<tool_calls>\n"),
        after=marks("</tool_calls>"),
        between="",
        argument=marks("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
    )
    thinking = (marks("<think>"), marks("</think>"), "")
    anchor = f"<｜hy_Assistant{suffix}｜>"
    return _tags("hy3", ("<tool_sep", "<tool_calls"), (anchor,), calls, thinking, model_types=("hy_v3",))


HY3_SUFFIX = re.compile(r"<tool_calls(:[\w-]+)?>")
CHATML = ("<|im_start|>assistant\n",)
GLM_MARKS = ("<tool_call>", "<arg_key>", "<arg_value>")
MISTRAL_CALLS = {
    "open_pattern": rf"\[TOOL_CALLS\]{SPACE}(?:(?P<name>[\w.:-]{{1,256}})(?:\[CALL_ID\]\w{{1,64}})?"
    rf"(?:\[ARGS\]{SPACE}|{SPACE}(?=\{{))|(?=\[(?!TOOL_CALLS)))",
    **JSON,
}
MISTRAL_ANCHORS = ("[/INST]", "[/TOOL_RESULTS]")
DEEPSEEK_ANCHORS = ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")
# The first format that fits a chat template applies, unless the template writes calls that another one reads.
CHAT_FORMATS = (
    ChatFormat(
        "gpt-oss",
        ("<|channel|>", "<|start|>"),
        {
            "content": {},  # text outside of messages
            "thinking": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? ?"
                r"to=(?:functions\.)?(?P<name>[\w.:-]+)(?:<\|channel\|>\w+)?"
                r" ?(?:<\|constrain\|>)?\w*<\|message\|>",
                "close": "<|call|>",
                **JSON,
            },
            # Messages of other channels; of fields whose marks match the same text, the first by name wins.
            "unnamed": {
                "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?"
                r"<\|message\|>",
                "close_pattern": r"<\|end\|>|<\|return\|>|<\|call\|>",
            },
            "nothing": {  # the head of a truncated message
                "open_pattern": r"<\|start\|>(?:assistant)?(?:<\|channel\|>[^<]*)?\Z|<\|channel\|>[^<]*\Z",
                "close_pattern": AT_ONCE,
            },
        },
        ("<|start|>assistant",),
        ToolCallFormat("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"),
        ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        "<|channel|>final<|message|>",
        model_types=("gpt_oss",),
    ),
    _tags(
        "deepseek-v3.2",
        ("｜DSML｜function_calls",),
        ("<｜Assistant｜>", "</function_results>\n\n"),
        ToolCallFormat(
            '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>\n',
            before="<｜DSML｜function_calls>\n",
            after="</｜DSML｜function_calls>",
            between="",
            argument='<｜DSML｜parameter name="KEY" string="KIND">VALUE</｜DSML｜parameter>\n',
        ),
        CLOSE_THINK,
        model_types=("deepseek_v32",),
    ),
    _format(
        "gemma4",
        ("<|tool_call>call:",),
        ("<|turn>model\n", "<tool_response|>"),
        {
            "open_pattern": r'<\|tool_call>call:(?P<name>[^\s{}<>"]{1,256})(?=\s{0,64}\{)',
            "close": "<tool_call|>",
            "content": "gemma",
        },
        ToolCallFormat("<|tool_call>call:NAMEARGUMENTS<tool_call|>", between="", values="gemma"),
        ("<|channel>thought\n", "<channel|>", ""),
        model_types=("gemma4", "gemma4_text"),
    ),
    _format(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        ("<|im_assistant|>assistant<|im_middle|>",),
        {
            "open_pattern": rf"(?:<\|tool_calls_section_begin\|>{SPACE})?<\|tool_call_begin\|>{SPACE}"
            rf"(?P<id>(?:functions\.)?(?P<name>[^\s<>\"]{{1,256}}?)(?::\d{{1,9}})?){SPACE}<\|tool_call_argument_begin\|>",
            "close": "<|tool_call_end|>",
            "after_pattern": r"<\|tool_calls_section_end\|>",
            **JSON,
        },
        ToolCallFormat(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
            before="<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
            between="",
        ),
        CLOSE_THINK,
        in_thought=True,
        model_types=("kimi_k2", "kimi_k25"),
    ),
    _tags(
        "minimax",
        ("<minimax:tool_call>",),
        ("]~b]ai\n",),
        ToolCallFormat(
            '<invoke name="NAME">\nARGUMENTS</invoke>\n',
            before="<minimax:tool_call>\n",
            after="</minimax:tool_call>",
            between="",
            argument='<parameter name="KEY">VALUE</parameter>\n',
        ),
        THINK_MARKS,
        excluded=("]<]minimax[>[",),
        model_types=("minimax_m2",),
    ),
    _tags(
        "seed",
        ("<seed:tool_call>",),
        ("<seed:bos>assistant\n",),
        ToolCallFormat(
            "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
            between="\n",
            argument="<parameter=KEY>VALUE</parameter>\n",
        ),
        ("<seed:think>", "</seed:think>", "\n"),
        ("<seed:tool_call>", "</seed:tool_call>"),
        model_types=("seed_oss",),
    ),
    _hy3(""),
    _tags(
        "glm",
        GLM_MARKS,
        ("<|assistant|>",),
        ToolCallFormat(
            "<tool_call>NAMEARGUMENTS</tool_call>",
            between="",
            argument="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        ),
        CLOSE_THINK,
        excluded=("<tool_sep", "{function-name}\n<arg_key>"),
        model_types=("glm_moe_dsa", "glm4_moe", "glm4_moe_lite"),
    ),
    _tags(
        "glm-4.5",
        GLM_MARKS,
        ("<|assistant|>",),
        ToolCallFormat(
            "<tool_call>NAME\nARGUMENTS</tool_call>",
            between="\n",
            argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
        ("<think>", "</think>", "\n"),
        excluded=("<tool_sep",),
    ),
    _tags(
        "qwen3-coder",
        ("<tool_call>", "<function="),
        CHATML,
        ToolCallFormat(
            "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
            between="\n",
            argument="<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
        THINK_MARKS,
        ("<tool_call>", "</tool_call>"),
        model_types=("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h"),
    ),
    _format(
        "nemotron-list",
        ("<TOOLCALL>",),
        ("Assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        {"open_pattern": rf"<TOOLCALL>(?={SPACE}\[)", "close": "</TOOLCALL>", **JSON},
        ToolCallFormat(
            '{"name": "NAME", "arguments": ARGUMENTS}', before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"
        ),
        THINK_MARKS,
    ),
    _format(
        "qwen",
        ("<tool_call>", "arguments"),
        CHATML,
        {"open_pattern": rf"<tool_call>(?={SPACE}[\[{{])", "close": "</tool_call>", **JSON},
        ToolCallFormat('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n"),
        THINK_MARKS,
        excluded=("<arg_key>", "<function="),
        model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    ),
    _format(
        "granite",
        ("<|tool_call|>", "<|start_of_role|>"),
        ("<|start_of_role|>assistant<|end_of_role|>",),
        {"open_pattern": rf"(?:<\|tool_call\|>|<tool_call>){SPACE}(?=\[)", **JSON},
        ToolCallFormat('{"name": "NAME", "arguments": ARGUMENTS}', before="<|tool_call|>[", between=", ", after="]"),
        ("Here is my thought process:", "Here is my response:", "\n\n"),
        model_types=("granite", "granitemoe"),
    ),
    _format(
        "phi4",
        ("<|tool|>", "<|/tool|>"),
        ("<|assistant|>",),
        {
            "open_pattern": rf"<\|tool_call\|>{SPACE}(?=[\[{{])|\bfunctools(?=\[)",
            "close": "<|/tool_call|>",
            **JSON,
        },
        ToolCallFormat(
            '{"name": "NAME", "arguments": ARGUMENTS}',
            before="<|tool_call|>[",
            between=", ",
            after="]<|/tool_call|>",
        ),
        model_types=("phi3",),
    ),
    _format(
        "pythonic",
        ("<function_calls>", "<functions>"),
        CHATML,
        {
            "open_pattern": rf"<function_calls>(?={SPACE}[\w.:-]{{1,256}}\()",
            "close": "</function_calls>",
            "content": "python",
        },
        ToolCallFormat(
            "NAME(ARGUMENTS)",
            before="<function_calls>",
            between="\n",
            after="</function_calls>",
            argument="KEY=VALUE",
            separator=", ",
        ),
        THINK_MARKS,
        model_types=("olmo3",),
    ),
    _format(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        MISTRAL_ANCHORS,
        MISTRAL_CALLS,
        ToolCallFormat("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between=""),
        ("[THINK]", "[/THINK]", ""),
        model_types=("mistral3", "ministral3"),
    ),
    _format(
        "mistral-list",
        ("[TOOL_CALLS]",),
        MISTRAL_ANCHORS,
        MISTRAL_CALLS,
        ToolCallFormat('{"name": "NAME", "arguments": ARGUMENTS}', before="[TOOL_CALLS] [", between=", ", after="]"),
        model_types=("mistral", "mixtral"),
    ),
    _format(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "thinking"),
        DEEPSEEK_ANCHORS,
        {
            "open_pattern": rf"(?:<｜tool▁calls▁begin｜>)?{SPACE}<｜tool▁call▁begin｜>"
            r"(?P<name>[^<\n]{1,256}?)<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "after_pattern": "<｜tool▁calls▁end｜>",
            **JSON,
        },
        ToolCallFormat(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            between="",
            after="<｜tool▁calls▁end｜>",
        ),
        CLOSE_THINK,
    ),
    _format(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        DEEPSEEK_ANCHORS,
        {
            "open_pattern": rf"(?:<｜tool▁calls▁begin｜>)?{SPACE}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            r"(?P<name>[^\n]{1,256})\n```json\n",
            "close_pattern": rf"(?:\n?```{SPACE})?<｜tool▁call▁end｜>",
            "after_pattern": "<｜tool▁calls▁end｜>",
            **JSON,
        },
        ToolCallFormat(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            between="\n",
            after="<｜tool▁calls▁end｜>",
        ),
        THINK_MARKS,
        model_types=("deepseek_v3",),
    ),
    _format(
        "llama3",
        ("<|start_header_id|>", "ipython"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        {"open_pattern": rf"\A{SPACE}(?:<\|python_tag\|>)?(?={SPACE}\{{)", **JSON},
        ToolCallFormat('{"name": "NAME", "parameters": ARGUMENTS}'),
        model_types=("llama",),
    ),
    _format("thinking", ("<think>",), (), thinking=CLOSE_THINK),
)


# For models without a known syntax of calls, as in vLLM: only a function's arguments, or a list of calls.
ARGUMENTS_ALONE = ToolCallFormat("ARGUMENTS")
LIST_OF_CALLS = ToolCallFormat('{"name": "NAME", "parameters": ARGUMENTS}', before="[", between=", ", after="]")


def find_chat_format(template: str) -> ChatFormat | None:
    """Returns the format whose marks a chat template has; None if there is none."""
    return next((found for found in CHAT_FORMATS if has_marks(found, template)), None)


def has_marks(chat_format: ChatFormat, template: str) -> bool:
    """Returns whether a chat template has the marks of a format, and none that it excludes."""
    return all(mark in template for mark in chat_format.marks) and not any(
        mark in template for mark in chat_format.excluded
    )


def adapted(chat_format: ChatFormat, texts: str) -> ChatFormat:
    """Returns a format with the marks of a tokenizer.

    Args:
        texts: the chat template and the tokenizer's added tokens.
    """
    suffix = HY3_SUFFIX.search(texts)
    return _hy3(suffix[1] or "") if chat_format.name == "hy3" and suffix is not None else chat_format


def required_call_format(chat_format: ChatFormat | None, named: bool) -> ChatFormat:
    """Returns the format of an answer that must be calls: the model's, or plain JSON if the model's has no calls.

    Args:
        named: whether the request names the function.
    """
    if chat_format is not None and chat_format.calls is not None:
        return chat_format
    return replace(chat_format or ChatFormat("plain", (), {}), calls=ARGUMENTS_ALONE if named else LIST_OF_CALLS)


def assistant_turn(chat_format: ChatFormat, prompt: str, continued: str | None = None) -> str:
    """Returns the end of a prompt that belongs to the assistant's turn.

    Args:
        continued: the message that the answer continues; None: the answer starts a message.
    """
    begin = max((prompt.rfind(anchor) + len(anchor) for anchor in chat_format.anchors if anchor in prompt), default=-1)
    said = (continued or "").strip()
    if said and said in prompt and not (begin >= 0 and said in prompt[begin:]):  # the message may contain the anchor
        return prompt[prompt.rindex(said) :]
    if begin >= 0:
        return prompt[begin:]
    # Without an anchor, a prompt ends at most with marks that open or close reasoning; earlier text may be a user's.
    thought = chat_format.fields.get(THINKING_FIELD, {})
    if "open" not in thought:
        return ""
    opens, closes = re.escape(thought["open"].strip()), re.escape(thought["close"])
    turn_begun = re.search(rf"(?:{opens}\s*(?:{closes})?|{closes})?\s*\Z", prompt)
    return turn_begun[0] if turn_begun else ""


@dataclass
class AnswerPart:
    """A part of an answer: `kind` is content, thinking or call; the `text` of a call is its complete arguments."""

    kind: str
    text: str
    name: str = ""
    id: str = ""


class Parser:
    """Incremental parser of one answer's text.

    Args:
        fields: of the chat format; None: all text is content.
        turn: the end of the prompt from `assistant_turn`.
        tools: callable tools in OpenAI's format; without any, calls are content.
        many: whether several calls are allowed; if not, text after the first call is dropped.

    Attributes:
        calls: number of tool calls so far.
    """

    def __init__(
        self, fields: Mapping[str, Any] | None, turn: str, tools: Sequence[Mapping[str, Any]], many: bool = True
    ) -> None:
        self.calls = 0
        self._allow_several = many
        self._reader: AnswerReader | None = None
        self._functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._written = False  # whether arguments are written one by one, as text or as JSON
        self._kind = ""  # kind of the last part
        self._spaces, self._spaced = "", ""  # held back trailing spaces, and the kind of the text that they follow
        self._held = 0  # characters of the turn that may begin a mark: the reader returns them with the answer's first
        if fields is not None:
            self._written = "argument_pattern" in fields.get(CALLS, {})
            fields = _markup(fields, bool(tools))
            self._reader = AnswerReader(fields, turn)
            self._parts(self._reader.turn_events)
            self.calls, self._spaces = 0, ""  # spaces after the prompt belong to the answer
            held = AnswerReader(fields, turn).end(False)
            self._held = sum(len(event.text) for event in held if event.kind == "text")

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must include special tokens, which mark parts of the answer."""
        return self._reader is not None

    @property
    def is_complete(self) -> bool:
        return self.calls > 0 and not self._allow_several

    def feed(self, text: str) -> list[AnswerPart]:
        if self._reader is None:
            return [AnswerPart("content", text)] if text else []
        return self._parts(self._reader.feed(text))

    def finish(self, cut: bool = False) -> list[AnswerPart]:
        """Returns the parts that were held back.

        Args:
            cut: whether the answer was cut off: an unclosed call is then text.
        """
        if self._reader is None:
            return []
        parts = self._parts(self._reader.end(cut))
        if self._spaces and self._spaced == "content" and self._kind != "call" and not self.is_complete:
            parts.append(AnswerPart("content", self._spaces))
        return parts

    def _parts(self, events: Sequence[Event]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            if self.is_complete:
                break
            kind = "content" if event.field in TEXTS else event.field
            if event.kind != "text":
                self._held = 0
                parts += self._call_parts(event) if (event.kind, kind) == ("close", CALLS) else []
            elif kind in ("content", THINKING_FIELD):
                held, self._held = self._held, max(0, self._held - len(event.text))
                parts += self._text_part(kind, event.text[held:])
        return parts

    def _text_part(self, kind: str, text: str) -> list[AnswerPart]:
        """Returns text as a part; holds back trailing spaces: markup if a call or the end of reasoning follows."""
        if kind != self._spaced:
            self._spaces, self._spaced = "", kind
        if kind != self._kind and (kind == THINKING_FIELD or self._kind == "call"):
            text = text.lstrip()
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if not kept:
            return []
        self._kind = kind
        return [AnswerPart(kind, kept)]

    def _call_parts(self, event: Event) -> list[AnswerPart]:
        value = event.value
        found = value if isinstance(value, list) else [value]
        calls = [_function(self._typed(one)) for one in found]
        # Without a mark that starts a call, the name of a tool identifies it.
        known = event.head.strip() or all(call is not None and call[0] in self._functions for call in calls)
        if not calls or None in calls or not known:  # not a call
            return self._text_part("content", event.text)
        calls = calls if self._allow_several else calls[:1]
        self._kind, self._spaces = "call", ""
        self.calls += len(calls)
        return [_call_part(*call, event.call_id) for call in filter(None, calls)]

    def _typed(self, call: Any) -> Any:
        function = call.get("function") if self._written and isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            parameters = self._functions.get(str(function.get("name")))
            function["arguments"] = read_arguments(function["arguments"], parameters)
        return call


class JsonCallParser(Parser):
    """Parser of an answer that is calls in plain JSON after optional reasoning; returns the calls at the end.

    Args:
        fields: of the chat format, for reasoning.
        function: the function whose arguments the answer is; None: the answer is a list of calls.
    """

    def __init__(self, fields: Mapping[str, Any] | None, turn: str, function: str | None) -> None:
        super().__init__(fields, turn, [])
        self._function = function
        self._content = ""

    def feed(self, text: str) -> list[AnswerPart]:
        return self._thinking_parts(super().feed(text))

    def finish(self, cut: bool = False) -> list[AnswerPart]:
        parts, text = self._thinking_parts(super().finish(cut)), self._content.strip()
        if self._function is not None:
            values, end = json_values(text, 0, "")
            calls = [(self._function, text[:end])] if values else []
        else:
            values, end = json_values(text, len(LIST_OF_CALLS.before), LIST_OF_CALLS.between or "")
            calls = [*filter(None, map(_function, values))]
        self.calls = len(calls)
        rest = text[end if calls else 0 :].removeprefix(LIST_OF_CALLS.between or "")
        if rest not in ("", LIST_OF_CALLS.after):  # cut off within a call
            parts.append(AnswerPart("content", rest))
        return [*parts, *(_call_part(*call) for call in calls)]

    def _thinking_parts(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._content += "".join(part.text for part in parts if part.kind == "content")
        return [part for part in parts if part.kind != "content"]


def _markup(given: Mapping[str, Any], tools: bool) -> dict[str, Any]:
    """Adapts the fields of a format for a reader: reasoning begins the answer, and its end includes line breaks."""
    fields = {name: field for name, field in given.items() if tools or name != CALLS}
    if "open" not in (thought := fields.get(THINKING_FIELD, {})):
        return fields
    close = re.escape(thought["close"])
    ahead = f"|(?={thought['ahead']})" if tools and "ahead" in thought else ""
    fields[THINKING_FIELD] = {
        "open_pattern": rf"\A{SPACE}{re.escape(thought['open'])}",
        "close_pattern": rf"{close}{thought.get('after_pattern', LINE_BREAKS)}{ahead}",
    }
    # Some models close reasoning again that the prompt has closed.
    return fields | {
        "closed": {"open_pattern": rf"\A{SPACE}{close}{LINE_BREAKS}", "close_pattern": AT_ONCE, "blank": True}
    }


def _call_part(name: str, arguments: str, call_id: str | None = None) -> AnswerPart:
    return AnswerPart("call", arguments, name, call_id or f"call_{uuid.uuid4().hex[:24]}")


def _function(value: Any) -> tuple[str, str] | None:
    """Returns name and JSON arguments of a call; None if it is not a call."""
    if not isinstance(value, dict):
        return None
    function = inner if isinstance(inner := value.get("function"), dict) else value
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(function.get("name"), str) or arguments is None:
        return None
    if isinstance(arguments, str):
        return function["name"], arguments
    try:
        return function["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number too large was parsed as infinity
        return None
