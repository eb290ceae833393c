"""Items and tools of OpenAI's Responses API, and the body of its requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from launch.client.request_fields import RESPONSES
from launch.client.schema_base import BY_TYPE, FalseByDefault, ListOf, Schema, TrueByDefault, null_as
from launch.client.schemas import LENGTH_CHECKED, Arguments, Effort, Function, SamplingFields, left_out_text

CUSTOM_INPUT = "input"  # the argument of the function that the model sees for a custom tool
CUSTOM_PARAMETERS = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}


def _typed(item: object) -> object:
    if not isinstance(item, dict):
        return item
    return ({"type": "message"} if "role" in item else {"type": "item_reference"} if [*item] == ["id"] else {}) | item


class TextContent(Schema):
    """A text part of a message or tool result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalContent(Schema):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class LeftOutContent(Schema):
    """A part of a tool result that is not text: the model reads in its place that it was left out."""

    type: str

    @property
    def text(self) -> str:
        return left_out_text(self.type)


class ReasoningContent(Schema):
    """A text part of reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class MessageItem(Schema):
    """A message of a conversation."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[Annotated[TextContent | RefusalContent, Field(discriminator="type")]]


class ReasoningItem(Schema):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: ListOf[ReasoningContent] | None = None
    encrypted_content: str | None = None
    summary: ListOf[ReasoningContent] | None = None


class FunctionCallItem(Schema):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    @property
    def json_arguments(self) -> str:
        return self.arguments or "{}"


class CustomToolCallItem(Schema):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    @property
    def json_arguments(self) -> str:
        return json.dumps({CUSTOM_INPUT: self.input}, ensure_ascii=False)


class CallOutputItem(Schema):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | ListOf[Annotated[TextContent | LeftOutContent, BY_TYPE]]


class ItemReference(Schema):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


class OtherItem(Schema):
    """An item of a tool that runs on OpenAI's servers, or of a compaction: it is left out."""

    type: str


Item = Annotated[
    MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | CallOutputItem | ItemReference | OtherItem,
    BY_TYPE,
]
Items = ListOf[Annotated[Item, BeforeValidator(_typed)]]


class StoredItems(Schema):
    """Items of a stored response."""

    items: Items


class ResponseQuery(Schema):
    """Query of /v1/responses/ID."""

    stream: FalseByDefault = Field(False, strict=False)  # values are texts


class ItemsQuery(Schema):
    """Query of /v1/responses/ID/input_items."""

    limit: Annotated[int, null_as(20)] = Field(20, ge=1, le=100, strict=False)
    order: Annotated[Literal["asc", "desc"], null_as("desc")] = "desc"
    after: str | None = None


class FunctionTool(Function):
    """A function of `tools`."""

    type: Literal["function"]


class CustomToolFormat(Schema):
    """The field `format` of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Schema):
    """A tool of `tools` whose input is a text; the model sees a function with one argument."""

    type: Literal["custom"]
    name: str = Function.model_fields["name"]  # type: ignore[assignment]
    description: str | None = None
    format: CustomToolFormat | None = None

    @property
    def function(self) -> dict[str, Any]:
        description = self.description or ""
        if self.format is not None and self.format.type == "grammar":
            description += f"\n\n{CUSTOM_INPUT} follows this {self.format.syntax} grammar:\n{self.format.definition}"
        return {"description": description.strip(), "parameters": CUSTOM_PARAMETERS}


class OtherTool(Schema):
    """A tool that runs on OpenAI's servers, or needs a model trained for it: it is left out."""

    type: str


class NamespaceTool(Schema):
    """Tools under a common prefix, such as those of an MCP server."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: ListOf[Annotated[FunctionTool | CustomTool | OtherTool, BY_TYPE]]


class FunctionChoice(Schema):
    """The field `tool_choice`, if it names a tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class Reasoning(Schema):
    """The field `reasoning`."""

    effort: Effort | None = None


class TextFormat(Schema):
    """The field `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Schema):
    """The field `text`."""

    format: TextFormat | None = None


class CalledTool(NamedTuple):
    """A tool by the name that the model sees."""

    tool: FunctionTool | CustomTool
    namespace: str | None


class Responses(SamplingFields):
    """Body of /v1/responses."""

    route: ClassVar[str] = RESPONSES
    model: str | None = None
    input: str | Annotated[Items, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    stream: FalseByDefault = False
    tools: ListOf[Annotated[FunctionTool | CustomTool | NamespaceTool | OtherTool, BY_TYPE]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: TrueByDefault = True
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str], LENGTH_CHECKED] | None = None
    chat_template_kwargs: Arguments | None = None
    store: TrueByDefault = True
    previous_response_id: str | None = None

    @model_validator(mode="after")
    def _name_what_is_left_out(self) -> Responses:
        names = [f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, OtherTool)]
        for space in self.tools or ():
            if isinstance(space, NamespaceTool):
                names += ["tools.namespace.description"] if space.description else []
                names += [f"tools.{tool.type}" for tool in space.tools if isinstance(tool, OtherTool)]
        for item in self.items:
            match item:
                case OtherItem():
                    names.append(f"input.{item.type}")
                case ReasoningItem(content=None | []):
                    names += [f"input.{name}" for name in ("encrypted_content", "summary") if getattr(item, name)]
                case CallOutputItem(output=[*parts]):
                    names += [f"input.output.{part.type}" for part in parts if isinstance(part, LeftOutContent)]
        assert self.model_extra is not None, "schemas collect unknown fields"
        self.model_extra.update(dict.fromkeys(names))
        return self

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [MessageItem(type="message", role="user", content=self.input)]
        return self.input

    @property
    def functions(self) -> list[tuple[str, CalledTool]]:
        """The tools that an answer may call, with the names that the model sees."""
        found = []
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool | CustomTool):
                found.append((tool.name, CalledTool(tool, None)))
            elif isinstance(tool, NamespaceTool):
                for one in tool.tools:
                    if isinstance(one, FunctionTool | CustomTool):
                        found.append((full_name(one.name, tool.name), CalledTool(one, tool.name)))
        return found


def full_name(name: str, namespace: str | None) -> str:
    """Returns the name under which the model sees a tool of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"
