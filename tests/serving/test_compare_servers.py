"""The comparison of servers: all get the same requests, and no run repeats another's."""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
import pytest

from benchmarks import compare_servers


class Stub(BaseHTTPRequestHandler):
    """Answers in the form of vLLM, which has no details of usage if nothing was cached."""

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((tuple(body["prompt"]), body["max_tokens"]))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        pieces: list[dict[str, Any]] = [
            {"choices": [{"text": "a ", "finish_reason": None}]} for _ in range(body["max_tokens"])
        ]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        for piece in [*pieces, {"choices": [], "usage": usage}]:
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("at_once", [False, True])
def test_servers_get_the_same_requests(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    traces = {"document": compare_servers._document(3, 40, 5, 2), "turns": compare_servers._turns(2, 3, 20, 4, 2)}
    monkeypatch.setattr(compare_servers, "TRACES", traces)
    monkeypatch.setattr(compare_servers, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(count))
    seen: dict[str, list[Any]] = defaultdict(list)
    urls = {}
    for name in ("a", "b"):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        server.seen = seen[name]  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, daemon=True).start()
        urls[name] = f"http://127.0.0.1:{server.server_port}"
    rows = list(compare_servers.compare(urls, [*traces], 1, 2, at_once))
    assert [(row["trace"], row["engine"]) for row in rows] == [
        (trace, engine) for trace in traces for engine in ("a", "b")
    ]
    assert sorted(seen["a"]) == sorted(seen["b"])
    assert len(set(seen["a"])) == len(seen["a"]) == 2 * (4 + 6)  # the warm-up has prompts of its own
    firsts = {prompt[:40] for prompt, _ in seen["a"] if len(prompt) == 45}
    assert len(firsts) == 2  # a document in each run, shared by all its questions
    turns = sorted((prompt for prompt, _ in seen["a"] if len(prompt) < 40), key=len)
    assert all(any(turn[: len(before)] == before for before in turns[:4]) for turn in turns[4:])


def test_arrivals_follow_the_rate() -> None:
    """Times of 400 arrivals at 8 a second: their mean is 1/8 s, by the 5% of 1 / sqrt(400)."""
    phase = compare_servers._poisson(400, 8.0)(compare_servers.Draw(3))[0]
    gaps = np.diff([0.0, *(user[0].after_s for user in phase)])
    assert gaps.min() >= 0 and abs(gaps.mean() * 8 - 1) < 4 * 0.05
