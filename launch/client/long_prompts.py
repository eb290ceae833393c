"""Reads the token ids of a long prompt from JSON with numpy, without a Python int each."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

IDS_BEGIN = re.compile(rb'"prompt"\s*:\s*\[')
MIN_IDS_BYTES = 1 << 12  # shorter prompts are left to pydantic
MAX_REST_BYTES = 1 << 15  # of the body around a prompt, so that it is parsed in well under a millisecond
STAND_IN = b"999999937"  # stands for the prompt in the rest of the body
PIECE = 1 << 16  # bytes, whose arrays stay in the L2 cache; other threads may run between two pieces
DIGITS = 8  # of an id at most: its characters are one 64-bit word
LEAST = np.array([0, 0, *(10**n for n in range(1, DIGITS))], dtype=np.int32)  # id by its number of digits


class LongPrompt(NamedTuple):
    """A body in two parts.

    Attributes:
        rest: the body with `STAND_IN` as the only token id of its prompt.
        ids: text of the prompt's ids.
    """

    rest: bytes
    ids: bytes


def cut_prompt(body: bytes) -> LongPrompt | None:
    """Cuts a long prompt of token ids out of a body; None if there is none, or the rest is long, too."""
    found = IDS_BEGIN.search(body, 0, MAX_REST_BYTES)
    end = -1 if found is None else body.find(b"]", found.end())
    if found is None or end - found.end() < MIN_IDS_BYTES or found.end() + len(body) - end > MAX_REST_BYTES:
        return None
    rest = body[: found.end()] + STAND_IN + body[end:]
    return LongPrompt(rest, body[found.end() : end]) if rest.count(STAND_IN) == 1 else None


def read_ids(text: bytes) -> np.ndarray | None:
    """Reads token ids [n] int32 between commas, or commas and a space; None if they are written in any other way."""
    comma = b", " if b" " in text[: DIGITS + 2] else b","
    ids, begin = [], 0
    while begin <= len(text):
        end = len(text) if len(text) - begin <= PIECE else text.rfind(comma, begin, begin + PIECE)
        part = _read_piece(text[begin:end], comma) if end >= begin else None
        if part is None:
            return None
        ids.append(part)
        begin = end + len(comma)
    return np.concatenate(ids)


def _read_piece(text: bytes, comma: bytes) -> np.ndarray | None:
    padded = b"," * DIGITS + text + comma
    letters = np.frombuffer(padded, np.uint8)
    ends = np.flatnonzero(letters[DIGITS:] == ord(",")) + DIGITS
    lengths = np.diff(ends, prepend=DIGITS - len(comma)) - len(comma)
    if lengths.min() < 1 or lengths.max() > DIGITS or np.count_nonzero(letters - ord("0") < 10) != lengths.sum():
        return None
    if len(comma) > 1 and (letters[ends + 1] != ord(" ")).any():
        return None
    # The eight characters up to each comma, the first one in the lowest byte. Those before the id become zeros.
    words = np.ndarray(len(padded) - DIGITS + 1, "<u8", padded, strides=(1,))[ends - DIGITS]
    before = (8 * (DIGITS - lengths)).astype(np.uint64)
    words = words >> before << before & 0x0F0F0F0F0F0F0F0F
    # Twice as many digits in each number: the left neighbor times 10, 100 or 10,000, plus the right one.
    words = (words * ((10 << 8) + 1) >> 8) & 0x00FF00FF00FF00FF
    words = (words * ((100 << 16) + 1) >> 16) & 0x0000FFFF0000FFFF
    ids = (words * ((10000 << 32) + 1) >> 32).astype(np.int32)
    return None if (ids < LEAST[lengths]).any() else ids  # JSON allows no leading zeros
