"""What requests may hold, checked; mistakes are named with their field, value and range."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from launch.serving.errors import ApiError
from launch.serving.fields import REFUSED, field_of
from launch.serving.fields import Field as Known

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_STOP = 4096  # characters of each
MOST_BIASED = 300  # tokens of which a request may say something each, as of `helix.sampling`
MOST_EXPRESSION = 1 << 16  # characters of an expression or a grammar, of all choices, or of a template's variables
MOST_SCHEMA = 1 << 19  # characters and items of a schema, or of the parameters of all tools
MOST_LEVELS = 128  # of a schema
MOST_VALUES = 1 << 17  # of a body, beside its token ids
Scalar = str | int | float | bool | None
SAID = Repr()  # values in messages, however large they are


class FirstMistake(FailFast):
    """Ends a list at its first mistake: to collect those of a million items takes minutes and gigabytes."""

    def __hash__(self) -> int:  # in unions
        return hash(FirstMistake)


T = TypeVar("T")
Some = Annotated[list[T], FirstMistake()]
BRANCHES = ("str", "int", "float", "bool", "ToolChoice")  # of unions, in the place of an error
SCANNED = 1 << 20  # bytes at a time


def _short(value: object) -> object:
    """Looked at before its items are, for the same reason."""
    if isinstance(value, dict | list) and len(value) > MOST_BIASED:
        what = "keys" if isinstance(value, dict) else "items"
        raise ValueError(f"has {len(value)} {what}, and may have {MOST_BIASED}")
    return value


def _short_texts(values: dict[str, Scalar]) -> dict[str, Scalar]:
    if (total := sum(len(value) for value in values.values() if isinstance(value, str))) > MOST_EXPRESSION:
        raise ValueError(f"has texts of {total} characters, and may have {MOST_EXPRESSION}")
    return values


def _array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


SHORT = BeforeValidator(_short)
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[Some[TokenId], AfterValidator(_array)]

Arguments = Annotated[dict[str, Scalar], SHORT, AfterValidator(_short_texts)]


class Schema(BaseModel):
    """Strict about types; fields that it does not know are kept apart."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Schema):
    include_usage: bool = False


@dataclass(frozen=True)
class Shape:
    """A form that an answer has to have.

    Attributes:
        param: the field that says so.
        kind: json, regex, choice, grammar or structural_tag.
        value: a schema, an expression, texts, a grammar in EBNF or in Lark's syntax, or `Tagged`.
        options: of a schema's spaces, as llguidance reads them.
    """

    param: str
    kind: str
    value: Any
    options: dict[str, Any] = field(default_factory=dict)


class Tag(Schema):
    begin: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    end: str


class Tagged(Schema):
    """Text in which JSON that follows a schema stands between marks."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Some[Tag] = Field(min_length=1)
    triggers: Some[Annotated[str, Field(min_length=1)]] = Field(min_length=1)

    @model_validator(mode="after")
    def _begin_with_triggers(self) -> Tagged:
        for tag in self.structures:
            if not any(tag.begin.startswith(trigger) for trigger in self.triggers):
                raise ValueError(f"has the begin {tag.begin!r:.80}, which starts with none of its triggers")
        return self


class Format(Schema):
    """What an answer looks like."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: Any = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Format:
        if self.type == "json_schema" and not isinstance((self.json_schema or {}).get("schema"), dict):
            raise ValueError('json_schema needs a schema: {"name": NAME, "schema": {...}}')
        if self.type == "structural_tag":
            self._tags()
        if self.json_schema is not None:
            bounded("response_format.json_schema", self.json_schema)
        return self

    def _tags(self) -> Tagged:
        given = {"structures": self.structures, "triggers": self.triggers, "format": self.format}
        return _tagged("response_format", {name: value for name, value in given.items() if value is not None})

    @property
    def shape(self) -> Shape | None:
        """None: any text."""
        param = "response_format"
        match self.type:
            case "text":
                return None
            case "structural_tag":
                return Shape(param, "structural_tag", self._tags())
        return Shape(param, "json", {"type": "object"} if self.json_schema is None else self.json_schema["schema"])


