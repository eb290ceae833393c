"""The whole server over two CPU ranks, and what becomes of it when one of its processes dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI

from launch import serve
from tests.e2e.checkpoints import DEMO
from tests.e2e.command_line import ENTRY, ROOT, Job, torchrun
from tests.serving.api_server import changed, metrics_of

SERVE = [sys.executable, "-m", "launch.serve"]
PROMPTS = ["def read_json(path):\n", "import os\n\n\nclass Path:"]
TOKENS = 24
SMALL = ["kv.tokens=8192", "decode.max_batch=4"]


class Server(Job):
    """`helix serve` at a port of its own, ready."""

    def __init__(self, directory: Path, *overrides: str, command: list[str] = SERVE) -> None:
        super().__init__(command, "serve.port=0", *SMALL, *overrides, log=directory / "log")
        self.wait_for(self.log, "is served at", 120)
        self.wait_for(self.log, "curl -N ")
        self.url = self.log.read_text().partition("is served at ")[2].partition("\n")[0]
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=90)

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return metrics_of(answer.read().decode())

    def until_health(self, status: int, seconds: float = 120) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            code, health = self.health()
            return health if code == status else None

        return self.until(look, f"never {status}", seconds)

    def gone(self, seconds: float = 120) -> None:
        """Waits until no process of it is left."""
        deadline = time.monotonic() + seconds
        while left := self.members():
            assert time.monotonic() < deadline, f"processes {left} are left"
            time.sleep(0.02)

    def complete(self, prompt: str, **more: Any) -> Any:
        return self.client.completions.create(
            **({"model": "demo-model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0} | more)
        )


@contextmanager
def served(directory: Path, *overrides: str) -> Iterator[Server]:
    server = Server(directory, *overrides)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `decode.prompts` makes of the prompts, greedily and then sampled."""
    directory = tmp_path_factory.mktemp("decoded")
    lines = [{"prompt": prompt} for prompt in PROMPTS] + [{"prompt": PROMPTS[0], "temperature": 0.9, "seed": 11}]
    (directory / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = Job(
        ENTRY, "layout.kvp=2", f"decode.prompts={directory}/p.jsonl", f"decode.output={directory}/o.jsonl",
        f"decode.max_tokens={TOKENS}", log=directory / "log",
    )  # fmt: skip
    ended = job.wait(120)
    assert ended.code == 0, ended.output
    return [json.loads(line)["text"] for line in (directory / "o.jsonl").read_text().splitlines()]


def schema_of(size: int) -> dict[str, Any]:
    """A format whose schema has some two characters of JSON for each of so many."""
    schema = {"name": "x", "schema": {"enum": ["yes"], "description": '"' * size}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def test_a_schema_that_is_too_large_reaches_no_rank(server: Server) -> None:
    """One that is as large as may be is followed, in frames that the ranks read."""
    for size in (1 << 24, (1 << 19) + 1):
        with pytest.raises(BadRequestError, match="at most 524288") as refused:
            server.complete("x", extra_body=schema_of(size))
        assert refused.value.param == "response_format" and server.health()[0] == 200
    assert server.complete("x", extra_body=schema_of((1 << 18) - 150)).choices[0].text == '"yes"'
    assert server.metrics()["restarts_total"] == 0


def test_tokens_are_those_of_decoding(server: Server, decoded: list[str]) -> None:
    assert [server.complete(prompt).choices[0].text for prompt in PROMPTS] == decoded[:2]
    assert server.complete(PROMPTS[0], temperature=0.9, seed=11).choices[0].text == decoded[2]
    pieces = list(server.complete(PROMPTS[1], stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == decoded[1]
    assert pieces[-1].usage.completion_tokens == TOKENS


def test_the_printed_line_works(server: Server) -> None:
    """A chat, as the model has a template."""
    shown = server.log.read_text()
    line = next(line for line in shown.splitlines() if line.startswith("curl -N "))
    assert f"chat page: {server.url}" in shown
    output = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60).stdout
    assert "/v1/chat/completions" in line and output.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in output or '"finish_reason":"stop"' in output  # it is drawn


def test_the_printed_line_fits_a_model_without_template_and_a_server_with_a_key(tmp_path: Path) -> None:
    settings = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"chat_template": None}
    files = {"tokenizer_config.json": settings, "generation_config.json": {"temperature": 0.2, "num_beams": 4}}
    model = changed(tmp_path / "base", files)
    server = Server(tmp_path, "--api-key=key-1", f"model.path={model}")
    shown = server.log.read_text()
    line = next(line for line in shown.splitlines() if line.startswith("curl -N "))
    given = os.environ | {"HELIX_API_KEY": "key-1"}
    output = subprocess.run(line, shell=True, env=given, capture_output=True, text=True, timeout=60).stdout
    server.kill()
    assert "/v1/completions" in line and output.endswith("data: [DONE]\n\n") and "key-1" not in shown
    assert "default sampling parameters: temperature=0.2 (generation_config.json)" in shown
    assert "ignored: num_beams=4 (generation_config.json)" in shown


def test_a_client_that_leaves_makes_room(server: Server) -> None:
    """The engine gives up what nobody reads, long before its 4,000 tokens."""
    stream = server.complete("x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    while (found := server.metrics())["num_requests_running"]:
        pass
    assert found['request_success_total{finished_reason="abort"}'] == 1
    server.complete("x", max_tokens=1)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_a_pause(server: Server, victim: int) -> None:
    """503 at once, the same tokens to the end, and room for the next."""
    expected = server.complete("def f", max_tokens=80, temperature=0.9, seed=5).choices[0].text
    stream = server.complete("def f", max_tokens=80, temperature=0.9, seed=5, stream=True)
    texts = [next(stream).choices[0].text]
    reading = threading.Thread(target=lambda: texts.extend(piece.choices[0].text for piece in stream))
    reading.start()
    os.kill(server.rank(victim), signal.SIGKILL)
    state = server.until_health(503)
    assert state["state"] == "restarting" and state["reason"]
    server.until_health(200)
    reading.join(120)
    assert not reading.is_alive() and "".join(texts) == expected


def test_a_signal_lets_running_requests_end(tmp_path: Path) -> None:
    server = Server(tmp_path, "serve.drain_s=300")
    stream = server.complete("def f", max_tokens=80, stream=True)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    assert server.until_health(503)["state"] == "draining"
    assert "draining: 1 running request has up to 300 s to finish (serve.drain_s)" in server.log.read_text()
    assert sum(1 for _ in stream) and server.wait(120).code == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_control_c_frees_the_port_and_a_second_one_does_not_wait(tmp_path: Path, processes: int) -> None:
    server = Server(tmp_path, f"serve.processes={processes}")
    stream = server.complete("def f", max_tokens=5000, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    server.process.send_signal(signal.SIGINT)
    server.wait_for(server.log, "another control-C or SIGTERM stops the server now")
    with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
        next(stream)
        server.process.send_signal(signal.SIGINT)
        ended = server.wait(60)
    assert ended.code == 0 and "1 request was cut off" in ended.output, ended
    with pytest.raises(APIError, match="the server has shut down"):
        list(stream)


def test_several_processes_outlive_a_rank(tmp_path: Path) -> None:
    """Four connections, which the kernel spreads over two processes; each process connects to the new ranks."""
    server, texts = Server(tmp_path, "serve.processes=2"), [""] * 4
    expected = server.complete("def f", max_tokens=80).choices[0].text
    streams = [server.complete("def f", max_tokens=80, stream=True) for _ in texts]

    def read(number: int) -> None:
        for piece in streams[number]:
            texts[number] += piece.choices[0].text

    texts[:] = [next(stream).choices[0].text for stream in streams]
    readers = [threading.Thread(target=read, args=(number,)) for number, _ in enumerate(streams)]
    for reader in readers:
        reader.start()
    os.kill(server.rank(0), signal.SIGKILL)
    server.until_health(503)
    server.until_health(200)
    for reader in readers:
        reader.join(120)
        assert not reader.is_alive()
    assert texts == [expected] * 4
    server.kill()


def test_a_front_end_that_dies_takes_the_ranks_along(tmp_path: Path) -> None:
    """Its weights are random, which its first line says."""
    server = Server(tmp_path, "model.load=random")
    output = server.log.read_text()
    assert (
        "weights are random (model.load=random)" in output.partition("\n")[0]
        and "with random weights is served at" in output
    )
    server.process.kill()
    server.gone()


def test_ranks_of_torchrun_outlive_a_server_beside_them(tmp_path: Path) -> None:
    """One that follows finds what the one before left in the cache; ranks that die are waited for."""
    options = ["layout.kvp=2", *SMALL, f"serve.socket={tmp_path}/job.sock"]
    ranks = Job(torchrun(2), *options, log=tmp_path / "ranks")
    for turn in range(2):
        (directory := tmp_path / str(turn)).mkdir()
        server = Server(directory, f"serve.attach={tmp_path}/job.sock")
        usage = server.complete("# Said to each of two servers. " * 20).usage
        assert (usage.prompt_tokens_details.cached_tokens > 100) == (turn == 1)
        if turn == 0:
            server.process.send_signal(signal.SIGTERM)
            assert server.wait(60).code == 0 and ranks.process.poll() is None
    ranks.kill()
    assert server.until_health(503)["state"] == "restarting"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60).code == 0


@pytest.mark.parametrize(
    "override, words",
    [
        ("serve.host=0.0.0.0", "serve.api_keys=FILE"),
        ("serve.host=nowhere.invalid", "serve.api_keys=FILE"),
        ("serve.host=127.0.0.256", "serve.api_keys=FILE"),
        ("serve.host=192.0.2.1 serve.open=true", "serve.host=192.0.2.1"),
        ("serve.api_keys=/nowhere", "/nowhere"),
        ("serve.chat_template=/nowhere", "/nowhere"),
        ("serve.port=70000", "serve.port=70000"),
        ("serve.hang_s=0", "serve.hang_s"),
        ("serve.hosts=x", "serve.hosts is unknown"),
        ("serve.socket=/tmp/x", "set serve.attach"),
        ("decode=sampled", "decode.temperature=0.8 is for `helix run`"),
        ("--seed 5", "--seed is not an option of helix serve"),
    ],
)
def test_mistakes_are_one_line(override: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["serve.port=0", *override.split()]) == 1
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1 and words in output


def test_ranks_that_do_not_start_say_why(tmp_path: Path) -> None:
    ended = Job(SERVE, "serve.port=0", "layout.kvp=2", "layout.tpa=3", log=tmp_path / "log").wait(90)
    first, *rest = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert ended.code == 1 and "tpa" in first and rest == ["error: the ranks did not start"]


def test_the_front_end_has_no_torch() -> None:
    program = (
        "import sys; from launch.serving import server; from launch.client.chat_tokenizer import ChatTokenizer; "
        f"t = ChatTokenizer({str(DEMO)!r}); assert t.encode_segments('a').size; "
        "from launch.answers.answer_parser import Parser; Parser({'content': {}}, '', []); "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
