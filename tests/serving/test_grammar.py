"""Which tokens an answer may go on with: whatever is drawn of them, it follows its schema."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from launch.answers.grammar_matcher import GrammarMatcher, GrammarMatcherFactory
from launch.answers.grammars import StructuredOutput, Tag, structured_output_grammar
from launch.answers.json_schemas import closed_schema, supported_schema
from tests.e2e.checkpoints import DEMO
from tests.serving.transcripts import KNOWN

VOCAB, EOS = 4096, 0
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def schema_grammar(schema: dict[str, Any]) -> str:
    return json.dumps(
        {"grammars": structured_output_grammar(StructuredOutput("response_format", "json", schema), {}, (), [EOS])}
    )


TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
SMALL = {"a": "yes", "b": [True, False]}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(2000)}}


@pytest.fixture(scope="module")
def grammars() -> GrammarMatcherFactory:
    return GrammarMatcherFactory(DEMO / "tokenizer.json", VOCAB, [EOS])


def allowed(grammar: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(grammar.token_bitmask().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.mark.parametrize("seed", range(20))
def test_any_walk_follows_the_schema(grammars: GrammarMatcherFactory, seed: int) -> None:
    """And comes to its end: spaces between its parts are few."""
    grammar, output_token_ids, rng = grammars.create_matcher(schema_grammar(SCHEMA)), list[int](), random.Random(seed)
    while (may := allowed(grammar)) != [EOS]:
        output_token_ids.append(rng.choice([token for token in may if token != EOS]))
        assert len(output_token_ids) < 300
        grammar.accept_token(output_token_ids[-1])
        assert allowed(grammars.create_matcher(schema_grammar(SCHEMA), output_token_ids)) == allowed(grammar), (
            "begun again in the middle"
        )
    found = json.loads(TOKENIZER.decode(output_token_ids))
    assert found["a"] in ("x", "yes") and all(isinstance(one, bool) for one in found["b"]) and len(found["b"]) <= 2
    grammar.accept_token(EOS)
    assert allowed(grammar) == [EOS]


@pytest.mark.parametrize(
    "schema, text",
    [
        (SCHEMA, json.dumps(SMALL)),
        (SCHEMA, json.dumps(SMALL, indent=4)),
        (SCHEMA, json.dumps(SMALL, indent="\t")),
        (SCHEMA, json.dumps(SMALL, separators=(",", ":"))),
        (MANY, '{"p7": true}'),  # of 2,000 that may be left out, each may come next
    ],
    ids=["plain", "indented", "tabs", "dense", "many properties"],
)
def test_json_may_be_laid_out_in_the_usual_ways(
    grammars: GrammarMatcherFactory, schema: dict[str, Any], text: str
) -> None:
    grammar = grammars.create_matcher(schema_grammar(schema))
    for token in TOKENIZER.encode(text).ids:
        assert token in allowed(grammar)
        grammar.accept_token(token)
    assert grammar.error is None and EOS in allowed(grammar) and (schema is MANY or allowed(grammar) == [EOS])


def test_json_follows_its_schema_between_marks(grammars: GrammarMatcherFactory) -> None:
    """A mark in free text begins it; behind its end there is free text again."""
    rng = random.Random(3)
    tags = [Tag("<f=x>", "<f", SCHEMA, "</f>")]
    grammar = grammars.create_matcher(
        json.dumps(
            {"grammars": structured_output_grammar(StructuredOutput("x", "structural_tag", tags), {}, (), [EOS])}
        )
    )
    for text in ("a < b, and { ", "<f", "", " so, ", "<f", "", "."):
        if text == "":  # what stands between the marks is certain, but for the JSON
            output_token_ids = list[int]()
            while EOS not in (may := allowed(grammar)):
                output_token_ids.append(rng.choice(may))
                grammar.accept_token(output_token_ids[-1])
                assert len(output_token_ids) < 300
            inside = re.match(r"=x>(.*)</f>", TOKENIZER.decode(output_token_ids), re.S)  # the last token may hold more
            assert inside is not None and json.loads(inside[1])["a"] in ("x", "yes")
        for token in TOKENIZER.encode(text).ids:
            assert token in allowed(grammar) and EOS in allowed(grammar)
            grammar.accept_token(token)
    assert grammar.error is None


def test_a_mark_may_be_a_token(tmp_path: Path) -> None:
    """One that is no text: free text cannot hold it, and it begins JSON."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|call|>"])
    tokenizer.save(str(path := tmp_path / "tokenizer.json"))
    mark = tokenizer.token_to_id("<|call|>")
    tags = [Tag("<|call|>{", "<|call|>", {}, "")]
    parts = structured_output_grammar(
        StructuredOutput("x", "structural_tag", tags), {"<|call|>": mark}, {"<|call|>"}, [EOS]
    )
    grammar = GrammarMatcherFactory(path, VOCAB + 1, [EOS]).create_matcher(json.dumps({"grammars": parts}))
    grammar.accept_token(tokenizer.token_to_id("a"))
    assert mark in allowed(grammar)
    grammar.accept_token(mark)
    assert [tokenizer.decode([token])[0] for token in allowed(grammar)] == ["{"] * len(allowed(grammar))


def test_what_is_certain_is_not_looked_for_ahead(grammars: GrammarMatcherFactory) -> None:
    """Or a mask of a text of 300,000 letters would take as many tokens' time, and not a letter's."""
    grammar = grammars.create_matcher(
        json.dumps({"grammars": structured_output_grammar(StructuredOutput("x", "regex", "a{300000}b"), {}, (), [EOS])})
    )
    assert grammar._matcher.compute_ff_tokens() == [] != allowed(grammar)


def test_what_cannot_be_followed_is_refused(grammars: GrammarMatcherFactory) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        grammars.create_matcher(schema_grammar({"type": "nonsense"}))
    with pytest.raises(ValueError, match="no end token"):
        GrammarMatcherFactory(DEMO / "tokenizer.json", VOCAB, [])


def test_a_tokenizer_that_spells_otherwise_is_refused(tmp_path: Path) -> None:
    """A decoder of two kinds of bytes is taken for the first: each token with a space would spell something else."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, content["decoder"]],
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="decoding tokens to bytes does not give back the text"):
        GrammarMatcherFactory(path, VOCAB, [EOS])


@pytest.mark.parametrize("row", KNOWN["answers"], ids=lambda row: str(row["schema"]))
def test_schemas_are_rewritten_or_refused_by_their_path(row: dict[str, Any], grammars: GrammarMatcherFactory) -> None:
    """What JSON Schema allows to ignore goes; what cannot be enforced is named."""
    if "refused" in row:
        with pytest.raises(ValueError, match=re.escape(row["refused"])):
            schema_grammar(row["schema"])
    else:
        assert supported_schema(row["schema"]) == row.get("becomes", row["schema"])
        grammars.create_matcher(schema_grammar(row["schema"]))


def test_values_and_names_of_properties_are_no_schemas_to_close() -> None:
    value = {"const": {"properties": {"a": 1}}}
    inner = {"properties": {"properties": value}}
    assert closed_schema({"items": inner}) == {"items": inner | {"additionalProperties": False}}
