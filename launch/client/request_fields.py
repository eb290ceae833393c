"""Fields of OpenAI's, vLLM's and Anthropic's requests, and how Helix supports them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from helix.sampling_params import OPTIONS

ALL, BOTH, COMPLETIONS, CHATS, RESPONSES, MESSAGES = "all", "both", "completions", "chats", "responses", "messages"
DONE, REFUSED, HARMLESS = "done", "refused", "harmless"


@dataclass(frozen=True)
class RequestField:
    """A request field.

    Attributes:
        route: all, both (completions and chats), or one of completions, chats, responses and messages.
        support: done; refused, because ignoring it would give a wrong answer; or harmless: ignored, but reported in a
            response header.
        description: what it does; for a refused field, the reason or what to send instead.
        neutral_values: values of a refused field that have no effect and are accepted.
    """

    name: str
    route: str
    support: str
    description: str
    neutral_values: tuple[Any, ...] = ()


def _fields(support: str, route: str, *rows: tuple[Any, ...]) -> Iterator[RequestField]:
    for name, description, *neutral_values in rows:
        yield RequestField(name, route, support, description, tuple(neutral_values))


SAMPLING = {name: option for name, option in OPTIONS.items() if name != "logprobs"}  # routes differ in logprobs
NOTES = {
    "top_k": "-1 is off too",
    "seed": "choice *i* of `n` uses seed + *i*; unset: random",
    "stop_token_ids": "the text ends before the stop token",
}


def _describe(name: str) -> str:
    option = SAMPLING[name]
    parts = [option.request_description, NOTES.get(name)]
    if option.from_checkpoint:
        parts.append(f"default: `generation_config.json`, then {option.request_default:g}")
    return "; ".join(part for part in parts if part)


FIELDS = (
    *_fields(
        DONE, ALL,
        ("model", "the model's name, one of `serve.aliases` or nothing; 404 for another name"),
        ("stream", "stream the answer as server-sent events"),
        *((name, _describe(name)) for name in SAMPLING),
        ("priority", "lower values are admitted first"),
        ("cache_salt", "share cached prefixes only between requests with the same salt"),
        ("skip_special_tokens", "false: the text includes special tokens"),
    ),
    *_fields(
        DONE, BOTH,
        ("stream_options", "`include_usage`: the last event is the usage"),
        ("max_tokens", "limit of new tokens; may be 0 in completions. Default: 16 in completions, no limit in chats"),
        ("n", "number of choices per prompt, at most 128"),
        ("stop", "up to 16 strings; the answer ends before the first match"),
        ("logprobs", "log-probabilities of tokens: in completions a number up to 20, in chats true"),
        ("response_format", "`text`, `json_object`, `json_schema`, `structural_tag`: [how](#structured-outputs)"),
        ("structured_outputs", "`json`, `regex`, `choice`, `grammar` and others: [how](#structured-outputs)"),
        ("guided_json", "old name of `structured_outputs.json`"),
        ("guided_regex", "old name of `structured_outputs.regex`"),
        ("guided_choice", "old name of `structured_outputs.choice`"),
        ("guided_grammar", "old name of `structured_outputs.grammar`"),
        ("guided_whitespace_pattern", "old name of `structured_outputs.whitespace_pattern`, for `guided_json`"),
        ("return_progress", "events with `prompt_progress` during prefill"),
    ),
    *_fields(
        DONE, COMPLETIONS,
        ("prompt", "a text, token ids, or a list of either"),
        ("echo", "the text starts with the prompt; `logprobs` then cover the prompt's tokens too"),
        ("add_special_tokens", "false: the tokenizer adds no special tokens to the prompt"),
    ),
    *_fields(
        DONE, CHATS,
        ("messages", "text parts only; other parts of a tool's result are left out, and a sentence says so"),
        ("max_completion_tokens", "new name of `max_tokens`"),
        ("top_logprobs", "up to 20 most likely tokens per token, with `logprobs`"),
        ("tools", "functions that the answer may call; a call is streamed as one piece"),
        ("tool_choice", "`none`, `auto`, `required` or a function: [which calls are made](#structured-outputs)"),
        ("parallel_tool_calls", "false: the answer ends with its first call"),
        ("include_reasoning", "false: leave out the model's reasoning"),
        ("add_generation_prompt", "false: the prompt ends after the last message"),
        ("continue_final_message", "continue the last assistant message; the response has only the continuation"),
        ("reasoning_effort", "`none` to `max`, [if the template reads it](#what-templates-read); else ignored"),
        ("chat_template_kwargs", "scalars for [variables of the template](#what-templates-read); others are refused"),
        ("documents", "objects of strings, [if the template reads them](#what-templates-read); else refused"),
    ),
    *_fields(
        DONE, RESPONSES,
        ("input", "a text, or [a list of items](#what-codex-sends): messages, reasoning, calls, results, references"),
        ("instructions", "the system message; not kept for `previous_response_id`"),
        ("max_output_tokens", "limit of new tokens; default: what the context allows"),
        ("tools", "`function`, `custom` and `namespace`; others are ignored: [how](#what-codex-sends)"),
        ("tool_choice", "`none`, `auto`, `required` or a function: [which calls are made](#structured-outputs)"),
        ("parallel_tool_calls", "false: the answer ends with its first call"),
        ("reasoning", "`effort`, [if the template reads it](#what-templates-read); else ignored"),
        ("text", "`format`: `text`, `json_object` or `json_schema`: [how](#structured-outputs)"),
        ("metadata", "up to 300 strings, returned in the response"),
        ("store", "false: the response is not kept in memory"),
        ("previous_response_id", "continue the conversation of a stored response; 404 if it is gone"),
        ("chat_template_kwargs", "scalars for [variables of the template](#what-templates-read); others are refused"),
    ),
    *_fields(
        DONE, MESSAGES,
        ("messages", "text, thinking, calls and their results; a last assistant message is continued"),
        ("max_tokens", "limit of new tokens; required"),
        ("system", "the system message"),
        ("stop_sequences", "up to 16 strings; the answer ends before the first match"),
        ("tools", "functions that the answer may call, with `input_schema`; a call is streamed as one piece"),
        ("tool_choice", "`none`, `auto`, `any` or `tool`: [which calls are made](#structured-outputs)"),
        ("thinking", "`enabled`, `adaptive` or `disabled`: switches thinking on or off, if the template has a switch"),
        ("output_config", "`effort`, ignored if [no variable is for it](#what-templates-read); `format`, a schema"),
    ),
    *_fields(
        REFUSED, RESPONSES,
        ("conversation", "set previous_response_id, or send the whole conversation as input"),
        ("background", "responses are only sent on the request's connection", False),
        ("background_options", "responses are only sent on the request's connection"),
        ("prompt", "there are no stored prompts: send input"),
        ("max_tool_calls", "tools run in the client"),
        ("top_logprobs", "responses have no log-probabilities", 0),
        ("context_management", "conversations are never truncated"),
        ("moderation", "there is no moderation"),
        ("image", "only text is supported"),
        ("access_programs", "there are none"),
    ),
    *_fields(
        REFUSED, MESSAGES,
        ("container", "there are no containers"),
        ("mcp_servers", "tools run in the client", []),
    ),
    *_fields(
        REFUSED, BOTH,
        ("suffix", "infilling is not supported"),
        ("best_of", "all choices are returned: set n", 1),
        ("use_beam_search", "tokens are sampled", False),
        ("watermarking", "output is not watermarked", False),
        ("prompt_logprobs", "in completions set echo and logprobs"),
        ("prompt_embeds", "prompts are text or token ids"),
        ("logprob_token_ids", "log-probabilities are only returned for the most likely tokens"),
        ("allowed_token_ids", "set logit_bias, or structured_outputs"),
        ("bad_words", "set logit_bias", []),
        ("include_stop_str_in_output", "the answer ends before the stop string", False),
        ("truncate_prompt_tokens", "prompts are never truncated"),
        ("thinking_token_budget", "reasoning has no separate limit: set max_tokens", -1),
        ("repetition_detection", "repetition does not end an answer: set repetition_penalty"),
        ("return_token_ids", "answers are text", False),
        ("return_tokens_as_token_ids", "tokens are returned as text", False),
        ("return_prompt_text", "use /tokenize and /detokenize", False),
        ("kv_transfer_params", "KV is not transferred between servers"),
        ("ec_transfer_params", "there is no encoder"),
        ("vllm_xargs", "there are no extensions"),
        ("moderation", "there is no moderation"),
        ("regex", "set structured_outputs.regex"),
        ("ebnf", "set structured_outputs.grammar"),
        ("grammar", "set structured_outputs.grammar"),
        ("json_schema", "set structured_outputs.json"),
        ("structural_tag", "set structured_outputs.structural_tag"),
    ),
    *_fields(
        REFUSED, CHATS,
        ("chat_template", "the template is the checkpoint's or the server's (`serve.chat_template`)"),
        ("functions", "send tools"),
        ("function_call", "send tool_choice"),
        ("audio", "only text is supported"),
        ("modalities", "only text is supported", ["text"]),
        ("web_search_options", "there is no web search"),
        ("verbosity", "no template reads it: ask for it in a message", "medium"),
        ("echo", "the response has only the answer", False),
        ("add_special_tokens", "the template adds special tokens", False),
        ("enable_thinking", "set chat_template_kwargs"),
        ("thinking", "set chat_template_kwargs"),
    ),
    *_fields(
        HARMLESS, BOTH,
        ("user", "user data is not stored"),
        ("metadata", "requests are not stored"),
        ("store", "answers are not stored"),
        ("service_tier", "there are no service tiers; set `priority`"),
        ("safety_identifier", "user data is not stored"),
        ("prompt_cache_key", "prefix caching is automatic; `cache_salt` isolates requests"),
        ("prompt_cache_options", "prefix caching is automatic"),
        ("prompt_cache_retention", "prefix caching is automatic"),
        ("prediction", "predicted text is not used; answers are the same without"),
        ("request_id", "the server assigns ids"),
        ("session_id", "prefix caching is automatic"),
        ("length_penalty", "only for beam search, which is refused"),
        ("early_stopping", "only for beam search, which is refused"),
        ("truncation_side", "prompts are never truncated"),
        ("spaces_between_special_tokens", "fast tokenizers add none"),
        ("guided_decoding_backend", "it is always llguidance"),
        ("stream_interval", "pieces are sent as soon as they are ready"),
        ("return_token_offsets", "responses have no token offsets"),
        ("return_mm_kwargs", "only text is supported"),
        ("routed_experts_prompt_start", "expert routing is not returned"),
    ),
    *_fields(
        HARMLESS, RESPONSES,
        ("include", "everything available is always included"),
        ("stream_options", "events have no padding"),
        ("truncation", "conversations are never truncated: one that does not fit is refused"),
        ("client_metadata", "user data is not stored"),
        ("user", "user data is not stored"),
        ("service_tier", "there are no service tiers; set `priority`"),
        ("safety_identifier", "user data is not stored"),
        ("prompt_cache_key", "prefix caching is automatic; `cache_salt` isolates requests"),
        ("prompt_cache_options", "prefix caching is automatic"),
        ("prompt_cache_retention", "prefix caching is automatic"),
    ),
    *_fields(
        HARMLESS, MESSAGES,
        ("metadata", "user data is not stored"),
        ("service_tier", "there are no service tiers; set `priority`"),
        ("cache_control", "prefix caching is automatic"),
        ("context_management", "the whole conversation is read: leave out of it what the model should not read"),
        ("diagnostics", "there are none"),
        ("inference_geo", "inference runs on this server"),
        ("speed", "there are no service tiers; set `priority`"),
        ("user_profile_id", "user data is not stored"),
        ("workspace_id", "user data is not stored"),
    ),
    *_fields(
        HARMLESS, CHATS,
        ("media_io_kwargs", "only text is supported"),
        ("mm_processor_kwargs", "only text is supported"),
    ),
)  # fmt: skip
GROUPS = {
    COMPLETIONS: (ALL, BOTH, COMPLETIONS),
    CHATS: (ALL, BOTH, CHATS),
    RESPONSES: (ALL, RESPONSES),
    MESSAGES: (ALL, MESSAGES),
}
_BY_ROUTE = {
    route: {field.name: field for field in FIELDS if field.route in groups} for route, groups in GROUPS.items()
}


def find_field(name: str, route: str) -> RequestField | None:
    """Finds a field by name for one of completions, chats, responses and messages."""
    return _BY_ROUTE[route].get(name)


def table() -> list[str]:
    """Returns the Markdown table of fields for the serving page: one row per supported field, then the others."""
    rows = ["| field | of | here | |", "|---|---|---|---|"]
    for field in FIELDS:
        if field.support == DONE:
            description = field.description.replace("2**", r"2\*\*")  # escape a power
            rows.append(f"| `{field.name}` | {field.route} | {DONE} | {description} |")
    for support, description in (
        (REFUSED, "status 400; the message says why"),
        (HARMLESS, "ignored and named in a response header"),
    ):
        for route in dict.fromkeys(field.route for field in FIELDS if field.support == support):
            names = ", ".join(f"`{field.name}`" for field in FIELDS if (field.support, field.route) == (support, route))
            rows.append(f"| {names} | {route} | {support} | {description} |")
    return rows
