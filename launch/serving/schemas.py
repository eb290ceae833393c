"""What requests may hold, checked; mistakes are named with their field, value and range."""

from __future__ import annotations

import json
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
    ValidationError,
    field_validator,
    model_validator,
)

from launch.serving.errors import ApiError

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_STOP = 4096  # characters of each
MOST_BIASED = 300  # tokens of which a request may say something each, as of `helix.sampling`
MOST_SCHEMA = 1 << 20  # characters of what an answer has to follow, as JSON
MOST_VALUES = 1 << 17  # of a body, beside its token ids
SAID = Repr()  # values in messages, however large they are
# Fields that would change what the answer means, so that nobody may take them for understood.
REFUSED = {
    "suffix": "text is continued at its end alone",
    "best_of": "every continuation is returned: set n",
    "prompt_logprobs": "log-probabilities are those of new tokens",
    "chat_template": "templates are the checkpoint's own",
    "audio": "there is text alone",
    "use_beam_search": "tokens are drawn",
    "functions": "they are given as tools",
    "function_call": "it is given as tool_choice",
}


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


def _array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


SHORT = BeforeValidator(_short)
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[Some[TokenId], AfterValidator(_array)]
Scalar = str | int | float | bool | None

Arguments = Annotated[dict[str, Scalar], SHORT]


class Schema(BaseModel):
    """Strict about types; fields that it does not know are kept apart."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Schema):
    include_usage: bool = False


class Format(Schema):
    """What an answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Format:
        if self.type == "json_schema" and not isinstance((self.json_schema or {}).get("schema"), dict):
            raise ValueError('json_schema needs a schema: {"name": NAME, "schema": {...}}')
        if (size := len(json.dumps(self.json_schema))) > MOST_SCHEMA:
            raise ValueError(f"json_schema has {size} characters, and may have {MOST_SCHEMA}")
        return self

    @property
    def schema_to_follow(self) -> dict[str, Any] | None:
        """None: any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema["schema"]


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
    user: str | None = None

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


class Completion(Generation):
    """Body of /v1/completions."""

    prompt: str | Ids | Some[str] | Some[Ids]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

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


class Chat(Generation):
    """Body of /v1/chat/completions."""

    messages: Some[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Some[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Arguments | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Chat:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true")
        if (size := sum(len(json.dumps(tool.function.parameters)) for tool in self.tools or ())) > MOST_SCHEMA:
            raise ValueError(f"tools have parameters of {size} characters, and may have {MOST_SCHEMA}")
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r:.80}, which is not among tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice=required needs tools")
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


class Tokenize(Schema):
    """Body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Some[Message] | None = Field(None, min_length=1)
    tools: Some[Tool] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: Arguments | None = None

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
    for name, why in REFUSED.items():
        if (request.model_extra or {}).get(name) is not None:
            raise ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
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
    """Fields of a request that nobody reads."""
    return sorted(request.model_extra or ())


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
