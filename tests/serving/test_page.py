"""The page in a real browser: what its user sees, over a job that says what a test wants. `make test-page`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from launch.serving.frames import Progress, Submit
from tests.serving.browser import BINARY, MISSING, Page, browser
from tests.serving.front import READY, FakeJob, Front, front, until, without_template
from tests.serving.test_chat import SPECIAL, TEMPLATE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(BINARY is None, reason=MISSING),
]
Check = Callable[[Front, Page], Awaitable[None]]
STATE = "document.getElementById('state')?.textContent"
TEXT = "document.getElementById('text').value"
TALK = "document.getElementById('talk').innerText"
FREE = "document.getElementById('stop').disabled"
SHIFTS = (
    "window.shifts ??= 0, new PerformanceObserver(l => { for (const e of l.getEntries()) window.shifts += e.value })"
)
# Text against what is behind it, by WCAG 2.2's formula; at least 4.5 can be read.
CONTRAST = """(() => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const lit = (c) => rgb(c).slice(0, 3).map((v, i) => linear(v / 255) * [.2126, .7152, .0722][i])
    .reduce((a, b) => a + b);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (rgb(c)[3] !== 0) return c; } };
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && !e.disabled
    && (e.tagName === "TEXTAREA" || [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())));
  return shown.map((e) => [lit(getComputedStyle(e).color), lit(behind(e))])
    .map(([a, b]) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05)).reduce((a, b) => Math.min(a, b));
})()"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer, with a chat template."""
    directory = tmp_path_factory.mktemp("chat-model")
    tokenizer = AutoTokenizer.from_pretrained(READY.model)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


class Teller(FakeJob):
    """A job that says texts, each when the test wants it."""

    def __init__(self, model: Path) -> None:
        super().__init__(self._tell)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.end = 0
        if not self._tokenizer.chat_template:
            self.ready = replace(READY, model=str(model))
        else:
            self.end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
            self.ready = replace(READY, model=str(model), vocab=4100, eos=(0, self.end))

    async def _tell(self, job: FakeJob, submit: Submit) -> None:
        """What the test says goes to the last request."""

    async def write(self, text: str, finish: str | None = None) -> None:
        """Says a text, a token at a time."""
        for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]:
            await self.say(self.submits[-1], [token])
        if finish is not None:
            await self.say(self.submits[-1], [self.end] if finish == "stop" else [], finish)

    def prompt(self) -> str:
        return self._tokenizer.decode(self.submits[-1].ids)


def run(check: Check, directory: Path, model: Path | None = None, /, look: Any = None, **settings: Any) -> None:
    """Runs a check beside a page; in the end the page has wanted nothing of others and complained of nothing."""

    async def with_page() -> None:
        async with (
            front(directory, Teller(model or without_template(directory)), **settings) as made,
            browser() as page,
            asyncio.timeout(150),
        ):
            await page.open(f"{made.url}/", **(look or {}))
            await check(made, page)
            assert page.requests and all(url.startswith(f"{made.url}/") or url == "data:," for url in page.requests)
            assert [c for c in page.complaints if not re.search(r"status of (401|503)|ERR_CONNECTION", c)] == []

    asyncio.run(with_page())


async def ready(page: Page) -> None:
    await page.until(f"{STATE} === 'Ready.'")


async def send(front: Front, page: Page, control: bool = False) -> None:
    """Presses Enter, and waits for the request."""
    before = len(front.job.submits)
    await page.press("Enter", control=control)
    await until(lambda: len(front.job.submits) == before + 1)


def test_a_text_is_continued_and_taken_back(tmp_path: Path) -> None:
    async def check(front: Front, page: Page) -> None:
        job, begin = front.job, "def read_json(path):\n"
        await ready(page)
        await page.screenshot(tmp_path / "text.png")
        assert await page.value("document.title") == "demo-model" and await page.value(TEXT) == begin
        await page.press("Enter")  # a line more
        assert await page.value(TEXT) == f"{begin}\n" and job.submits == []
        await send(front, page, control=True)
        await job.write("    return json.load(path)\n")
        await page.until(f"{TEXT}.endsWith('load(path)\\n')")
        assert await page.value(STATE) == "Writing." and not await page.value(FREE)
        await page.press("Enter", control=True)  # one at a time
        await job.write("", "stop")
        await page.until(FREE)
        first = f"{begin}\n    return json.load(path)\n"
        assert await page.value(TEXT) == first
        assert re.search(
            r"^\d+ tokens read, 0 of them cached · \d+ written · [\d.,]+ tokens/s$", await page.value(STATE)
        )
        await send(front, page, control=True)
        assert job.prompt() == first and len(job.submits) == 2
        await job.write("x" * 3, "length")
        await page.until(FREE)
        assert "the most it may" in await page.value(STATE)
        assert await page.value(TEXT) == f"{first}xxx"
        for expected in (first, f"{begin}\n"):
            await page.value("document.getElementById('back').click()")
            assert await page.value(TEXT) == expected
        assert await page.value("document.getElementById('back').disabled")

    run(check, tmp_path)