Expression = Annotated[str, Field(max_length=MOST_EXPRESSION)]
Texts = Annotated[Some[str], Field(min_length=1, max_length=MOST_EXPRESSION)]


class Structured(Schema):
    """A form of the answer, one of several."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: Expression | None = None
    choice: Texts | None = None
    grammar: Expression | None = None
    json_object: Literal[True] | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Structured:
        given = [name for name, value in self._kinds() if value is not None]
        if len(given) != 1:
            kinds = ", ".join(name for name, _ in self._kinds())
            raise ValueError(f"has {' and '.join(given) or 'none of them'}, and needs one of {kinds}")
        return self

    def _kinds(self) -> Iterator[tuple[str, Any]]:
        yield from (("json", self.json_), ("regex", self.regex), ("choice", self.choice), ("grammar", self.grammar))
        yield from (("json_object", self.json_object), ("structural_tag", self.structural_tag))

    @property
    def shape(self) -> Shape:
        ((kind, value),) = ((kind, value) for kind, value in self._kinds() if value is not None)
        spaces: dict[str, Any] = {}
        if self.disable_any_whitespace:
            spaces = {"whitespace_flexible": False}
        elif self.whitespace_pattern is not None:
            spaces = {"whitespace_pattern": self.whitespace_pattern}
        return _shape(f"structured_outputs.{kind}", kind, value, spaces, self.disable_additional_properties)


def _shape(param: str, kind: str, value: Any, spaces: dict[str, Any], closed: bool = False) -> Shape:
    """A shape as fields say it.

    Raises:
        ValueError: it is none.
    """
    if kind == "choice" and (total := sum(map(len, value))) > MOST_EXPRESSION:
        raise ValueError(f"{param} has {total} characters, and may have {MOST_EXPRESSION}")
    if kind == "structural_tag":
        return Shape(param, kind, _tagged(param, _object(param, value)))
    if kind == "json_object":
        value = {"type": "object"}
    elif kind != "json":
        return Shape(param, kind, value)
    schema = _object(param, value)
    bounded(param, schema)
    options = {"x-guidance": spaces} if spaces else {}
    return Shape(param, "json", _closed(schema) if closed else schema, options)


def _object(param: str, value: str | dict[str, Any]) -> dict[str, Any]:
    """The object that a field holds, or a text of it."""
    if isinstance(value, str):
        bounded(param, value)  # of a text of 64 MiB Python would make gigabytes
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{param}={SAID.repr(value)} is no JSON object")
    return found


def bounded(param: str, schema: Any) -> None:
    """Raises ValueError where a schema is larger than one may be; what it costs to find out is bounded as well."""
    room, left = MOST_SCHEMA, [(schema, 0)]
    while left and room >= 0:
        value, level = left.pop()
        if isinstance(value, dict | list):
            if level == MOST_LEVELS:
                raise ValueError(f"{param} has more than {MOST_LEVELS} levels")
            room -= len(value)
            if room >= 0:
                inside = [*value, *value.values()] if isinstance(value, dict) else value
                left += [(one, level + 1) for one in inside]
        elif isinstance(value, str):
            room -= len(value)
    if room < 0:
        raise ValueError(f"{param} is too large: it may have {MOST_SCHEMA} characters and items")


def _tagged(param: str, value: dict[str, Any]) -> Tagged:
    bounded(param, value)
    if "format" in value:
        raise ValueError("structural_tag.format is not supported: send structures and triggers")
    try:
        return Tagged.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"structural_tag{where and '.'}{where}: {first['msg']}") from None


def _closed(schema: Any) -> Any:
    """A schema whose objects have the properties that they name, and no others."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(one) for name, one in schema.items()}
    if schema.keys() & {"properties", "patternProperties"}:
        closed.setdefault("additionalProperties", False)
    return closed


