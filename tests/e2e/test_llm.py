"""Decoding from Python: ranks that an LLM starts, and ranks in which one is made."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helix
from launch.cli import COMMANDS, main
from launch.client.schemas import Completion
from launch.llm import LLM, as_prompts, checked_body
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.command_line import ROOT, Job, as_copies, torchrun

LENGTHS = (7, 17)
PYTHON = "def read_json(path):"


def ranks() -> dict[int, int]:
    """Process ids of the ranks beneath this process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rank = (entry / "comm").read_text().strip().rpartition(" ")
            above = int(entry.name)
            while name == "helix rank" and above not in (os.getpid(), 0):
                above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if name == "helix rank" and above == os.getpid():
            found[int(rank)] = int(entry.name)
    return found


@pytest.fixture(scope="module", autouse=True)
def copies() -> Iterator[None]:
    """Ranks that this process starts."""
    with pytest.MonkeyPatch.context() as patch:
        as_copies(patch)
        yield


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(DEMO, overrides=["kv.tokens=8192", "decode.max_tokens=6"]) as llm:
        yield llm


def test_a_plain_process_starts_its_ranks_itself() -> None:
    wanted = oracle("qwen3", LENGTHS, 12)
    with LLM(checkpoint("qwen3"), kvp=2, hopb="on", overrides=["kv.tokens=64", "kv.page_size=16"]) as llm:
        running = ranks()
        assert llm.layout.startswith("helix kvp=2") and sorted(running) == [0, 1]
        outputs = llm.generate([c.prompt for c in wanted], max_tokens=12)
        assert [o.token_ids[: len(c.tokens)] for o, c in zip(outputs, wanted, strict=True)] == [
            c.tokens for c in wanted
        ]
        refused = llm.generate([(1, 999), (1, 2)], max_tokens=2)
        assert refused[0].finish_reason == "error" and "has token id 999, but the model's vocabulary" in (
            refused[0].reason or ""
        )
        assert len(refused[1].token_ids) == 2
        (longer,) = llm.generate((1, 2, 3), max_tokens=400)
        assert longer.finish_reason == "error" and "exceed the KV cache's capacity" in (longer.reason or "")
        with pytest.raises(ValueError, match="temperature"):
            llm.generate([(1, 2)], temperature=-1.0)
        os.kill(running[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"ranks failed: rank 1 was killed by signal 9"):
            llm.generate([(1, 2)] * 3, max_tokens=40)
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([(1, 2)])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in running.values())


def test_ranks_that_cannot_start_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entry.py").write_text("import sys\nprint('a line')\nsys.exit('error: planted')\n")
    monkeypatch.setattr("launch.client.supervisor.ENTRY", tmp_path / "entry.py")
    with pytest.raises(RuntimeError, match="ranks failed: planted\na line\nerror: planted"):
        LLM(checkpoint("qwen3"))


def test_options_are_those_of_the_settings_where_they_are_unset(demo: LLM) -> None:
    (short,) = demo.generate(PYTHON)
    (unset,) = demo.generate(PYTHON, max_tokens=None, temperature=None)
    (longer,) = demo.generate(PYTHON, max_tokens=12)
    assert len(short.token_ids) == 6 and unset == short and longer.token_ids[:6] == short.token_ids
    (stopped,) = demo.generate(PYTHON, max_tokens=12, stop='"""')
    assert stopped.finish_reason == "stop" and longer.text.startswith(f'{stopped.text}"""')
    (held,) = demo.generate(PYTHON, max_tokens=12, stop='"""', min_tokens=12)
    assert (held.text, held.finish_reason) == (longer.text, "length")
    (biased,) = demo.generate(PYTHON, max_tokens=3, logit_bias={77: 100.0})
    assert biased.token_ids == (77, 77, 77)
    (other,) = demo.generate(PYTHON, max_tokens=12, repetition_penalty=2.0)
    assert other.token_ids != longer.token_ids
    (form,) = demo.generate("x = ", max_tokens=40, schema={"enum": ["yes"]})
    assert (form.text, form.finish_reason) == ('"yes"', "stop")
    with pytest.raises(ValueError, match="response_format is not usable"):
        demo.generate("x = ", schema={"type": "nothing"})
    with pytest.raises(ValueError, match=r"max_new_tokens is unknown; known: max_tokens, .*did you mean max_tokens"):
        demo.generate(PYTHON, max_new_tokens=3)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=r"max_tokens=.* must be at least 1"):
            demo.generate(PYTHON, max_tokens=wrong)


