"""Formats in which model families write reasoning and tool calls, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from launch.answers.answer_reader import CALLS
from launch.answers.call_bodies import SPACE

AT_ONCE = r"(?=[\s\S])"  # closes a region at once, for marks without content
JSON = {"content": "json"}
THINKING_FIELD = "thinking"  # fields of a response template

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
        openings: texts that open a call, first the one that `before` and `call` begin with; empty: text may look like a
            call.
        messages: beginnings of messages that are no calls, if the format marks all messages.
        next_message: text between two messages.
    """

    call: str
    before: str = ""
    after: str = ""
    between: str | None = None
    argument: str | None = None
    separator: str = ""
    values: str = "json"
    openings: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    next_message: str = ""


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
    calls = replace(calls, values="text", openings=tuple(filter(None, (before, head.split("NAME")[0]))))
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
    rf"(?:\[ARGS\]{SPACE}|{SPACE}(?=\{{))|(?=\[{SPACE}[{{\]]))",
    **JSON,
}
MISTRAL_ANCHORS = ("[/INST]", "[/TOOL_RESULTS]")
DEEPSEEK_ANCHORS = ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")
DEEPSEEK_OPENINGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
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
        ToolCallFormat(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
            openings=("<|channel|>",),
            messages=tuple(f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final")),
            next_message="<|end|><|start|>assistant",
        ),
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
        ToolCallFormat(
            "<|tool_call>call:NAMEARGUMENTS<tool_call|>", between="", values="gemma", openings=("<|tool_call>",)
        ),
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
            openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
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
            '{"name": "NAME", "arguments": ARGUMENTS}',
            before="<TOOLCALL>[",
            between=", ",
            after="]</TOOLCALL>",
            openings=("<TOOLCALL>",),
        ),
        THINK_MARKS,
    ),
    _format(
        "qwen",
        ("<tool_call>", "arguments"),
        CHATML,
        {"open_pattern": rf"<tool_call>(?={SPACE}[\[{{])", "close": "</tool_call>", **JSON},
        ToolCallFormat(
            '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
            between="\n",
            openings=("<tool_call>",),
        ),
        THINK_MARKS,
        excluded=("<arg_key>", "<function="),
        model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    ),
    _format(
        "granite",
        ("<|tool_call|>", "<|start_of_role|>"),
        ("<|start_of_role|>assistant<|end_of_role|>",),
        {"open_pattern": rf"(?:<\|tool_call\|>|<tool_call>){SPACE}(?=\[)", **JSON},
        ToolCallFormat(
            '{"name": "NAME", "arguments": ARGUMENTS}',
            before="<|tool_call|>[",
            between=", ",
            after="]",
            openings=("<|tool_call|>", "<tool_call>"),
        ),
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
            openings=("<|tool_call|>", "functools["),
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
            openings=("<function_calls>",),
        ),
        THINK_MARKS,
        model_types=("olmo3",),
    ),
    _format(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        MISTRAL_ANCHORS,
        MISTRAL_CALLS,
        ToolCallFormat("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between="", openings=("[TOOL_CALLS]",)),
        ("[THINK]", "[/THINK]", ""),
        model_types=("mistral3", "ministral3"),
    ),
    _format(
        "mistral-list",
        ("[TOOL_CALLS]",),
        MISTRAL_ANCHORS,
        MISTRAL_CALLS,
        ToolCallFormat(
            '{"name": "NAME", "arguments": ARGUMENTS}',
            before="[TOOL_CALLS] [",
            between=", ",
            after="]",
            openings=("[TOOL_CALLS]",),
        ),
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
            openings=DEEPSEEK_OPENINGS,
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
            openings=DEEPSEEK_OPENINGS,
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
