"""Fields of OpenAI's, vLLM's and Anthropic's requests, and their support here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from helix.sampling_params import OPTIONS

ALL, BOTH, COMPLETIONS, CHATS, RESPONSES, MESSAGES = "all", "both", "completions", "chats", "responses", "messages"
DONE, REFUSED, HARMLESS = "done", "refused", "harmless"


@dataclass(frozen=True)
class RequestField:
    """A field of a request.

    Attributes:
        route: all, both (completions and chats), or one of completions, chats, responses and messages.
        fate: done; refused, as the answer would be wrong without it; or harmless: ignored and named in a header.
        says: its description; for a refused field, the reason or what to send instead.
        neutral: values of a refused field that have no effect and are accepted.
    """

    name: str
    route: str
    support: str
    description: str
    neutral_values: tuple[Any, ...] = ()


def _fields(support: str, route: str, *rows: tuple[Any, ...]) -> Iterator[RequestField]:
    for name, description, *neutral_values in rows:
        yield RequestField(name, route, support, description, tuple(neutral_values))


SAMPLING = {name: option for name, option in OPTIONS.items() if name != "logprobs"}  # which each route has as its own
NOTES = {
    "top_k": "-1 is off, too",
    "seed": "choice *i* of `n` takes seed + *i*; unset: each request draws its own",
    "stop_token_ids": "the text ends before them",
}


def _describe(name: str) -> str:
    """Describes the field of a sampling parameter."""
    option = SAMPLING[name]
    parts = [option.request_description, NOTES.get(name)]
    if option.from_checkpoint:
        parts.append(f"unset: that of `generation_config.json`, then {option.request_default:g}")
    return "; ".join(part for part in parts if part)


FIELDS = (
    *_fields(
        DONE, ALL,
        ("model", "the model's name, or none; another one is 404"),
        ("stream", "the answer comes as server-sent events"),
        *((name, _describe(name)) for name in SAMPLING),
        ("priority", "lower ones are admitted first"),
        ("cache_salt", "cached prefixes are shared with requests of the same salt alone"),
        ("skip_special_tokens", "false: special tokens are part of the text"),
    ),
    *_fields(
        DONE, BOTH,
        ("stream_options", "`include_usage`: the usage is the last event"),
        ("max_tokens", "limit of new tokens, 0 in completions too; unset: 16 there, what the context leaves in chats"),
        ("n", "number of answers to one prompt, at most 128"),
        ("stop", "up to 16 texts; the answer ends before the first of them"),
        ("logprobs", "in completions a number up to 20, in chats true: how likely each token was"),
        ("response_format", "`text`, `json_object`, `json_schema` or `structural_tag`: [a form](#forms-of-answers)"),
        ("structured_outputs", "`json`, `regex`, `choice`, `grammar` and others: [a form](#forms-of-answers)"),
        ("guided_json", "an older name of `structured_outputs.json`"),
        ("guided_regex", "an older name of `structured_outputs.regex`"),
        ("guided_choice", "an older name of `structured_outputs.choice`"),
        ("guided_grammar", "an older name of `structured_outputs.grammar`"),
        ("guided_whitespace_pattern", "an older name of `structured_outputs.whitespace_pattern`, beside `guided_json`"),
        ("return_progress", "events with `prompt_progress` while the prompt is read"),
    ),
    *_fields(
        DONE, COMPLETIONS,
        ("prompt", "a text, token ids, or a list of either"),
        ("echo", "the prompt's text stands before the answer, and with `logprobs` its tokens' log-probabilities"),
        ("add_special_tokens", "false: the tokenizer puts nothing around the prompt"),
    ),
    *_fields(
        DONE, CHATS,
        ("messages", "text parts alone"),
        ("max_completion_tokens", "a newer name of `max_tokens`"),
        ("top_logprobs", "up to 20 of the likeliest tokens beside each, with `logprobs`"),
        ("tools", "functions that the answer may call; calls come whole"),
        ("tool_choice", "`none`, `auto`, `required` or a function: [which calls come](#forms-of-answers)"),
        ("parallel_tool_calls", "false: the answer ends with its first call"),
        ("include_reasoning", "false: what the model thinks is not told"),
        ("add_generation_prompt", "false: the prompt ends behind the last message"),
        ("continue_final_message", "the answer goes on with the assistant's last message, and is told without it"),
        ("reasoning_effort", "`none` to `max`, [where the template reads it](#what-templates-read); else refused"),
        ("chat_template_kwargs", "scalars for [variables of the template](#what-templates-read); others are refused"),
        ("documents", "objects of texts, [where the template reads them](#what-templates-read); else refused"),
    ),
    *_fields(
        DONE, RESPONSES,
        ("input", "a text, or a list of messages, thoughts, calls and their results; text parts alone"),
        ("instructions", "the system's message"),
        ("max_output_tokens", "limit of new tokens; unset: what the context leaves"),
        ("tools", "functions that the answer may call; calls come whole"),
        ("tool_choice", "`none`, `auto`, `required` or a function: [which calls come](#forms-of-answers)"),
        ("parallel_tool_calls", "false: the answer ends with its first call"),
        ("reasoning", "`effort`, [where the template reads it](#what-templates-read); else refused"),
        ("text", "`format`: `text`, `json_object` or `json_schema`: [a form](#forms-of-answers)"),
        ("metadata", "up to 300 texts, which come back"),
        ("chat_template_kwargs", "scalars for [variables of the template](#what-templates-read); others are refused"),
    ),
    *_fields(
        DONE, MESSAGES,
        ("messages", "texts, thoughts, calls and their results; the answer goes on with an assistant's last message"),
        ("max_tokens", "limit of new tokens; required"),
        ("system", "the system's message"),
        ("stop_sequences", "up to 16 texts; the answer ends before the first of them"),
        ("tools", "functions that the answer may call, with `input_schema`; calls come whole"),
        ("tool_choice", "`none`, `auto`, `any` or `tool`: [which calls come](#forms-of-answers)"),
        ("thinking", "`enabled`, `adaptive` or `disabled`: turns thinking on or off, where the template has a switch"),
        ("output_config", "`effort`, [where the template reads it](#what-templates-read); `format`, a schema"),
    ),
    *_fields(
        REFUSED, RESPONSES,
        ("previous_response_id", "nothing is kept of answers: send the whole conversation as input"),
        ("store", "nothing is kept of answers: leave it out, or send false", False),
        ("conversation", "nothing is kept of conversations: send the whole one as input"),
        ("background", "answers are told on their connection", False),
        ("background_options", "answers are told on their connection"),
        ("prompt", "there are no prompts of the server's own: send input"),
        ("max_tool_calls", "clients run the tools"),
        ("truncation", "conversations are read whole", "disabled"),
        ("top_logprobs", "answers are told alone", 0),
        ("context_management", "conversations are read whole"),
        ("moderation", "nothing is moderated"),
        ("image", "there is text alone"),
        ("access_programs", "there are none"),
    ),
    *_fields(
        REFUSED, MESSAGES,
        ("container", "there are no containers"),
        ("mcp_servers", "clients run the tools", []),
        ("context_management", "conversations are read whole"),
    ),
    *_fields(
        REFUSED, BOTH,
        ("suffix", "text is continued at its end alone"),
        ("best_of", "every continuation is returned: set n", 1),
        ("use_beam_search", "tokens are drawn", False),
        ("watermarking", "what is drawn is not marked", False),
        ("prompt_logprobs", "in completions set echo and logprobs"),
        ("prompt_embeds", "prompts are texts or token ids"),
        ("logprob_token_ids", "log-probabilities are told of the likeliest tokens"),
        ("allowed_token_ids", "set logit_bias, or structured_outputs"),
        ("bad_words", "set logit_bias", []),
        ("include_stop_str_in_output", "a stop text is not part of the answer", False),
        ("truncate_prompt_tokens", "prompts are read whole"),
        ("thinking_token_budget", "thoughts have no bound of their own: set max_tokens", -1),
        ("repetition_detection", "an answer that repeats itself goes on: set repetition_penalty"),
        ("return_token_ids", "answers are texts", False),
        ("return_tokens_as_token_ids", "tokens are told as texts", False),
        ("return_prompt_text", "/tokenize tells a prompt's ids, /detokenize their text", False),
        ("kv_transfer_params", "each server computes its own cache"),
        ("ec_transfer_params", "there is no encoder"),
        ("vllm_xargs", "there are no extensions"),
        ("moderation", "nothing is moderated"),
        ("regex", "set structured_outputs.regex"),
        ("ebnf", "set structured_outputs.grammar"),
        ("grammar", "set structured_outputs.grammar"),
        ("json_schema", "set structured_outputs.json"),
        ("structural_tag", "set structured_outputs.structural_tag"),
    ),
    *_fields(
        REFUSED, CHATS,
        ("chat_template", "templates are the checkpoint's, or the server's (`serve.chat_template`)"),
        ("functions", "they are given as tools"),
        ("function_call", "it is given as tool_choice"),
        ("audio", "there is text alone"),
        ("modalities", "there is text alone", ["text"]),
        ("web_search_options", "nothing is searched"),
        ("verbosity", "no template reads it: say so in a message", "medium"),
        ("echo", "answers are told alone", False),
        ("add_special_tokens", "the template writes them", False),
        ("enable_thinking", "set chat_template_kwargs"),
        ("thinking", "set chat_template_kwargs"),
    ),
    *_fields(
        HARMLESS, BOTH,
        ("user", "nothing is kept of users"),
        ("metadata", "nothing is kept of requests"),
        ("store", "nothing is kept of answers"),
        ("service_tier", "all requests are served alike; there is `priority`"),
        ("safety_identifier", "nothing is kept of users"),
        ("prompt_cache_key", "what begins alike is found in the cache; `cache_salt` keeps it apart"),
        ("prompt_cache_options", "the cache has its own rules"),
        ("prompt_cache_retention", "the cache has its own rules"),
        ("prediction", "it would save time alone"),
        ("request_id", "answers have ids of their own"),
        ("session_id", "what begins alike is found in the cache"),
        ("length_penalty", "beams alone have it, and they are refused"),
        ("early_stopping", "beams alone have it, and they are refused"),
        ("truncation_side", "prompts are read whole"),
        ("spaces_between_special_tokens", "tokenizers of this kind put none there"),
        ("guided_decoding_backend", "llguidance does it"),
        ("stream_interval", "pieces come as they are ready"),
        ("return_token_offsets", "vLLM's answers have none either"),
        ("return_mm_kwargs", "there is text alone"),
        ("routed_experts_prompt_start", "routes of experts are not told"),
    ),
    *_fields(
        HARMLESS, RESPONSES,
        ("include", "what there is comes anyway"),
        ("stream_options", "events have no padding"),
        ("user", "nothing is kept of users"),
        ("service_tier", "all requests are served alike; there is `priority`"),
        ("safety_identifier", "nothing is kept of users"),
        ("prompt_cache_key", "what begins alike is found in the cache; `cache_salt` keeps it apart"),
        ("prompt_cache_options", "the cache has its own rules"),
        ("prompt_cache_retention", "the cache has its own rules"),
    ),
    *_fields(
        HARMLESS, MESSAGES,
        ("metadata", "nothing is kept of users"),
        ("service_tier", "all requests are served alike; there is `priority`"),
        ("cache_control", "what begins alike is found in the cache"),
        ("diagnostics", "there are none"),
        ("inference_geo", "it is served here"),
        ("speed", "all requests are served alike; there is `priority`"),
        ("user_profile_id", "nothing is kept of users"),
        ("workspace_id", "nothing is kept of users"),
    ),
    *_fields(
        HARMLESS, CHATS,
        ("media_io_kwargs", "there is text alone"),
        ("mm_processor_kwargs", "there is text alone"),
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
    """Returns a field of completions, chats, responses or messages; None if unknown."""
    return _BY_ROUTE[route].get(name)


def table() -> list[str]:
    """Returns the table of fields for the page on serving, as lines of Markdown: what is done first, a row a field."""
    rows = ["| field | of | here | |", "|---|---|---|---|"]
    for field in FIELDS:
        if field.support == DONE:
            description = field.description.replace("2**", r"2\*\*")  # a power, and no bold text
            rows.append(f"| `{field.name}` | {field.route} | {DONE} | {description} |")
    for support, description in (
        (REFUSED, "status 400, whose message says why"),
        (HARMLESS, "ignored, and named in a header"),
    ):
        for route in dict.fromkeys(field.route for field in FIELDS if field.support == support):
            names = ", ".join(f"`{field.name}`" for field in FIELDS if (field.support, field.route) == (support, route))
            rows.append(f"| {names} | {route} | {support} | {description} |")
    return rows
