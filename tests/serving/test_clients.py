"""Clients that others make, against a server of the demo model: LangChain, LiteLLM, OpenAI's and Anthropic's own.

They are installed where somebody wants to run this: `pip install langchain-openai litellm anthropic`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.checkpoints import DEMO
from tests.e2e.cli import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KEY, NAME = "secret", "demo-model"
QUESTION = [{"role": "user", "content": "def read_json(path):"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server that wants a key."""
    command = [sys.executable, "-m", "launch.serve", str(DEMO), "--port", "0", "--api-key", KEY]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    served = next((found[1] for line in process.stdout if (found := re.search(r"is served at (\S+)", line))), None)
    assert served is not None, process.wait(30)
    yield served
    process.terminate()
    process.communicate(timeout=60)


def test_openai(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    whole = client.chat.completions.create(model=NAME, messages=QUESTION, max_tokens=8, temperature=0)  # type: ignore[call-overload]
    pieces = client.chat.completions.create(
        model=NAME, messages=QUESTION, max_tokens=8, temperature=0, stream=True  # type: ignore[call-overload]
    )  # fmt: skip
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert said == whole.choices[0].message.content and whole.usage.completion_tokens == 8
    response = client.responses.create(
        model=NAME, input="def read_json(path):", max_output_tokens=8, temperature=0, store=False
    )
    assert response.output_text == said


def test_langchain(url: str) -> None:
    module = pytest.importorskip("langchain_openai", reason="no LangChain: pip install langchain-openai")
    model = module.ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=NAME, max_tokens=8, temperature=0)
    whole = model.invoke("def read_json(path):")
    assert whole.content and whole.usage_metadata["output_tokens"] == 8
    assert "".join(piece.content for piece in model.stream("def read_json(path):")) == whole.content
    shape = {
        "title": "answer",
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    found = module.ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=NAME, max_tokens=64, temperature=0)
    assert isinstance(found.with_structured_output(shape, method="json_schema").invoke("a number")["n"], bool)


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm", reason="no LiteLLM: pip install litellm")
    more = {"api_base": f"{url}/v1", "api_key": KEY, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(model=f"openai/{NAME}", **more)
    pieces = litellm.completion(model=f"openai/{NAME}", stream=True, **more)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model=f"openai/{NAME}", **more | {"api_key": "wrong"})


def test_anthropic(url: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="no Anthropic client: pip install anthropic")
    client = anthropic.Anthropic(base_url=url, api_key=KEY)
    whole = client.messages.create(model=NAME, messages=QUESTION, max_tokens=8, extra_body={"temperature": 0})
    with client.messages.stream(model=NAME, messages=QUESTION, max_tokens=8, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    assert whole.usage.output_tokens == 8 and json.dumps(whole.to_dict())