FORKS = """
import os, sys
from helix import LLM

def forked(what):
    if (pid := os.fork()) == 0:
        try:
            what()
        except RuntimeError as error:
            print(f"{what.__name__}: {error}", flush=True)
        leave = sys.exit
        globals().clear()  # frees all that may be freed
        leave(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5

def generate(): return llm.generate("def f(", max_tokens=2)[0].token_ids
def stream(): next(parts)
def close(): llm.close()
def another():
    with LLM("assets/demo-model", kvp=1, overrides=["kv.tokens=256"]) as own:
        print("another:", own.generate("def f(", max_tokens=2)[0].token_ids == before, flush=True)

with LLM("assets/demo-model", kvp=1, overrides=["kv.tokens=8192"]) as llm:
    before = generate()
    parts = llm.stream("def f(", max_tokens=60, ignore_eos=True)
    next(parts)
    for what in generate, stream, close, another:
        forked(what)
    assert os.listdir(llm._directory) and list(parts) and generate() == before
print("closed", os.path.exists(llm._directory))
"""


def test_a_fork_of_the_process_fails_at_once_and_leaves_the_ranks_alone(tmp_path: Path) -> None:
    ended = Job([sys.executable, "-c", FORKS], log=tmp_path / "log").wait()
    ours = r"this LLM belongs to process \d+, and process \d+ is a fork of it: call it in the .*"
    lines = [f"generate: {ours}", f"stream: {ours}", "another: True", "closed False", ""]
    assert ended.code == 0 and re.fullmatch("\n".join(lines), ended.output), ended


def test_several_answers_with_their_logprobs(demo: LLM) -> None:
    (output,) = demo.generate(PYTHON, n=3, temperature=1.0, seed=5, logprobs=2, max_tokens=4)
    assert [len(one.token_ids) for one in output.outputs] == [4, 4, 4]
    (again,) = demo.generate(PYTHON, temperature=1.0, seed=6, max_tokens=4)
    assert again.text == output.outputs[1].text != output.text, "answer i uses seed + i"
    assert [len(position_logprobs.best) for position_logprobs in output.logprobs] == [2] * 4 and output.logprobs[
        0
    ].sampled <= 0
    (greedy,) = demo.generate(PYTHON, logprobs=1, max_tokens=2)
    assert [position_logprobs.best[0][0] for position_logprobs in greedy.logprobs] == [*greedy.token_ids]


def test_a_stream_is_the_answer(demo: LLM) -> None:
    stream = demo.stream(PYTHON, max_tokens=12)
    pieces = [*stream]
    (whole,) = demo.generate(PYTHON, max_tokens=12)
    assert len(pieces) > 3 and stream.output is not None and "".join(pieces) == whole.text == stream.output.text
    document = PYTHON * 40
    first, second = (demo.generate(document + end)[0] for end in (" 7", " 12"))
    assert first.cached_tokens < 0.9 * first.prompt_tokens < second.cached_tokens < second.prompt_tokens
    left = demo.stream(PYTHON, max_tokens=4000)
    next(left)
    left.close()
    assert demo.generate(PYTHON)[0].finish_reason == "length", "an answer that nobody reads has ended"
    with pytest.raises(ValueError, match="n=2: a stream has one answer"):
        demo.stream(PYTHON, n=2)


def test_chats_go_through_the_template(demo: LLM, tmp_path: Path) -> None:
    user = {"role": "user", "content": PYTHON}
    (plain,), (first, second) = demo.generate(PYTHON), demo.chat([[user], [user, user]])
    assert first.text == plain.text and first.message == {"role": "assistant", "content": plain.text}
    assert second.prompt_tokens == 2 * first.prompt_tokens + 1
    (further,) = demo.chat([user, first.message, user])
    assert further.prompt_tokens > second.prompt_tokens and further.finish_reason == "length"
    stream = demo.stream([user])
    assert "".join(stream) == plain.text and stream.output is not None and stream.output.message == first.message
    with pytest.raises(ValueError, match=r"messages.0.role='nobody'"):
        demo.chat([{"role": "nobody", "content": "x"}])
    with pytest.raises(ValueError, match="the chat template does not use them"):
        demo.chat([user], tools=[{"type": "function", "function": {"name": "f"}}])


