"""The model-dependent part of a request: the prompt's token ids and the answer's grammar.

Takes time in proportion to the size of the request, and may run in another process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from helix.engine.request import outside_vocabulary
from launch.answers.chat_formats import ChatFormat, assistant_turn, required_call_format
from launch.answers.grammars import Parts, strict_tool_grammar, structured_output_grammar, tool_call_grammar
from launch.answers.json_schemas import unenforced
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.engine_messages import EngineInfo
from launch.client.errors import ApiError
from launch.client.grammar_compiler import GrammarCompiler
from launch.client.schemas import Body, Chat, Completion, GenerationFields, Tokenize, parse_body

STRICT = "tools.strict"


class GrammarSpec(NamedTuple):
    """The grammar of an answer.

    Attributes:
        param: the request field that asks for it.
        parts: None if the model's chat format cannot do what the field asks for, which is `tools.strict`.
        unenforced: keywords of schemas that the grammar leaves out, with the field and their path.
    """

    param: str
    parts: Parts | None
    unenforced: list[str]


class ProcessedPrompt(NamedTuple):
    """A request in token ids.

    Attributes:
        prompts: token ids of each prompt, [n] int32.
        echoed: texts of the prompts if the answer repeats them, else empty.
        turn: the beginning of the assistant's turn that the prompt contains; None for completions.
        grammar_spec: constraint on the answer; None: any text.
        left_out: fields of messages that the prompt does not have as they were sent.
        last_message_start: see `EncodedChat`.
    """

    prompts: list[np.ndarray]
    echoed: list[str]
    turn: str | None
    grammar_spec: GrammarSpec | None
    left_out: tuple[str, ...] = ()
    last_message_start: int = 0


class ReadChat(NamedTuple):
    """A conversation's body, and what became of it up to the first error. The bodies are without their messages.

    Attributes:
        body: as the client sent it.
        chat: `body` converted to a chat.
    """

    body: Any
    chat: Chat | None
    processed: ProcessedPrompt | None
    error: ApiError | None


def read_chat(
    schema: type[Body],
    content: bytes,
    convert: Callable[[Body], Chat],
    tokenizer: ChatTokenizer,
    chat_format: ChatFormat | None,
    engine_info: EngineInfo,
) -> ReadChat:
    """Parses a body, converts it to a chat and tokenizes it, in one call: to send its messages takes longer than this.

    Raises:
        ApiError: 400, the body is invalid; later errors are returned.
    """
    body = parse_body(schema, content)
    chat, processed, error = None, None, None
    try:
        chat = convert(body)
        processed = process_prompt(tokenizer, chat_format, chat, engine_info)
    except ApiError as refusal:
        error = refusal
    for one in (body, chat):
        if one is not None:
            one.messages = []  # type: ignore[union-attr]
    return ReadChat(body, chat, processed, error)


def process_prompt(
    tokenizer: ChatTokenizer, chat_format: ChatFormat | None, body: Chat | Completion, engine_info: EngineInfo
) -> ProcessedPrompt:
    """Tokenizes the prompts of a request and builds the answer's grammar.

    Raises:
        ApiError: 400, the template rejects the messages, a prompt is far too long, or a token id is outside of the
            vocabulary.
    """
    if isinstance(body, Chat):
        ids, text, left_out, last_message_start = tokenizer.encode_chat(
            body, body.prompt_tools, engine_info.max_length, engine_info.takes_snapshots
        )
        _check_ids(tokenizer, ids, engine_info, "messages")
        turn = ""
        if chat_format is not None and (body.adds_generation_prompt or body.continued_text is not None):
            turn = assistant_turn(chat_format, text, body.continued_text)  # else the answer is text after a message
        grammar_spec = make_grammar_spec(tokenizer, body, engine_info, chat_format, turn)
        return ProcessedPrompt([ids], [], turn, grammar_spec, left_out, last_message_start)
    prompts: list[np.ndarray] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, engine_info.max_length, body.add_special_tokens)
            _check_ids(tokenizer, prompt, engine_info, "prompt")
        elif len(prompt) and (largest := prompt.max()) >= engine_info.vocab:
            raise ApiError(400, outside_vocabulary("prompt", largest, engine_info.vocab), param="prompt")
        prompts.append(prompt)
    if not prompts:
        raise ApiError(400, "prompt is an empty list: send at least one prompt", param="prompt")
    echoed = [item if isinstance(item, str) else tokenizer.decode(item) for item in (body.prompts if body.echo else [])]
    return ProcessedPrompt(prompts, echoed, None, make_grammar_spec(tokenizer, body, engine_info))


def _check_ids(tokenizer: ChatTokenizer, ids: np.ndarray, engine_info: EngineInfo, param: str) -> None:
    """Refuses a text whose tokens are outside of the model's vocabulary: it has no embeddings and logits for them."""
    if len(ids) and (largest := int(ids.max())) >= engine_info.vocab:
        token = f"{tokenizer.token_text(largest)!r:.80} (token {largest} of the tokenizer)"
        what = f"{param} contains {token}, but the model's vocabulary is [0, {engine_info.vocab}): remove it"
        raise ApiError(400, what, param=param)


