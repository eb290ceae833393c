"""Clients that others make: LangChain and LiteLLM against a server of the demo model, and Anthropic's own.

They are installed where somebody wants to run this: `pip install langchain-openai litellm anthropic`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checkpoints import DEMO
from tests.e2e.cli import ROOT
from tests.serving.chats import USER, Talk
from tests.serving.test_adapters import OWN, SAYS

pytestmark = pytest.mark.clients
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


def test_langchain(url: str) -> None:
    module = pytest.importorskip("langchain_openai", reason="no LangChain: pip install langchain-openai")
    model = module.ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=NAME, max_tokens=8, temperature=0)
    whole = model.invoke("def read_json(path):")
    assert whole.content and whole.usage_metadata["output_tokens"] == 8
    assert "".join(piece.content for piece in model.stream("def read_json(path):")) == whole.content
    shape = {"title": "answer", "type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
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


async def test_anthropic(model: Path, talk: Talk) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    front = await talk(SAYS)
    client = anthropic.AsyncAnthropic(base_url=front.url, api_key="-", max_retries=0)
    wanted: dict[str, Any] = {"model": model.name, "max_tokens": 200, "messages": [USER], "tools": [OWN]}
    wanted["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = await client.messages.create(**wanted)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[2].input == {"city": "Paris"} and answer.stop_reason == "tool_use"
    async with client.messages.stream(**wanted) as stream:
        text = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Looking." and final.content[2].input == {"city": "Paris"}
    assert final.usage == answer.usage
    counted = await client.messages.count_tokens(**{k: v for k, v in wanted.items() if k != "max_tokens"})
    assert counted.input_tokens == answer.usage.input_tokens
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "sunny"}
    turn = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    await client.messages.create(**wanted | {"messages": turn})
    assert "<|im_start|>tool\nsunny" in front.session.tokens.tokenizer.decode(front.job.submits[-1].prompt)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        await client.messages.create(**wanted | {"model": "x"})