class Generation(Schema):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Some[str] | None = None
    stop_token_ids: Annotated[Some[TokenId], SHORT] | None = None
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], SHORT] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    return_progress: bool = False
    response_format: Format | None = None
    structured_outputs: Structured | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Expression | None = None
    guided_choice: Texts | None = None
    guided_grammar: Expression | None = None
    guided_whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None
    skip_special_tokens: bool = True
    _wanted: Shape | None = PrivateAttr(None)

    @field_validator("stop")
    @classmethod
    def _some_stops(cls, stop: str | list[str] | None) -> list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop
        if stops is not None and (len(stops) > MOST_STOPS or not all(0 < len(text) <= MOST_STOP for text in stops)):
            raise ValueError(f"must be at most {MOST_STOPS} texts, of 1 to {MOST_STOP} characters each")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for name in bias or ():
            if not name.isascii() or not name.isdecimal() or int(name[:11]) >= 1 << 31:
                raise ValueError(f"has the key {name!r:.40}, which is no token id")
        return bias

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true")
        return self

    @model_validator(mode="after")
    def _one_shape(self) -> Generation:
        shapes = [*self._shapes()]
        given = [shape.param for shape in shapes]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say what the answer looks like: send one of them")
        if self.guided_whitespace_pattern is not None and given != ["guided_json"]:
            raise ValueError("guided_whitespace_pattern goes with guided_json")
        self._wanted = shapes[0] if shapes else None
        return self

    def _shapes(self) -> Iterator[Shape]:
        spaces = {} if (pattern := self.guided_whitespace_pattern) is None else {"whitespace_pattern": pattern}
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                yield _shape(f"guided_{kind}", kind, value, spaces)
        if self.structured_outputs is not None:
            yield self.structured_outputs.shape
        if self.response_format is not None and (shape := self.response_format.shape) is not None:
            yield shape

    @property
    def shape(self) -> Shape | None:
        """What the answer has to look like; None: any text."""
        return self._wanted


