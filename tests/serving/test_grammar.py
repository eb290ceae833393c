"""Which tokens an answer may go on with: whatever is drawn of them, it follows its schema."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from launch.job.grammar import BegunGrammar, Grammars
from launch.serving.grammars import of_schema
from tests.e2e.checkpoints import DEMO

VOCAB, EOS = 4096, 0
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(DEMO / "tokenizer.json", VOCAB, [EOS])


def allowed(grammar: BegunGrammar) -> list[int]:
    bits = np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.mark.parametrize("seed", range(20))
def test_any_walk_follows_the_schema(grammars: Grammars, seed: int) -> None:
    """And comes to its end: spaces between its parts are few."""
    grammar, drawn, rng = grammars.begun(of_schema(SCHEMA)), list[int](), random.Random(seed)
    while (may := allowed(grammar)) != [EOS]:
        drawn.append(rng.choice([token for token in may if token != EOS]))
        assert len(drawn) < 300
        grammar.take(drawn[-1])
        assert allowed(grammars.begun(of_schema(SCHEMA), drawn)) == allowed(grammar), "begun again in the middle"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    found = json.loads(tokenizer.decode(drawn))
    assert found["a"] in ("x", "yes") and all(isinstance(one, bool) for one in found["b"]) and len(found["b"]) <= 2
    grammar.take(EOS)
    assert allowed(grammar) == [EOS]


@pytest.mark.parametrize("layout", [{}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}])
def test_json_may_be_laid_out_in_the_usual_ways(grammars: Grammars, layout: dict[str, Any]) -> None:
    grammar = grammars.begun(of_schema(SCHEMA))
    text = json.dumps({"a": "yes", "b": [True, False]}, **layout)
    for token in PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))(text)["input_ids"]:
        assert token in allowed(grammar)
        grammar.take(token)
    assert allowed(grammar) == [EOS]


def test_what_cannot_be_followed_is_refused(grammars: Grammars) -> None:
    with pytest.raises(ValueError, match=r"the grammar cannot be followed: .*nonsense"):
        grammars.begun(of_schema({"type": "nonsense"}))
    with pytest.raises(ValueError, match="no end token"):
        Grammars(DEMO / "tokenizer.json", VOCAB, [])


def test_a_tokenizer_that_spells_otherwise_is_refused(tmp_path: Path) -> None:
    """A decoder of two kinds of bytes is taken for the first: each token with a space would spell something else."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, content["decoder"]],
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the bytes of its tokens are not those of the text"):
        Grammars(path, VOCAB, [EOS])
