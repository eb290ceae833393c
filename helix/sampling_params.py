"""Sampling parameters: types, ranges, defaults and descriptions in one table.

Validation, HTTP request schemas, options of `LLM` and of prompt files, and the reference pages derive from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from types import NoneType
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from annotated_types import Interval

FP32_MAX = (2 - 2.0**-23) * 2.0**127
MAX_LISTED = 300  # per-token settings in a request
LOGPROBS = Interval(ge=0, le=20)  # at most `TOP` of `kernels.tokens.top_tokens`
_TYPES: dict[Any, Any] = {float: (int, float), int: int, bool: bool, Sequence: (list, tuple), Mapping: Mapping}


@dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Attributes:
        says: description, in one sentence.
        range: of a number; lists and mappings have at most MAX_LISTED items.
        neutral: what the default does, in a word.
        is_option: users set it by this name: over HTTP, in prompt files and from Python.
        from_checkpoint: HTTP requests take the default from `generation_config.json`, if it has one.
        request: range in requests over HTTP and from Python, if not `range`.
        request_default: default in HTTP requests, if not `default`.
        hint: type of its field, for signatures.
        kind: `hint` without None and item types: float, int, bool, Sequence or Mapping.
    """

    says: str
    range: Interval | None = None
    neutral: str | None = None
    is_option: bool = True
    from_checkpoint: bool = False
    request: Interval | None = None
    request_default: Any = None
    hint: Any = None
    kind: Any = None
    default: Any = 0

    @cached_property
    def accepted(self) -> str:
        return self._accepted(self.range)

    @property
    def request_description(self) -> str:
        """The description, and the values that requests over HTTP and from Python accept."""
        return f"{self.says} ({self._accepted(self.request)})"

    def _accepted(self, range: Interval | None) -> str:
        neutral = f", {self.default:g} = {self.neutral}" if self.neutral else ""
        return _accepted(self.kind, range) + (", or none" if self.default is None else neutral)

    def check(self, name: str, value: Any) -> None:
        if value is self.default:
            return
        is_bool = isinstance(value, bool) and self.kind is not bool
        if is_bool or not isinstance(value, _TYPES[self.kind]) or not self._is_inside(value):
            raise ValueError(f"{name}={value!r:.500} must be {self.accepted}")

    def _is_inside(self, value: Any) -> bool:
        # NaN compares false, and so is never inside.
        if (r := self.range) is None:
            return self.kind is bool or len(value) <= MAX_LISTED
        above = r.ge <= value if r.gt is None else r.gt < value
        return above and (value <= r.le if r.lt is None else value < r.lt)


def _accepted(kind: Any, range: Interval | None) -> str:
    if kind is bool:
        return "true or false"
    if range is None:
        return f"{'a list' if kind is Sequence else 'values'} of at most {MAX_LISTED} token ids"
    if range.le == FP32_MAX:
        return f"a finite number >= {range.ge} (fp32)"
    low = f"({range.gt}" if range.ge is None else f"[{_short(range.ge)}"
    high = f"{_short(range.lt)})" if range.le is None else f"{range.le}]"
    return f"{'an integer' if kind is int else 'a number'} in {low}, {high}"


def _short(number: Any) -> str:
    # Large powers of two as 2**n.
    size = abs(number)
    return f"{'-' if number < 0 else ''}2**{size.bit_length() - 1}" if size >= 1 << 31 else str(number)


