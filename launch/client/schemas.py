"""Schemas of request bodies; errors name the field, its value and its range."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from heapq import nsmallest
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from helix.sampling_params import BIAS, LOGPROBS, MAX_LISTED, TOKEN_ID, Parameter
from launch.answers.grammars import StructuredOutput
from launch.client.errors import ApiError
from launch.client.long_prompts import STAND_IN, cut_prompt, read_ids
from launch.client.request_fields import CHATS, REFUSED, SAMPLING, RequestField, find_field
from launch.client.schema_base import SHORT_REPR, FalseByDefault, ListOf, Schema, TrueByDefault, null_as
from launch.client.structured_outputs import (
    MAX_EXPRESSION,
    Choices,
    Expression,
    ResponseFormat,
    StructuredOutputs,
    check_size,
    make_structured_output,
)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 4096  # per stop string
MAX_VALUES = 1 << 17  # values in a body, without its token ids
MAX_IGNORED_NAMES, MAX_NAME_CHARS = 32, 80  # ignored fields to report to a client, and characters of each name
Scalar = str | int | float | bool | None
MEDIA = re.compile("image|audio|video")  # in types of content that multimodal models read
BRANCHES = ("str", "int", "float", "bool", "ToolChoice")  # names of union members in an error's location
SCANNED = 1 << 20  # bytes per scanned piece


def _check_length(value: object) -> object:
    """Checks the length of a list or object before its items: millions of item errors take minutes and gigabytes."""
    if isinstance(value, dict | list) and len(value) > MAX_LISTED:
        what = "keys" if isinstance(value, dict) else "items"
        raise ValueError(f"has {len(value)} {what}; at most {MAX_LISTED} are allowed")
    return value


def _check_text_length(values: dict[str, Scalar]) -> dict[str, Scalar]:
    if (total := sum(len(value) for value in values.values() if isinstance(value, str))) > MAX_EXPRESSION:
        raise ValueError(f"has {total} characters of text; at most {MAX_EXPRESSION} are allowed")
    return values


def _check_stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters each")
    return stops


def _array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


LENGTH_CHECKED = BeforeValidator(_check_length)
TokenId = Annotated[int, TOKEN_ID.range]
Ids = Annotated[ListOf[TokenId], AfterValidator(_array)]

Stops = Annotated[str | ListOf[str], AfterValidator(_check_stops)]
Arguments = Annotated[dict[str, Scalar], LENGTH_CHECKED, AfterValidator(_check_text_length)]


class StreamOptions(Schema):
    """The field `stream_options`."""

    include_usage: FalseByDefault = False


def _field(parameter: Parameter) -> tuple[Any, Any]:
    if parameter.kind is bool:
        return FalseByDefault, False
    return Annotated[parameter.kind, parameter.request] | None, None


NUMERIC_FIELDS: dict[str, Any] = {
    name: _field(parameter) for name, parameter in SAMPLING.items() if parameter.kind in (bool, int, float)
}
NumericFields: Any = create_model("NumericFields", __base__=Schema, **NUMERIC_FIELDS)


class SamplingFields(NumericFields):
    """Sampling fields, which all routes that generate have."""

    stop_token_ids: Annotated[ListOf[TokenId], LENGTH_CHECKED] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, BIAS.range]], LENGTH_CHECKED] | None = None
    priority: Annotated[int, null_as(0)] = Field(0, ge=-(1 << 31), lt=1 << 31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    skip_special_tokens: TrueByDefault = True

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for name in bias or ():
            if not name.isascii() or not name.isdecimal() or len(name) > 10 or int(name) >= 1 << 31:
                raise ValueError(f"has the key {name!r:.40}, which is not a token id")
        return bias

    @property
    def sampling_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SamplingFields.model_fields if name in self.model_fields_set}


class GenerationFields(SamplingFields):
    """Fields that completions and chats share."""

    model: str | None = None
    stream: FalseByDefault = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    return_progress: FalseByDefault = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Expression | None = None
    guided_choice: Choices | None = None
    guided_grammar: Expression | None = None
    guided_whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None
    _structured_output: StructuredOutput | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @model_validator(mode="after")
    def _single_structured_output(self) -> GenerationFields:
        found = [*self._structured_outputs()]
        given = [structured_output.param for structured_output in found]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both constrain the answer: send only one")
        if self.guided_whitespace_pattern is not None and given != ["guided_json"]:
            raise ValueError("guided_whitespace_pattern needs guided_json, and no other constraint")
        self._structured_output = found[0] if found else None
        return self

    def _structured_outputs(self) -> Iterator[StructuredOutput]:
        whitespace = {} if (pattern := self.guided_whitespace_pattern) is None else {"whitespace_pattern": pattern}
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                yield make_structured_output(f"guided_{kind}", kind, value, whitespace)
        if self.structured_outputs is not None:
            yield self.structured_outputs.structured_output
        wanted = None if self.response_format is None else self.response_format.structured_output
        if wanted is not None:
            yield wanted

    @property
    def structured_output(self) -> StructuredOutput | None:
        return self._structured_output


class Completion(GenerationFields):
    """Body of /v1/completions."""

    prompt: str | Ids | ListOf[str] | ListOf[Ids]
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    echo: FalseByDefault = False
    logprobs: Annotated[int, LOGPROBS] | None = None
    add_special_tokens: TrueByDefault = True

    @property
    def prompts(self) -> list[str] | list[np.ndarray]:
        """The prompts as texts, or as token ids [n] int32."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt, np.ndarray):
            return [self.prompt] if len(self.prompt) else []
        return self.prompt  # type: ignore[return-value]


