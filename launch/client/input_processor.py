"""The model-dependent part of a request: the prompt's token ids, and the grammar of the answer.

Its time grows with the size of the request, and it may run in another process.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from launch.answers.chat_formats import ChatFormat, assistant_turn, required_call_format
from launch.answers.grammars import Parts, structured_output_grammar, tool_call_grammar
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.engine_messages import EngineInfo
from launch.client.errors import ApiError
from launch.client.grammar_compiler import GrammarCompiler
from launch.client.schemas import Chat, Completion, GenerationFields, Tokenize


class GrammarSpec(NamedTuple):
    """The parts of an answer's grammar, and the request field that sets it."""

    param: str
    parts: Parts


class ProcessedPrompt(NamedTuple):
    """A body in token ids.

    Attributes:
        prompts: the ids [n] int32 of each.
        echoed: the prompts' texts, where the answer repeats them.
        turn: the prompt's part of the answer's turn; None for completions.
        form: the form that the answer has to have; None: any text.
    """

    prompts: list[np.ndarray]
    echoed: list[str]
    turn: str | None
    grammar_spec: GrammarSpec | None


def process_prompt(
    tokenizer: ChatTokenizer, chat_format: ChatFormat | None, body: Chat | Completion, engine_info: EngineInfo
) -> ProcessedPrompt:
    """Encodes a body's prompts.

    Raises:
        ApiError: 400, the template refuses it, it is far longer than a sequence may be, or an id is outside of the
            vocabulary.
    """
    if isinstance(body, Chat):
        ids, text = tokenizer.encode_chat(body, body.prompt_tools, engine_info.max_length)
        _check_ids(tokenizer, ids, engine_info, "messages")
        starts_message = (
            body.adds_generation_prompt or body.continued_text is not None
        )  # else the answer is plain text after a message
        turn = (
            assistant_turn(chat_format.template, text, body.continued_text)
            if chat_format is not None and starts_message
            else ""
        )
        return ProcessedPrompt([ids], [], turn, make_grammar_spec(tokenizer, body, engine_info, chat_format, turn))
    prompts: list[np.ndarray] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, engine_info.max_length, body.add_special_tokens)
            _check_ids(tokenizer, prompt, engine_info, "prompt")
        elif len(prompt) and (largest := prompt.max()) >= engine_info.vocab:
            raise ApiError(400, f"prompt has {largest}, and the vocabulary is [0, {engine_info.vocab})", param="prompt")
        prompts.append(prompt)
    if not prompts:
        raise ApiError(400, "prompt must not be empty", param="prompt")
    echoed = [item if isinstance(item, str) else tokenizer.decode(item) for item in (body.prompts if body.echo else [])]
    return ProcessedPrompt(prompts, echoed, None, make_grammar_spec(tokenizer, body, engine_info))


def _check_ids(tokenizer: ChatTokenizer, ids: np.ndarray, engine_info: EngineInfo, param: str) -> None:
    """Refuses a text of which the tokenizer makes tokens that the model has no embedding and no logits for."""
    if len(ids) and (largest := int(ids.max())) >= engine_info.vocab:
        token = f"{tokenizer.token_text(largest)!r:.80}, token {largest} of the tokenizer"
        what = f"{param} contains {token}, and the model's vocabulary is [0, {engine_info.vocab}): leave it out"
        raise ApiError(400, what, param=param)


def encode_chat_prompt(tokenizer: ChatTokenizer, body: Chat, limit: int) -> np.ndarray:
    """Encodes a chat up to the answer: the ids [n] int32 of its prompt; errors as in `ChatTokenizer.encode_chat`."""
    return tokenizer.encode_chat(body, body.prompt_tools, limit)[0]


def make_grammar_spec(
    tokenizer: ChatTokenizer,
    body: GenerationFields,
    engine_info: EngineInfo,
    chat_format: ChatFormat | None = None,
    turn: str = "",
) -> GrammarSpec | None:
    """Returns the form that a request demands of its answer; None: any text.

    Args:
        dialect: None for completions.
        turn: the prompt's part of the answer's turn.

    Raises:
        ApiError: 400, the form is too large.
    """
    # What the model has no token for, it can only spell.
    added = {text: token for text, token in tokenizer.added.items() if token < engine_info.vocab}
    eos = [token for token in engine_info.eos if token < engine_info.vocab]
    if isinstance(body, Chat) and body.must_call_tool:
        try:
            call_format = required_call_format(chat_format, body.forced_function is not None)
            calls = tool_call_grammar(call_format, body.callable_tools, body.allows_several_calls, turn, added, eos)
        except ValueError as error:
            raise grammar_error("tool_choice", error) from error
        return GrammarSpec("tool_choice", calls)
    if (structured_output := body.structured_output) is None:
        return None
    continues = isinstance(body, Chat) and not body.adds_generation_prompt
    try:
        return GrammarSpec(
            structured_output.param,
            structured_output_grammar(
                structured_output, added, tokenizer.special & added.keys(), eos, chat_format, turn, continues
            ),
        )
    except ValueError as error:
        raise grammar_error(structured_output.param, error) from error


async def compile_grammar(spec: GrammarSpec, compiler: GrammarCompiler | None, engine_info: EngineInfo) -> str:
    """Compiles the grammar of a form.

    Raises:
        ApiError: 400, it is invalid, or the model has no compiler, with the reason.
    """
    if compiler is None:
        what = f"answers of this model cannot follow {spec.param}: {engine_info.unguided}; leave {spec.param} out"
        raise ApiError(400, what, param=spec.param)
    try:
        return await compiler.compile(spec.parts)
    except ValueError as error:
        raise grammar_error(spec.param, error) from error


def grammar_error(param: str, error: ValueError) -> ApiError:
    """Creates the refusal of a form, with the reason."""
    return ApiError(400, f"{param} cannot be followed: {' '.join(str(error).split()):.300}", param=param)


def tokenize_body(tokenizer: ChatTokenizer, body: Tokenize, max_length: int, limit: int) -> bytes:
    """Computes the answer of /tokenize, as JSON."""
    if body.messages is not None:
        ids, _ = tokenizer.encode_chat(body, body.tools, limit)
    else:
        ids = tokenizer.encode(body.prompt or "", limit, body.add_special_tokens)
    return json.dumps({"count": len(ids), "max_model_len": max_length, "tokens": ids.tolist()}).encode()
