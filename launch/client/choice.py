"""One choice of an answer: detokenizes its tokens up to a stop string and parses the text into parts.

The engine ends token generation at an end token or the length limit. Endings that depend on text are decided here: a
stop string, or the end of the only tool call that an answer may have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.answers.answer_parser import AnswerPart, Parser
from launch.answers.mark_guard import MarkGuard, restored
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.detokenizer import IncrementalDetokenizer
from launch.client.engine_client import Generation
from launch.client.schemas import Chat, Completion


@dataclass
class Delta:
    """What a choice has produced since the last poll.

    Attributes:
        token_ids: new output tokens, none of them after the end.
        text: new text.
        parts: new parts of a chat's answer.
        finish_reason: stop, length, tool_calls, abort or error, once it has finished.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    text: str = ""
    parts: list[AnswerPart] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.finish_reason)

    @classmethod
    def concat(cls, pieces: Sequence[Delta]) -> Delta:
        return cls(
            [token for one in pieces for token in one.token_ids],
            [logprobs for one in pieces for logprobs in one.logprobs],
            "".join(one.text for one in pieces),
            [part for one in pieces for part in one.parts],
            pieces[-1].finish_reason,
        )


class Choice:
    """A running choice, read incrementally.

    Args:
        body: the request it belongs to.
        abort: cancels a generation; called with the finish reason if the choice ends before the engine ends it.
        parser: splits the text into parts; None: plain text.
        marks: the chat format's marks that are added tokens, by id.
        hidden: special tokens that are no marks: a chat's text has them only if the body asks for special tokens.

    Attributes:
        num_tokens: output tokens so far.
        finish_reason: set once it has finished.
    """

    def __init__(
        self,
        index: int,
        generation: Generation,
        tokenizer: ChatTokenizer,
        body: Chat | Completion,
        abort: Callable[[Generation, str], None],
        parser: Parser | None,
        marks: Mapping[int, str] | None = None,
        hidden: Collection[int] = (),
    ) -> None:
        self.index = index
        self.generation = generation
        self.has_parser = parser is not None
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._stops = tuple(body.stop or ())
        self._parser = parser
        # Text that is held back for a stop string cannot be told apart by tokens.
        self._guard = MarkGuard(marks) if marks and not self._stops else None
        self._abort = abort
        self._discard_output = body.max_tokens == 0  # the engine samples one token, which is not part of the answer
        self._hidden = hidden if parser is not None and body.skip_special_tokens else ()
        include_special = not body.skip_special_tokens or (parser is not None and parser.needs_special_tokens)
        continues = not isinstance(body, Chat) or body.continue_final_message
        prompt = generation.request.prompt if continues else ()
        self._detokenizer = IncrementalDetokenizer(
            tokenizer.backend, self._stops, include_special, body.min_tokens or 0, prompt
        )

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended it."""
        return self._detokenizer.matched_stop

    def abort(self, finish_reason: str) -> None:
        self._abort(self.generation, finish_reason)

    def poll(self) -> Delta:
        delta, generation = Delta(), self.generation
        if self.finish_reason is not None:
            return delta
        if self._discard_output and (reason := generation.finish_reason) is not None:
            delta.finish_reason = self.finish_reason = "length" if reason == "stop" else reason
        if self._discard_output:
            return delta
        new_ids = generation.output_token_ids[self.num_tokens :]
        pieces: list[str] = []
        guarded: list[str] = []
        stopped = False
        for at, token in enumerate(new_ids):
            delta.token_ids.append(token)
            if generation.finish_reason == "stop" and at + 1 == len(new_ids):  # the end token has no text
                break
            text, stopped = ("", False) if token in self._hidden else self._detokenizer.push(token)
            pieces.append(text)
            guarded.append(text if self._guard is None else self._guard.guarded(token, text))
            if self._parser is not None and not self._parser.allows_several:  # tokens after the call do not count
                delta.parts += self._parser.feed("".join(guarded))
                guarded.clear()
            if stopped or (self._parser is not None and self._parser.is_complete):
                self.finish_reason = "stop"
                break
        delta.logprobs = generation.logprobs[self.num_tokens : self.num_tokens + len(delta.token_ids)]
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = self.finish_reason or generation.finish_reason
        if self.finish_reason is not None and not stopped:
            text, stopped = self._detokenizer.finish()
            pieces.append(text)
            guarded.append(text)
            self.finish_reason = "stop" if stopped else self.finish_reason
        delta.text = "".join(pieces)
        if self._parser is not None:
            delta.parts += self._parser.feed("".join(guarded))
            if self.finish_reason is not None:
                delta.parts += self._parser.finish(cut=stopped or self.finish_reason != "stop")
            if self._guard is not None:
                for part in delta.parts:
                    part.text = restored(part.text)
            if self._parser.is_complete:
                self.finish_reason = "stop"
        if self.finish_reason is not None:
            self.abort(self.finish_reason)
        delta.finish_reason = self.finish_reason
        if self.finish_reason == "stop" and self._parser is not None and self._parser.calls:
            delta.finish_reason = "tool_calls"
        return delta