def left_out_text(kind: str) -> str:
    """Returns what a model reads in place of a part of a tool's result that is not text."""
    return f"[{kind:.40} left out: the model reads text only]"


class TextPart(Schema):
    """A text part of a message, or a refusal of an earlier answer."""

    type: Literal["text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


def _text_of_result(part: object) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in ("text", "refusal"):
        return part
    return {"type": "text", "text": left_out_text(kind), "left_out": kind}


class FunctionCall(Schema):
    """Function and JSON arguments of a tool call."""

    name: str
    arguments: Annotated[str, null_as("{}")] = "{}"


class ToolCall(Schema):
    """A tool call of an assistant message."""

    id: str | None = None
    type: Annotated[Literal["function"], null_as("function")] = "function"
    function: FunctionCall


class ChatMessage(Schema):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: None = None  # no template reads the old form of `tool_calls`
    audio: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, content: object, info: ValidationInfo) -> object:
        """Makes texts of what is no text in a tool's result: an image must not end a session."""
        if info.data.get("role") != "tool" or not isinstance(content, list):
            return content
        return [_text_of_result(part) for part in content]

    @property
    def left_out(self) -> set[str]:
        """Types of the parts that the model does not read."""
        parts = self.content if isinstance(self.content, list) else ()
        return {
            str(part.model_extra["left_out"]) for part in parts if part.model_extra and "left_out" in part.model_extra
        }

    @property
    def text(self) -> str:
        parts = self.content or self.refusal or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class Function(Schema):
    """A function that the answer may call."""

    name: str = Field(max_length=128, pattern=r"^[\w.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


def _check_names(tools: list[Tool]) -> list[Tool]:
    """Checks that names are distinct: a call, a forced one too, has nothing else to tell tools apart."""
    ((name, count),) = Counter(tool.function.name for tool in tools).most_common(1) or [("", 0)]
    if count > 1:
        raise ValueError(f"has {count} functions named {name!r}")
    return tools


class FunctionName(Schema):
    """The name of the function that must be called."""

    name: str


class ToolChoice(Schema):
    """The field `tool_choice`, if it names a function."""

    type: Literal["function"]
    function: FunctionName


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Conversation(Schema):
    """Fields of a conversation other than its messages."""

    route: ClassVar[str] = CHATS

    tools: Annotated[ListOf[Tool], AfterValidator(_check_names)] | None = None
    chat_template_kwargs: Arguments | None = None
    documents: ListOf[dict[str, str]] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: FalseByDefault = False

    @model_validator(mode="after")
    def _continues_an_answer(self) -> Conversation:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError(
                "continue_final_message continues a message, but add_generation_prompt=true starts one: send only one "
                "of them"
            )
        last = self.message_list[-1] if self.message_list else None
        if last is None or last.role != "assistant" or not last.text:
            what = "there are no messages" if last is None else f"the last message has role {last.role!r}"
            what = "the last message has no text" if last is not None and last.role == "assistant" else what
            raise ValueError(f"continue_final_message continues the text of an assistant message, but {what}")
        return self

    @property
    def message_list(self) -> list[ChatMessage]:
        """The messages; empty for /tokenize with a prompt."""
        return getattr(self, "messages", None) or []

    @property
    def must_call_tool(self) -> bool:
        return False

    @property
    def continued_text(self) -> str | None:
        return self.message_list[-1].text if self.continue_final_message else None

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class Chat(GenerationFields, Conversation):
    """Body of /v1/chat/completions."""

    messages: ListOf[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: FalseByDefault = False
    top_logprobs: Annotated[int, LOGPROBS] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: TrueByDefault = True
    include_reasoning: TrueByDefault = True

    @model_validator(mode="after")
    def _name_what_is_left_out(self) -> Chat:
        kinds = set().union(*(message.left_out for message in self.messages))
        assert self.model_extra is not None, "schemas collect unknown fields"
        self.model_extra.update(dict.fromkeys(f"messages.content.{kind}" for kind in sorted(kinds)))
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Chat:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        check_size("tools", [tool.function.parameters for tool in self.tools or ()])
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice is {self.tool_choice.function.name!r:.80}, which is not in tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice=required needs tools")
        param = None if self.structured_output is None else self.structured_output.param
        if self.must_call_tool and param not in (None, "response_format"):
            raise ValueError(f"tool_choice requires a call, but {param} sets another format: send only one of them")
        if self.must_call_tool and self.continue_final_message:
            raise ValueError(
                "tool_choice requires a call, but continue_final_message continues a text: send only one of them"
            )
        return self

    @property
    def prompt_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        tools = (tool for tool in self.prompt_tools if self.forced_function in (None, tool.function.name))
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def forced_function(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def must_call_tool(self) -> bool:
        return self.tool_choice == "required" or self.forced_function is not None

    @property
    def allows_several_calls(self) -> bool:
        """Whether the answer may have several calls; a named function is called once."""
        return self.parallel_tool_calls and self.forced_function is None


class Tokenize(Conversation):
    """Body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: TrueByDefault = True

    @model_validator(mode="after")
    def _one_of_both(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        return self


class Detokenize(Schema):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Ids

    @property
    def ids(self) -> np.ndarray:
        """The token ids [n] int32."""
        return np.asarray(self.tokens)


Body = TypeVar("Body", bound=Schema)


def parse_body(schema: type[Body], body: bytes, max_ids: int = 0) -> Body:
    """Parses a request body; `model_extra` then has the unknown fields to report to the client, up to a limit.

    Args:
        max_ids: maximum number of token ids in the body.

    Raises:
        ApiError: 400; the message names the field, its value and its range.
    """
    if schema is Completion and (completion := parse_long_prompt(body, max_ids)) is not None:
        return completion  # type: ignore[return-value]
    if len(body) > MAX_VALUES:
        _check_values(body, max_ids)
    try:
        request = schema.model_validate_json(body)
    except ValidationError as error:
        raise _deepest(error) from error
    _check_extra_fields(request)
    return request


def parse_long_prompt(body: bytes, max_ids: int) -> Completion | None:
    """Parses a completion whose prompt is many token ids, as `parse_body` does, but without a Python int each.

    Holds the GIL for less than a millisecond at a time. Returns None for other bodies, including invalid ones.
    """
    if (cut := cut_prompt(body)) is None:
        return None
    rest, text = cut
    try:
        request = Completion.model_validate_json(rest)
    except ValidationError:
        return None
    if not isinstance(request.prompt, np.ndarray) or request.prompt.tolist() != [int(STAND_IN)]:
        return None  # it was the prompt of another object
    if (ids := read_ids(text)) is None or len(ids) > max_ids:
        return None
    request.prompt = ids
    _check_extra_fields(request)
    return request


def _check_extra_fields(request: Schema) -> None:
    """Refuses fields that are not supported; of the others that are unknown keeps some names in `model_extra`."""
    for field, value in _known_extra_fields(request):
        # best_of=n is the same as n: all choices are returned.
        same = field.name == "best_of" and value == (getattr(request, "n", None) or 1)
        if field.support == REFUSED and value is not None and value not in field.neutral_values and not same:
            what = f"{field.name} is not supported: {field.description}"
            raise ApiError(400, what, param=field.name, code="unsupported_parameter")
    if (extra := request.model_extra) is not None:  # may have 100,000 names: keep a few for the server's event loop
        ignored_names = ignored(request)
        objects: list[Schema] = [request, *(value for _, value in request if isinstance(value, Schema))]
        for one in objects:
            (one.model_extra or {}).clear()
        extra.update(dict.fromkeys(ignored_names))


def validate_body(schema: type[Body], values: dict[str, Any]) -> Body:
    """Validates fields that are already parsed.

    Raises:
        ApiError: 400; the message names the field, its value and its range.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _deepest(error) from error


def _deepest(error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_context=False)
    return _refusal(max(errors, key=lambda one: len(one["loc"])))


def _check_values(body: bytes, max_ids: int) -> None:
    """Counts values before parsing: millions of empty lists or fields take seconds, and gigabytes that are not freed.

    Every value other than a token id has at most one name and one string.

    Raises:
        ApiError: 400, the body has too many values.
    """
    letters = np.frombuffer(body, np.uint8)
    lists, commas = _count(letters, "[{"), _count(letters, ",")
    if lists <= MAX_VALUES and lists + commas <= MAX_VALUES + max_ids and _count(letters, '"') <= 4 * MAX_VALUES:
        return  # even if all of these were outside of strings
    lists, commas, names = _scan(body)
    if lists > MAX_VALUES or lists + commas > MAX_VALUES + max_ids or names > 2 * MAX_VALUES:
        ids = f" and {max_ids} token ids" if max_ids else ""
        what = f"the body has {lists + commas} values, {lists} of them lists or objects, with {names} names and strings"
        raise ApiError(400, f"{what}; at most {MAX_VALUES} values{ids} are allowed", code="too_large")


def _scan(body: bytes) -> tuple[int, int, int]:
    """Counts lists and objects, commas between values, and names and strings."""
    lists = commas = quotes = 0
    within = np.zeros(1, np.uint8)  # whether the last scanned byte was inside a string
    bare = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    for begin in range(0, len(bare), SCANNED):
        part = bare[begin : begin + SCANNED]
        inside = np.bitwise_xor.accumulate(np.concatenate([within, part == ord('"')]))[1:]
        outside, within = part[inside == 0], inside[-1:]
        lists, commas = lists + _count(outside, "[{"), commas + _count(outside, ",")
        quotes += _count(part, '"')
    return lists, commas, quotes // 2


def _count(letters: np.ndarray, wanted: str) -> int:
    """Counts some letters, four times as fast as `bytes.count`."""
    return sum(int(np.count_nonzero(letters == ord(one))) for one in wanted)


def ignored(request: Schema) -> list[str]:
    """Returns the names of ignored fields, including nested ones, shortened and up to a limit."""
    # Refused fields with a neutral value.
    without_effect = {field.name for field, _ in _known_extra_fields(request) if field.support == REFUSED}
    inside = [(name, value) for name, value in request if isinstance(value, Schema)]
    names = {name[:MAX_NAME_CHARS] for name in request.model_extra or () if name not in without_effect}
    names |= {f"{name}.{key[:MAX_NAME_CHARS]}" for name, schema in inside for key in schema.model_extra or ()}
    return nsmallest(MAX_IGNORED_NAMES, names)


def _known_extra_fields(request: Schema) -> Iterator[tuple[RequestField, Any]]:
    for name, value in (request.model_extra or {}).items():
        if (field := find_field(name, request.route)) is not None:
            yield field, value


def unsupported_content(param: str | None, kind: str) -> ApiError:
    """Returns the error for a part of a message that the model cannot read."""
    what = f"{param} has type {kind:.40}: only text is read; models run without their towers for images and audio"
    return ApiError(400, what, param=param, code="unsupported_content")


def _refusal(error: Any) -> ApiError:
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json")
    # Locations include type names of union members, which are not fields of the body.
    where = [part for part in error["loc"] if isinstance(part, int) or (part.isidentifier() and part not in BRANCHES)]
    param = ".".join(map(str, where)) or None
    if error["type"] == "missing":
        return ApiError(400, f"{param} is required", param=param)
    given = error["input"]
    kind = given.get("type") if isinstance(given, dict) else given if where and where[-1] == "type" else None
    if isinstance(kind, str) and MEDIA.search(kind):
        return unsupported_content(param, kind)
    value_repr = SHORT_REPR.repr(error["input"])
    return ApiError(400, message if param is None else f"{param}={value_repr}: {message}", param=param)