TOKEN_ID = Parameter("a token", Interval(ge=0, lt=1 << 31), kind=int)
BIAS = Parameter("added to a token's logit", Interval(ge=-100, le=100), kind=float)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; `PARAMETERS` describes them. Real numbers are rounded to fp32.

    Logits processors run before the temperature, in the order of the attributes. Reported log-probabilities are the
    unmodified model's.

    Raises:
        ValueError: a value is outside its range.
    """

    # fmt: off
    temperature: Annotated[float, Parameter(
        "divides the logits before a token is sampled", Interval(ge=0, le=FP32_MAX), "greedy",
        from_checkpoint=True, request=Interval(ge=0, le=100), request_default=1.0,
    )] = 0.0
    top_k: Annotated[int, Parameter(
        "samples among the k most likely tokens only", Interval(ge=0, lt=1 << 63), "off",
        from_checkpoint=True, request=Interval(ge=-1, lt=1 << 31),
    )] = 0
    top_p: Annotated[float, Parameter(
        "of those, among the fewest most likely ones whose probabilities sum to `top_p`", Interval(gt=0, le=1), "off",
        from_checkpoint=True,
    )] = 1.0
    min_p: Annotated[float, Parameter(
        "of those, among the ones at least `min_p` times as likely as the most likely one", Interval(ge=0, le=1), "off",
        from_checkpoint=True,
    )] = 0.0
    seed: Annotated[int, Parameter(
        "fixes the sampled tokens, independently of the batch and the layout",
        Interval(ge=0, lt=1 << 63), request=Interval(ge=-(1 << 63), lt=1 << 63),
    )] = 0
    logit_bias: Annotated[Mapping[int, float], Parameter(
        "token id to a number from -100 to 100 that is added to the token's logit",
    )] = field(default_factory=dict, hash=False)
    min_tokens: Annotated[int, Parameter(
        "minimum number of new tokens: until then no end token is sampled, and stop texts are ignored",
        Interval(ge=0, lt=1 << 31), "off",
    )] = 0
    repetition_penalty: Annotated[float, Parameter(
        "divides positive logits of tokens in the prompt or the answer, and multiplies negative ones",
        Interval(ge=0.01, le=100), "off", from_checkpoint=True,
    )] = 1.0
    frequency_penalty: Annotated[float, Parameter(
        "subtracted from a token's logit for each occurrence in the answer", Interval(ge=-2, le=2), "off",
    )] = 0.0
    presence_penalty: Annotated[float, Parameter(
        "subtracted from the logits of tokens that occur in the answer", Interval(ge=-2, le=2), "off",
    )] = 0.0
    masked: Annotated[bool, Parameter(
        "rank 0 sends a mask of the allowed tokens before each is sampled", is_option=False,
    )] = False
    stop_token_ids: Annotated[Sequence[int], Parameter(
        "tokens that end the answer, besides the model's own end tokens",
    )] = field(default=(), hash=False)
    ignore_eos: Annotated[bool, Parameter("the model's own end tokens do not end the answer")] = False
    logprobs: Annotated[int | None, Parameter(
        "number of most likely tokens to report with each new token", LOGPROBS,
    )] = None
    prompt_logprobs: Annotated[int | None, Parameter(
        "the same for each prompt token except the first; turns the prefix cache off for this request", LOGPROBS,
        is_option=False,
    )] = None
    # fmt: on

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            parameter.check(name, getattr(self, name))
        for token in self.stop_token_ids:
            TOKEN_ID.check("stop_token_ids: token", token)
        for token, bias in self.logit_bias.items():
            TOKEN_ID.check("logit_bias: token", token)
            BIAS.check(f"logit_bias[{token}]", bias)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; token ids may be strings, as in JSON."""
        bias = {int(token): value for token, value in values.get("logit_bias", {}).items()}
        return cls(**{**values, "logit_bias": bias})

    def to_dict(self) -> dict[str, Any]:
        """Returns the values that differ from the defaults."""
        values = {name: getattr(self, name) for name in PARAMETERS}
        return {name: value for name, value in values.items() if value != PARAMETERS[name].default}

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k or top-p is on; min-p costs nothing and does not count."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether logits change with the tokens of the prompt and the answer."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return self.min_tokens > 0 or penalties != (0, 0, 1)

    @property
    def changes_logits(self) -> bool:
        return self.masked or bool(self.logit_bias) or self.counts_tokens

    @cached_property  # the scheduler looks at it for each decision
    def needs_logits_processor(self) -> bool:
        """Whether it changes logits or reports log-probabilities; such sequences take no drafts."""
        return self.changes_logits or self.logprobs is not None

    def ends(self, eos: Collection[int]) -> set[int]:
        """Returns the tokens that end the answer, given the model's end tokens `eos`."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos)}


def parameters(table: type) -> dict[str, Parameter]:
    """Reads the `Parameter` annotations of a dataclass's fields."""
    hints, annotated = get_type_hints(table), get_type_hints(table, include_extras=True)
    rows = {}
    for row in fields(table):
        hint, args = hints[row.name], get_args(hints[row.name])
        kind = args[0] if NoneType in args else get_origin(hint) or hint
        default = row.default if row.default_factory is MISSING else row.default_factory()
        of = next(one for one in get_args(annotated[row.name]) if isinstance(one, Parameter))
        unset = default if of.request_default is None else of.request_default
        request = of.request or of.range
        rows[row.name] = replace(of, hint=hint, kind=kind, default=default, request=request, request_default=unset)
    return rows


PARAMETERS = parameters(SamplingParams)
OPTIONS = {name: parameter for name, parameter in PARAMETERS.items() if parameter.is_option}
