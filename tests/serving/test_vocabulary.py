"""Tokenizers that know more tokens than the model has logits for, or fewer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.answers.matcher import Grammars
from tests.serving.chats import COMPLETIONS
from tests.serving.front import DEMO, READY, FakeJob, Serve, changed

MORE = "<|more|>"  # token 4096, the first one beyond the logits
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": f"a{MORE}"}]}
FORM = {"response_format": {"type": "json_object"}}
OBJECT = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo model, whose tokenizer has a token more than the model has logits for."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 4096, "content": MORE})
    return changed(tmp_path / "model", {"tokenizer.json": tokenizer})


@pytest.mark.parametrize("vocab", [4096, 4097, 4200])
def test_masks_have_a_bit_for_each_logit(vocab: int, model: Path) -> None:
    """End tokens beyond them cannot be drawn either."""
    grammars = Grammars(model / "tokenizer.json", vocab, [0, 9999])
    answer = grammars.begun(OBJECT)
    assert len(answer.allowed()) == -(-vocab // 32)
    (brace,) = np.unpackbits(answer.allowed().view(np.uint8), bitorder="little").nonzero()[0].tolist()
    same = Grammars(DEMO / "tokenizer.json", 4096, [0]).begun(OBJECT)
    for token in (brace, brace + 2, 0):  # {}
        for one in (answer, same):
            one.take(token)
        assert answer.allowed()[:128].tolist() == same.allowed().tolist()
    for token in range(4096, vocab, 50):
        named = json.dumps({"grammars": [{"lark_grammar": f"start: <[{token}]>"}]})
        assert grammars.begun(named).allowed()[token // 32] == 1 << token % 32
    with pytest.raises(ValueError, match="Token range end too large"):
        grammars.begun(json.dumps({"grammars": [{"lark_grammar": f"start: <[{vocab}]>"}]}))


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": f"a{MORE}", "max_tokens": 1}),
    ("completions", {"prompt": ["a", MORE], "max_tokens": 1, "stream": True}),
    ("chat/completions", SAID | {"max_tokens": 1}),
    ("chat/completions", SAID | {"max_tokens": 1, "stream": True}),
    ("responses", {"input": MORE}),
    ("messages", SAID | {"max_tokens": 1}),
]


async def test_a_text_with_a_token_beyond_the_logits_is_refused(model: Path, serve: Serve) -> None:
    front = await serve(FakeJob(ready=replace(READY, model=str(model), guided=True)))
    for path, body in ASKED:
        answer = await front.post(f"/v1/{path}", body)
        what = f"contains '{MORE}', token 4096 of the tokenizer, and the model's vocabulary is [0, 4096)"
        assert answer.status_code == 400 and what in answer.json()["error"]["message"], answer.text
    # What the model has no token for may be in a form: as text, or not at all.
    answer = await front.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1} | FORM)
    assert answer.status_code == 200, answer.text