def make_grammar_spec(
    tokenizer: ChatTokenizer,
    body: GenerationFields,
    engine_info: EngineInfo,
    chat_format: ChatFormat | None = None,
    turn: str = "",
) -> GrammarSpec | None:
    """Returns the constraint that a request puts on its answer; None: any text.

    Args:
        chat_format: None for completions.
        turn: the beginning of the assistant's turn that the prompt contains.

    Raises:
        ApiError: 400, the grammar is too large.
    """
    # A marker that the model has no token for has to be spelled out.
    added = {text: token for text, token in tokenizer.added.items() if token < engine_info.vocab}
    eos = [token for token in engine_info.eos if token < engine_info.vocab]
    if isinstance(body, Chat) and body.must_call_tool:
        try:
            call_format = required_call_format(chat_format, body.forced_function is not None)
            calls = tool_call_grammar(call_format, body.callable_tools, body.allows_several_calls, turn, added, eos)
        except ValueError as error:
            raise grammar_error("tool_choice", error) from error
        return GrammarSpec("tool_choice", calls, _unenforced_by_tools(body.callable_tools))
    if (structured_output := body.structured_output) is None:
        strict = isinstance(body, Chat) and any(tool.function.strict for tool in body.prompt_tools)
        return _strict_tools_spec(body, chat_format, turn, added, eos) if strict else None
    continues = isinstance(body, Chat) and not body.adds_generation_prompt
    try:
        return GrammarSpec(
            structured_output.param,
            structured_output_grammar(
                structured_output, added, tokenizer.special & added.keys(), eos, chat_format, turn, continues
            ),
            [name for schema in structured_output.schemas for name in unenforced(schema, structured_output.param)],
        )
    except ValueError as error:
        raise grammar_error(structured_output.param, error) from error


def _strict_tools_spec(
    body: Chat, chat_format: ChatFormat | None, turn: str, added: Mapping[str, int], eos: Collection[int]
) -> GrammarSpec:
    parts, tools = None, body.callable_tools
    if chat_format is not None:
        with suppress(ValueError):  # the request is still answered, and told that its schemas are not enforced
            parts = strict_tool_grammar(chat_format, tools, turn, added, eos)
    return GrammarSpec(STRICT, parts, _unenforced_by_tools(tool for tool in tools if tool["function"].get("strict")))


def _unenforced_by_tools(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    functions = (tool["function"] for tool in tools)
    return [name for one in functions for name in unenforced(one.get("parameters"), f"tools.{one['name']}")]


async def compile_grammar(
    spec: GrammarSpec | None, compiler: GrammarCompiler | None, engine_info: EngineInfo
) -> tuple[str | None, list[str]]:
    """Compiles a grammar; returns it, and the names of what it does not enforce.

    Raises:
        ApiError: 400, the grammar is invalid, or the model does not support structured outputs; never for
            `tools.strict`, which is then not enforced.
    """
    if spec is None:
        return None, []
    try:
        return await _compile(spec, compiler, engine_info), spec.unenforced
    except ApiError as error:
        if spec.param != STRICT or error.status != 400:
            raise
        return None, [STRICT]


async def _compile(spec: GrammarSpec, compiler: GrammarCompiler | None, engine_info: EngineInfo) -> str:
    if spec.parts is None:
        raise grammar_error(spec.param, ValueError("the model's chat format has no mark that begins a call"))
    if compiler is None:
        what = f"this model does not support {spec.param}: {engine_info.unguided}; leave {spec.param} out"
        raise ApiError(400, what, param=spec.param)
    try:
        return await compiler.compile(spec.parts)
    except ValueError as error:
        raise grammar_error(spec.param, error) from error


def grammar_error(param: str, error: ValueError) -> ApiError:
    """Converts an error in a grammar to the refusal of the request field that asks for it."""
    return ApiError(400, f"{param} is not usable: {' '.join(str(error).split()):.300}", param=param)


def tokenize_body(tokenizer: ChatTokenizer, body: Tokenize, max_length: int, limit: int) -> bytes:
    """Returns the response of /tokenize as JSON."""
    if body.messages is not None:
        ids = tokenizer.encode_chat(body, body.tools, limit).ids
    else:
        ids = tokenizer.encode(body.prompt or "", limit, body.add_special_tokens)
    return json.dumps({"count": len(ids), "max_model_len": max_length, "tokens": ids.tolist()}).encode()
