"""Bodies with many token ids are read as pydantic reads them, or refused with its words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launch.client import known_prefixes, long_prompts, schemas
from launch.client.errors import ApiError
from launch.client.long_prompts import read_ids
from launch.client.schemas import Completion, parse_body

NUMBERS = st.one_of(
    st.integers(0, 200_000).map(str),
    st.sampled_from(
        ["0", "00", "01", "-1", "1.0", "1e3", "", " ", "true", "null", '"1"', "[1]", "2147483647", "2147483648"]
    ),
    st.sampled_from(
        ["999999999", "1000000000", "99999999999999999999", " 7", "7 ", "7 7", "\t7", "٣", "+7", "999999937"]
    ),
)
LISTS = st.one_of(st.lists(st.integers(0, 200_000).map(str), max_size=6), st.lists(NUMBERS, max_size=4))
KEYS = st.sampled_from(
    ['"prompt"', '"prompt" ', '"\\u0070rompt"', '"Prompt"', '"max_tokens"', '"x"', '"user"', '"prompt\\""']
)
VALUES = st.one_of(
    st.builds(
        lambda items, by, pad: f"[{pad}{by.join(items)}{pad}]",
        LISTS,
        st.sampled_from([",", ", ", " ,", ",  "]),
        st.sampled_from(["", " "]),
    ),
    st.sampled_from(
        ["5", '"\\"prompt\\": [1,2]"', '{"prompt":[1, 2]}', '{"prompt": [999999937]}', "[[1,2],[3]]", "null"]
    ),
)
BODIES = st.lists(st.tuples(KEYS, VALUES), max_size=4).map(
    lambda fields: "{" + ",".join(f"{k}:{v}" for k, v in fields) + "}"
)


def parsed(body: bytes) -> Any:
    try:
        found = parse_body(Completion, body, 1 << 20)
    except ApiError as error:
        return error.status, error.message, error.param
    prompt = found.prompt
    is_ids = isinstance(prompt, np.ndarray)
    assert not is_ids or prompt.dtype == np.int32
    rest = {name: value for name, value in found if name != "prompt"}
    return is_ids, [p.tolist() if isinstance(p, np.ndarray) else p for p in found.prompts], rest, found.model_extra


@pytest.mark.filterwarnings("error::DeprecationWarning", "error::RuntimeWarning")
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES, cut=st.integers(0, 3), piece=st.sampled_from([4, 9, 1 << 16]))
@example(body='{"prompt":[1, 02]}', cut=0, piece=9)
@example(body='{"prompt":[1,,2]}', cut=0, piece=9)
@example(body='{"prompt":[1 2,3]}', cut=0, piece=9)
@example(body='{"prompt":[4294967297,3]}', cut=0, piece=9)
@example(body='{"x":{"prompt":[1,2]},"prompt":[3,4]}', cut=0, piece=9)
@example(body='{"x":{"prompt":[1,2]},"prompt":[999999937]}', cut=0, piece=9)
@example(body='{"prompt":[1,2],"prompt":"y"}', cut=0, piece=9)
def test_any_body_is_read_as_before(monkeypatch: pytest.MonkeyPatch, body: str, cut: int, piece: int) -> None:
    text = (body[: len(body) - cut] if cut else body).encode()
    with monkeypatch.context() as patch:
        patch.setattr(long_prompts, "MIN_IDS_BYTES", 0)
        patch.setattr(long_prompts, "PIECE", piece)
        patch.setattr(known_prefixes, "MIN_CHARS", 0)
        found = parsed(text)
    with monkeypatch.context() as patch:
        patch.setattr(schemas, "parse_long_prompt", lambda body, max_ids: None)
        assert found == parsed(text)


@pytest.mark.parametrize("separators", [None, (",", ":")])
def test_no_id_of_a_long_prompt_becomes_a_python_int(
    separators: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(0).integers(0, 152_000, 50_000).tolist()
    seen: list[int] = []
    validate = Completion.model_validate_json
    monkeypatch.setattr(Completion, "model_validate_json", lambda body: seen.append(len(body)) or validate(body))
    found = parse_body(Completion, json.dumps({"prompt": ids, "max_tokens": 3}, separators=separators).encode(), 50_000)
    assert found.prompts[0].tolist() == ids and found.max_tokens == 3 and max(seen) < 60


@pytest.mark.parametrize("comma", [b", ", b","])
def test_a_prompt_that_continues_another_is_read_from_there_on(comma: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations alternate, a turn is sent again, and an id goes on where another one ends."""
    monkeypatch.setattr(long_prompts, "KNOWN", known_prefixes.KnownPrefixes[bytes]())
    sizes: list[int] = []
    read = long_prompts._read_piece
    monkeypatch.setattr(long_prompts, "_read_piece", lambda text, comma: sizes.append(len(text)) or read(text, comma))
    begins = [[first] * 20_000 for first in (11, 12)]
    for turn, more in enumerate(([7], [7, 8], [7, 8], [7, 8, 9], [78], [7, 8, 9, 1])):
        for begin in begins:
            sizes.clear()
            found = read_ids(comma.join(b"%d" % i for i in begin + more))
            assert found is not None and found.tolist() == begin + more
            assert (sum(sizes) < 10) == (turn in (1, 2, 3, 5)), turn


def test_known_prefixes_are_the_latest_of_some_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prefixes, "MIN_CHARS", 10)
    known, ids = known_prefixes.KnownPrefixes[str](), np.zeros(1000, np.int32)
    texts = [f"{i:02d}" * 10 for i in range(known_prefixes.MAX_PREFIXES + 4)]
    known.add("ab", ids, "")
    for text in texts:
        known.add(text, ids, "")
    assert [known.find(f"{text}x")[0] for text in texts] == [*[""] * 4, *texts[4:]] and known.find("abc")[0] == ""
    continued, found = known.find(texts[-1])
    assert found is ids
    known.add(f"{continued}x", ids, continued)
    assert known.find(texts[-1])[0] == "" and known.find(texts[4])[0] == texts[4]
    monkeypatch.setattr(known_prefixes, "MAX_BYTES", 10_000)
    known.add("y" * 10, ids, "")
    assert [bool(len(known.find(text)[1])) for text in ("y" * 10, f"{continued}x", texts[-2])] == [True, True, False]


def test_many_values_are_counted_only_where_they_may_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MAX_VALUES", 8)
    scans: list[int] = []
    monkeypatch.setattr(schemas, "_scan", lambda body, scan=schemas._scan: scans.append(1) or scan(body))
    texts, ids = ["a"] * 13, [1] * 11
    cases = [("a" * 99, False, False), ("," * 99, True, False), (texts, True, True), (ids, False, False)]
    for prompt, scanned, refused in [*cases, (ids * 2, True, True)]:
        body = json.dumps({"prompt": prompt}).encode()
        if refused:
            with pytest.raises(ApiError, match="at most 8 values"):
                parse_body(Completion, body, 4)
        else:
            parse_body(Completion, body, 4)
        assert bool(scans) == scanned
        scans.clear()