class Completion(Generation):
    """Body of /v1/completions."""

    prompt: str | Ids | Some[str] | Some[Ids]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _no_logprobs_of_the_prompt(self) -> Completion:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs would want those of the prompt, and they are of new tokens alone")
        return self

    @property
    def prompts(self) -> list[str] | list[np.ndarray]:
        """Texts, or ids [n] int32."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt, np.ndarray):
            return [self.prompt] if len(self.prompt) else []
        return self.prompt  # type: ignore[return-value]


class TextPart(Schema):
    type: Literal["text"]
    text: str


class Call(Schema):
    name: str
    arguments: str = "{}"


class ToolCall(Schema):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Call


class Message(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Some[TextPart] | None = None
    name: str | None = None
    tool_calls: Some[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content in one piece."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class Function(Schema):
    name: str = Field(max_length=128, pattern=r"^[\w.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema):
    type: Literal["function"]
    function: Function


class Named(Schema):
    name: str


class ToolChoice(Schema):
    type: Literal["function"]
    function: Named


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Conversation(Schema):
    """What is said of a conversation beside its messages."""

    tools: Some[Tool] | None = None
    chat_template_kwargs: Arguments | None = None
    documents: Some[dict[str, str]] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _continues_an_answer(self) -> Conversation:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError("continue_final_message goes on with a message, and add_generation_prompt=true begins one")
        last = self.said[-1] if self.said else None
        if last is None or last.role != "assistant" or not last.text:
            what = "there are no messages" if last is None else f"the last one is of role {last.role!r}"
            what = "the last one has no text" if last is not None and last.role == "assistant" else what
            raise ValueError(f"continue_final_message goes on with the text of an assistant's message, and {what}")
        return self

    @property
    def said(self) -> list[Message]:
        """The messages."""
        return getattr(self, "messages", None) or []

    @property
    def begun(self) -> str | None:
        """The text that the answer goes on with; None: it begins a message."""
        return self.said[-1].text if self.continue_final_message else None

    @property
    def prompts_answer(self) -> bool:
        """Whether the prompt ends with the beginning of a message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class Chat(Generation, Conversation):
    """Body of /v1/chat/completions."""

    messages: Some[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Chat:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true")
        bounded("tools", [tool.function.parameters for tool in self.tools or ()])
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r:.80}, which is not among tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice=required needs tools")
        if self.has_to_call and self.shape is not None and self.shape.param != "response_format":
            raise ValueError(f"tool_choice wants a call, and {self.shape.param} something else: send one of them")
        if self.has_to_call and self.continue_final_message:
            raise ValueError("tool_choice wants a call, and continue_final_message a text that goes on")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, ToolChoice):
            return [tool for tool in tools if tool.function.name == choice.function.name]
        return [] if choice == "none" else tools

    @property
    def has_to_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    @property
    def may_call_again(self) -> bool:
        """Whether there may be more than one call; a tool that is named is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, ToolChoice)


class Tokenize(Conversation):
    """Body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Some[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs prompt or messages, one of the two")
        return self


class Detokenize(Schema):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Ids

    @property
    def ids(self) -> np.ndarray:
        """[n] int32."""
        return np.asarray(self.tokens)


Body = TypeVar("Body", bound=Schema)


def parsed(schema: type[Body], body: bytes, most_ids: int = 0) -> Body:
    """A request's body.

    Args:
        most_ids: token ids that it may hold.

    Raises:
        ApiError: 400, naming the field, its value and what it has to be.
    """
    if len(body) > MOST_VALUES:
        _check_values(body, most_ids)
    try:
        request = schema.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise _refusal(max(errors, key=lambda one: len(one["loc"]))) from error  # of a union, the branch that went far
    for known, value in _others(request):
        if known.fate == REFUSED and value is not None and value not in known.neutral:
            what = f"{known.name} is not supported: {known.says}"
            raise ApiError(400, what, param=known.name, code="unsupported_parameter")
    return request


def _check_values(body: bytes, most_ids: int) -> None:
    """Counts values before anything is made of them: millions of empty lists take seconds, and gigabytes that stay.

    Raises:
        ApiError: 400, there are too many.
    """
    lists = commas = 0
    within = np.zeros(1, np.uint8)  # a text, at the end of what has been scanned
    bare = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    for begin in range(0, len(bare), SCANNED):
        part = bare[begin : begin + SCANNED]
        inside = np.bitwise_xor.accumulate(np.concatenate([within, part == ord('"')]))[1:]
        outside, within = part[inside == 0], inside[-1:]
        lists += int(np.count_nonzero((outside == ord("[")) | (outside == ord("{"))))
        commas += int(np.count_nonzero(outside == ord(",")))
    if lists > MOST_VALUES or lists + commas > MOST_VALUES + most_ids:
        ids = f" and {most_ids} token ids" if most_ids else ""
        what = (
            f"the body has {lists + commas} values, {lists} of them lists or objects, and may have {MOST_VALUES}{ids}"
        )
        raise ApiError(400, what, code="too_large")


def unknown(request: Schema) -> list[str]:
    """Fields of a request that nobody reads, those of its objects among them."""
    neutral = {known.name for known, _ in _others(request) if known.fate == REFUSED}  # of a value that wants nothing
    inside = [(name, value) for name, value in request if isinstance(value, Schema)]
    names = [*(request.model_extra or ()), *(f"{name}.{key}" for name, of in inside for key in of.model_extra or ())]
    return sorted({*names} - neutral)


def _others(request: Schema) -> Iterator[tuple[Known, Any]]:
    """Fields that are known, and no fields of the schema, with their values."""
    for name, value in (request.model_extra or {}).items():
        if (known := field_of(name, isinstance(request, Conversation))) is not None:
            yield known, value


def _refusal(error: Any) -> ApiError:
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json")
    # Branches of a union are named by their types, which are no fields of the body.
    where = [part for part in error["loc"] if isinstance(part, int) or (part.isidentifier() and part not in BRANCHES)]
    param = ".".join(map(str, where)) or None
    if error["type"] == "missing":
        return ApiError(400, f"{param} is required", param=param)
    said = SAID.repr(error["input"])
    return ApiError(400, message if param is None else f"{param}={said}: {message}", param=param)