def test_a_chat_is_read_turn_by_turn(tmp_path: Path, model: Path) -> None:
    async def check(front: Front, page: Page) -> None:
        job = front.job
        await ready(page)
        await page.value(SHIFTS)
        await page.type("What is it?")
        await page.press("Enter", shift=True)
        await page.type("Say <i>so</i>!")
        await send(front, page)
        assert "What is it?\nSay <i>so</i>!" in job.prompt() and await page.value(TEXT) == ""
        assert "Say <i>so</i>!" in await page.value(TALK)
        await page.until(f"{STATE} === 'Waiting.'")
        await job.write("<think>Let me see.")
        await page.until(f"{STATE} === 'Thinking.'")
        await job.write("</think>It is <b>bold</b> & <script>alert(1)</script>")
        await page.until(f"{TALK}.includes('<script>alert(1)')")  # a text, and no part of the page
        await page.screenshot(tmp_path / "chat-streaming.png")
        assert not await page.value(FREE) and await page.value("document.getElementById('talk').ariaBusy") == "true"
        await job.write(".", "stop")
        await page.until(FREE)
        await page.value("document.querySelector('summary').click()")
        assert "Let me see." in await page.value(TALK)
        await page.type("And then?")
        await send(front, page)
        assert "It is <b>bold</b>" in job.prompt() and "Let me see" not in job.prompt()
        await job.write("Nothing.", "stop")
        await page.until(FREE)
        await page.screenshot(tmp_path / "chat.png")
        assert await page.value("window.shifts") < 0.01
        await page.value("document.getElementById('back').click()")
        await page.type("Anew")
        await send(front, page)
        assert "bold" not in job.prompt() and "bold" not in await page.value(TALK)

    run(check, tmp_path, model)


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_an_answer_is_stopped(how: str, tmp_path: Path, model: Path) -> None:
    async def check(front: Front, page: Page) -> None:
        await ready(page)
        await page.type("Count")
        await send(front, page)
        await front.job.write("one two")
        await page.until(f"{TALK}.includes('two')")
        await (page.press("Escape") if how == "Escape" else page.value("document.getElementById('stop').click()"))
        await until(lambda: front.job.aborts)
        assert await page.value(STATE) == "Stopped." and "two" in await page.value(TALK)
        await page.screenshot(tmp_path / "stopped.png")
        await page.type("Go on")
        await send(front, page)
        assert "one two" in front.job.prompt()  # what was said stays part of the chat

    run(check, tmp_path, model)


