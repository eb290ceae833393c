"""Measures the time of a core that the front end takes per token, from the engine's messages to the bytes of events.

    python -m tests.serving.front_end [record=FILE]

Tools are given, and 32 streams run. Answers are text, each token of which is an event, or a call, which comes whole. A
message brings a token to each stream, or four, as drafts do. The time includes writing to sockets, and no client.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from helix.engine.request import RequestUpdate
from launch.client.engine_messages import FrameDecoder, encode_tokens
from tests.serving.api_server import READY, ApiServer, FakeJob, api_server, silent, text_of, tokens_of
from tests.serving.chats import CHATS, USER, WEATHER, chat_model
from tests.serving.load import append_row

STREAMS, TOKENS, REPEATS = 32, 400, 5
MAX_US = 40.0  # limit to check
FUNCTION: dict[str, Any] = WEATHER["function"]
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [USER], "tools": [WEATHER]},
    "/v1/responses": {"input": "x", "tools": [{"type": "function"} | FUNCTION]},
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 2 * TOKENS,
        "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    },
}
PROSE = "The file has two parts: one reads the options, the other writes them, as JSON or as text. " * 40
ANSWERS = {
    "text": f"So.\n</think>\n\n{PROSE}",
    "call": f'So.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{PROSE}',
}


async def microseconds(server: ApiServer, path: str, ids: list[int], per_message: int) -> float:
    """Returns the microseconds of a core per token of answers that run together."""
    server.job.received.clear()
    connections = [await server.connect(path, BODIES[path] | {"stream": True}) for _ in range(STREAMS)]
    while len(server.job.submits) < STREAMS:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # the first events are sent
    names = [int(submit.id) for submit in server.job.submits]
    pieces = [ids[at : at + per_message] for at in range(0, len(ids), per_message)]
    messages = [encode_tokens([n for name in names for id in piece for n in (name, id)]) for piece in pieces]
    decoder, handle = FrameDecoder(), server.engine_client._handle_message
    begin = time.process_time()
    for message in messages:
        for update in decoder.feed(message):
            handle(update)
        for _ in range(3):  # turns of the event loop: the answers' tasks run, and sockets are written to
            await asyncio.sleep(0)
    spent = time.process_time() - begin
    for name in names:
        handle(RequestUpdate(name, finish_reason="stop"))
    for reader, writer in connections:
        assert b"data: " in await reader.read(-1)
        writer.close()
    return spent / (STREAMS * len(ids)) * 1e6


async def measured(directory: Path) -> list[dict[str, Any]]:
    """Runs the measurements; returns a row for each API and kind of answer."""
    model = str(chat_model(directory / "model", text_of("agent_with_reasoning.jinja")))
    job = FakeJob(silent, replace(READY, model=model, vocab=4100, max_length=1 << 15))
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    rows = []
    async with api_server(directory, job) as server:
        for path in BODIES:
            for answer, text in ANSWERS.items():
                row = {"cpu": cpu.partition(": ")[2], "path": path, "answer": answer, "streams": STREAMS}
                for size in (1, 4):
                    ids = tokens_of(text, model)[:TOKENS]
                    times = [await microseconds(server, path, ids, size) for _ in range(REPEATS)]
                    row[f"us_of_{size}_per_message"] = round(min(times), 1)
                rows.append(row)
    return rows


def main(record: str | None = None) -> int:
    """Prints and records the rows; returns 1 if one exceeds the limit."""
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with tempfile.TemporaryDirectory(prefix="helix-front-end-") as directory, runner:
        rows = runner.run(measured(Path(directory)))
    for row in rows:
        print(row)
        append_row(record, "front-end", row)
    return int(max(row["us_of_1_per_message"] for row in rows) > MAX_US)


if __name__ == "__main__":
    sys.exit(main(**dict(argument.split("=", 1) for argument in sys.argv[1:])))
