"""Reads the token ids of a long prompt from JSON with numpy, without a Python int each."""

from __future__ import annotations

import re

import numpy as np

from launch.client.known_prefixes import KnownPrefixes

IDS_BEGIN = re.compile(rb'"prompt"\s*:\s*\[')
MIN_IDS_BYTES = 1 << 12  # shorter prompts are left to pydantic
MAX_REST_BYTES = 1 << 15  # of the body around a prompt, so that it is parsed in well under a millisecond
MAX_DIGITS = 9  # of an id, below 2^31
STAND_IN = b"999999937"  # stands for the prompt in the rest of the body
PIECE = 1 << 16  # bytes, whose arrays stay in the L2 cache; other threads may run between two pieces
KNOWN = KnownPrefixes[bytes]()


def cut_prompt(body: bytes) -> tuple[bytes, bytes] | None:
    """Cuts a long prompt of token ids out of a body; None if there is none, or the rest is long, too.

    Returns:
        The body with `STAND_IN` as the only id, and the text of the ids.
    """
    found = IDS_BEGIN.search(body, 0, MAX_REST_BYTES)
    end = -1 if found is None else body.find(b"]", found.end())
    if found is None or end - found.end() < MIN_IDS_BYTES or found.end() + len(body) - end > MAX_REST_BYTES:
        return None
    rest = body[: found.end()] + STAND_IN + body[end:]
    return (rest, body[found.end() : end]) if rest.count(STAND_IN) == 1 else None


def read_ids(text: bytes) -> np.ndarray | None:
    """Reads token ids [n] int32 between commas, or commas and a space; None if they are written in any other way."""
    comma = b", " if b" " in text[: MAX_DIGITS + 2] else b","
    text += comma  # so that a known text ends with an id
    known, ids = KNOWN.find(text)
    parts, begin = [ids], len(known)
    while begin < len(text):
        last = text.rfind(comma, begin, begin + PIECE)
        end = last + len(comma)
        if last < 0 or (part := _read_piece(text[begin:end], comma)) is None:
            return None
        parts.append(part)
        begin = end
    ids = np.concatenate(parts)
    ids.flags.writeable = False  # later prompts share it
    KNOWN.add(text, ids, known)
    return ids


def _read_piece(text: bytes, comma: bytes) -> np.ndarray | None:
    letters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(letters == ord(","))
    lengths = np.diff(ends, prepend=-len(comma)) - len(comma)
    if lengths.min() < 1 or lengths.max() > MAX_DIGITS or np.count_nonzero(letters - ord("0") < 10) != lengths.sum():
        return None
    if len(comma) > 1 and (letters[ends + 1] != ord(" ")).any():
        return None
    if ((lengths > 1) & (letters[ends - lengths] == ord("0"))).any():  # JSON allows no leading zeros
        return None
    return np.fromstring(text[: -len(comma)], np.int32, sep=",")