INSIDE = """
import os, sys
import torch.distributed as dist
from helix import LLM
dist.init_process_group("gloo")
with LLM(sys.argv[1], kvp=2) as llm:
    outputs = llm.chat([{"role": "user", "content": "def f(x):"}], max_tokens=8)
dist.barrier()
print("rank", os.environ["RANK"], len(outputs), flush=True)
"""


@pytest.mark.slow
def test_inside_ranks_that_have_a_group_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(INSIDE)
    command = ["env", f"PYTHONPATH={ROOT}", *torchrun(2)[:-1], str(tmp_path / "mine.py"), str(DEMO)]
    ended = Job(command, log=tmp_path / "log").wait()
    assert ended.code == 0 and {"rank 0 1", "rank 1 0"} <= {*ended.output.splitlines()}, ended.output


def test_the_lines_of_the_readme_are_a_whole_program(tmp_path: Path) -> None:
    """The script needs no guard around its main part, and nobody outlives it."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    program = code[1] + 'print(len(llm.generate("import os", max_tokens=4)), "output of one text")\n'
    (tmp_path / "mine.py").write_text(program.replace('"DIR"', repr(str(DEMO))).replace("=64", "=4"))
    ended = Job(["env", f"PYTHONPATH={ROOT}", sys.executable, str(tmp_path / "mine.py")], log=tmp_path / "log").wait()
    assert ended.code == 0 and len(ended.output.splitlines()) >= 3 and "Error" not in ended.output, ended.output
    assert ended.output.endswith("\n1 output of one text\n")


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(tpa=4), "tpa=4 does not fit"),
        (dict(path="/nowhere"), "is not a directory"),
        (dict(overrides=["layout.kvpp=2"]), r"layout\.kvpp is unknown"),
        (dict(hopb="none"), "hopb=none is now hopb=off"),
        (dict(layout="dp", dp=2, overrides=["hopb=on"]), "hopb=on could overlap: set hopb=off"),
        (dict(layout="auto", kvp=2), "layout=auto chooses"),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(**{"path": checkpoint("qwen3")} | given)


ONE, ALL = r"prompt [01] is .*: pass a text or a list of token ids", r"prompts are .*: pass a text, a list of token"


@pytest.mark.parametrize(
    "given, prompts",
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "bc"], ["a", "bc"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (["text", (5,)], ["text", [5]]),
        ([[]], [[]]),
        ([], []),
        *((given, ONE) for given in ([b"text"], ["text", 5], [{"prompt": "text"}], [None], [[1, "a"]], [[1.5]])),
        *((given, ALL) for given in (b"text", {"prompt": "text"}, None, 5)),
    ],
)
def test_one_prompt_or_several(given: Any, prompts: list[Any] | str) -> None:
    """A text in place of prompts: what is said of what is none."""
    if not isinstance(prompts, str):
        assert as_prompts(given) == prompts
        return
    with pytest.raises(ValueError, match=prompts):
        as_prompts(given)


def test_numbers_of_numpy_are_numbers() -> None:
    fields = {"max_tokens": np.int64(2), "temperature": np.float32(0.5), "stop_token_ids": torch.tensor([3])}
    body = checked_body(Completion, fields | {"prompt": "text", "ignore_eos": np.bool_(True)})
    assert (body.max_tokens, body.temperature, body.stop_token_ids, body.ignore_eos) == (2, 0.5, [3], True)
    with pytest.raises(ValueError, match=r"cannot be written as JSON: \{3\} is of type set"):
        checked_body(Completion, {"prompt": "text", "stop_token_ids": {3}})
    with pytest.raises(ValueError, match=r"cannot be written as JSON: .*'\\ud800'.*surrogates not allowed"):
        checked_body(Completion, {"prompt": "\ud800"})


def test_the_package_and_the_command_name_what_they_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["helix", "--help"])
    main()
    output = capsys.readouterr().out
    assert all(name in output for name in COMMANDS)
    monkeypatch.setattr(sys, "argv", ["helix", "dance"])
    with pytest.raises(SystemExit, match=r"error: dance .*known: run, serve, chat, info, plan, sweep"):
        main()
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        helix.LLMs  # noqa: B018