def test_a_long_prompt_has_its_progress_and_the_time_left(tmp_path: Path, model: Path) -> None:
    async def check(front: Front, page: Page) -> None:
        await ready(page)
        await page.type("A long prompt")
        await send(front, page)
        name, total = front.job.submits[-1].id, len(front.job.submits[-1].ids)
        for done in (total // 4, total // 2):
            await asyncio.sleep(0.5)
            front.job.send(Progress(name, done, total))
        told = f"Reading the prompt: {total // 2} of {total} tokens, about \\d s left"
        await page.until(f"/{told}/.test({STATE})")
        assert abs(await page.value("document.getElementById('progress').value") - total // 2 / total) < 1e-6
        assert await page.value("getComputedStyle(document.getElementById('progress')).visibility") == "visible"
        await page.screenshot(tmp_path / "progress.png")
        await front.job.write("Read.", "stop")
        await page.until(FREE)
        assert await page.value("getComputedStyle(document.getElementById('progress')).visibility") == "hidden"

    run(check, tmp_path, model)


def test_a_restart_is_told_and_survived(tmp_path: Path, model: Path) -> None:
    async def check(front: Front, page: Page) -> None:
        job = front.job
        await ready(page)
        await page.type("Wait")
        await send(front, page)
        await job.write("one ")
        await page.until(f"{TALK}.includes('one')")
        await job.close()
        job.die()
        await page.until(f"{STATE}.startsWith('The server is restarting: ')")
        assert "goes on" in await page.value(STATE)
        await page.screenshot(tmp_path / "restarting.png")
        (tmp_path / "job.sock").unlink(missing_ok=True)
        await job.listen(tmp_path / "job.sock")
        await until(lambda: len(job.submits) == 2)
        await page.until(f"{STATE}.startsWith('The server is back')")
        await job.write("two", "stop")
        await page.until(f"{FREE} && {TALK}.includes('one two')")

        await job.close()
        job.die()
        await until(lambda: front.core.state == "restarting")
        await page.type("Lost?")
        await page.press("Enter")
        await page.until(f"{FREE} && {STATE}.startsWith('The server is restarting')")
        await page.screenshot(tmp_path / "refused.png")
        assert await page.value(TEXT) == "Lost?" and "Lost?" not in await page.value(TALK)
        (tmp_path / "job.sock").unlink(missing_ok=True)
        await job.listen(tmp_path / "job.sock")
        await ready(page)
        await send(front, page)
        assert "one two" in job.prompt() and "Lost?" in job.prompt()

    run(check, tmp_path, model)


def test_a_server_that_still_loads_is_waited_for(tmp_path: Path) -> None:
    async def check(front: Front, page: Page) -> None:
        front.core._state, front.core._why, known = "starting", "the model is being loaded", front.core.ready
        front.core.ready = None
        await page.call("Page.reload")
        await page.until(f"{STATE}.startsWith('The server is starting: the model is being loaded')")
        assert await page.value("document.getElementById('send').disabled")
        front.core._state, front.core.ready = "ready", known
        await ready(page)

    run(check, tmp_path)


def test_a_key_is_wanted(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada key-1\n")

    async def check(front: Front, page: Page) -> None:
        await page.until(f"{STATE} === 'The server needs a key.'")
        await page.value("document.getElementById('key').focus()")
        await page.type("key-1")
        await page.press("Tab")
        await ready(page)
        await page.value("document.getElementById('text').focus()")
        await send(front, page, control=True)

    run(check, tmp_path, api_keys=str(keys))


@pytest.mark.parametrize("chat", [False, True])
def test_a_long_answer_scrolls_along_until_its_reader_scrolls(chat: bool, tmp_path: Path, model: Path) -> None:
    async def check(front: Front, page: Page) -> None:
        box = f"document.getElementById('{'talk' if chat else 'text'}')"
        behind = f"({box}.scrollHeight - {box}.scrollTop - {box}.clientHeight)"
        await ready(page)
        await page.type("More")
        await send(front, page, control=not chat)
        for _ in range(5):
            await front.job.write("a line of many\n" * 300)
        await front.job.write("LAST")
        await page.until(f"{TALK if chat else TEXT}.endsWith('LAST')")
        assert await page.value(f"{box}.scrollHeight") > 20_000 and await page.value(behind) < 5
        await page.screenshot(tmp_path / "long.png")
        await page.value(f"{box}.scrollTop = 100")
        await front.job.write("\nEND", "stop")
        await page.until(f"{FREE} && {TALK if chat else TEXT}.endsWith('END')")
        assert await page.value(f"{box}.scrollTop") == 100

    run(check, tmp_path, model if chat else None)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1000])
@pytest.mark.parametrize("chat", [False, True])
def test_it_can_be_read_and_reached(chat: bool, width: int, dark: bool, tmp_path: Path, model: Path) -> None:
    """On a phone too, by those who do not see it, and where colours are inverted."""

    async def check(front: Front, page: Page) -> None:
        await ready(page)
        await page.type("word " * 40 + "x" * 300)
        await send(front, page, control=not chat)
        await front.job.write("answer " * 60, "stop")
        await page.until(FREE)
        await page.screenshot(tmp_path / "look.png")
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
        assert await page.value("document.documentElement.scrollHeight <= innerHeight")
        assert await page.value(CONTRAST) >= 4.5
        ground = await page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(ground) < 200) == dark
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        roles = "textbox", "button", "spinbutton", "log"
        names = {node["name"]["value"] for node in nodes if node.get("role", {}).get("value") in roles}
        named = {"Conversation", "Send", "New chat"} if chat else {"Continue", "Undo"}
        assert names == named | {"Text", "Stop", "Tokens", "Temperature", "Key"}

    look = {"width": width, "height": 700, "dark": dark}
    run(check, tmp_path, model if chat else None, look)
