"""The page in a real browser: what its user sees, over a job that says what a test wants. `make test-clients`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Route, expect

from helix.engine.request import RequestUpdate
from tests.serving.api_server import text_of, until
from tests.serving.browser import IN_CHROMIUM, Browse

pytestmark = IN_CHROMIUM
FIGURES = r"\d+ tokens read.* · \d+ written.* · [\d.,]+ tokens/s · first token after [\d.]+ m?s$"
SHIFTS = (
    "window.shifts ??= 0, new PerformanceObserver(l => { for (const e of l.getEntries()) window.shifts += e.value })"
)
# Text against what is behind it, by WCAG 2.2's formula; at least 4.5 can be read.
CONTRAST = text_of("contrast.js")
MARKDOWN, HOSTILE = text_of("markdown.md"), text_of("hostile.md")


async def test_a_text_is_continued_and_taken_back(browse: Browse) -> None:
    tab, page = await browse(chat=False)
    job, begin, text = tab.job, "def read_json(path):\n", page.locator("#text")
    assert await page.title() == "demo-model"
    await expect(page.locator("#facts")).to_have_text("helix kvp=2 · continues text")
    await expect(text).to_have_value(begin)
    await text.press("Enter")  # a line more
    await expect(text).to_have_value(f"{begin}\n")
    assert job.submits == []
    await tab.send(keys="Control+Enter")
    assert job.submits[-1].max_tokens == 512
    await job.write("    return json.load(path)\n")
    await expect(text).to_have_value(re.compile(r"load\(path\)\n$"))
    await tab.expect_status("Writing.")
    await text.press("Control+Enter")  # one at a time
    await tab.answer("")
    first = f"{begin}\n    return json.load(path)\n"
    await expect(text).to_have_value(first)
    await tab.expect_status(re.compile(f"^{FIGURES}"))
    await expect(page.locator("#used")).to_have_text(re.compile(r"^\d+ of 4,096 tokens used$"))
    await tab.send(keys="Control+Enter")
    assert tab.prompt == first and len(job.submits) == 2
    await tab.answer("x" * 3, "length")
    await tab.expect_status(re.compile("the limit"))
    await expect(text).to_have_value(f"{first}xxx")
    for expected in (first, f"{begin}\n"):
        await tab.press("Undo")
        await expect(text).to_have_value(expected)
    await expect(page.locator("#back")).to_be_disabled()


async def test_a_chat_is_read_turn_by_turn(browse: Browse) -> None:
    tab, page = await browse()
    job, talk = tab.job, page.locator("#talk")
    await page.evaluate(SHIFTS)
    await page.type("#text", "What is it?")
    await page.press("#text", "Shift+Enter")
    await page.type("#text", "Say <i>so</i>!")
    await tab.send()
    assert "What is it?\nSay <i>so</i>!" in tab.prompt
    await expect(page.locator("#text")).to_have_value("")
    await tab.expect_text("Say <i>so</i>!")
    await tab.expect_status("Waiting.")
    await job.write("<think>Let me see.")
    await tab.expect_status("Thinking.")
    await job.write("</think>It is <b>bold</b> & <i>so</i>")
    await tab.expect_text("It is <b>bold</b> & <i>so")  # a text, and no part of the page
    assert await talk.get_attribute("aria-busy") == "true"
    await tab.answer(".")
    await tab.expect_status(re.compile(f"^{FIGURES}"))
    await expect(page.get_by_text("Let me see.")).to_be_hidden()
    await page.click(".thinking summary")
    await expect(page.get_by_text("Let me see.")).to_be_visible()
    await tab.send("And then?")
    assert "It is <b>bold</b>" in tab.prompt and "Let me see" not in tab.prompt
    await tab.answer("Nothing.")
    assert await page.evaluate("window.shifts") < 0.01
    await tab.reload()
    await tab.expect_text("Nothing.")  # what was said lasts as long as the tab
    await tab.press("New chat")
    await expect(page.locator("#turns")).to_be_empty()
    await tab.send("Anew")
    assert "bold" not in tab.prompt


async def test_an_answer_is_markdown_that_grows(browse: Browse) -> None:
    tab, page = await browse()
    answers = page.locator(".said")
    await tab.send("Who owns token 16?")
    begin, end = MARKDOWN.split("    return")
    await tab.job.write(begin)
    await expect(answers.locator("pre")).to_contain_text("def owner(t):")
    await page.evaluate("document.querySelector('.said h1').kept = true")
    await tab.answer(f"    return{end}")
    assert await page.evaluate("document.querySelector('.said h1').kept")  # what is there already is not made again
    await expect(answers.locator("pre code")).to_have_text("def owner(t):\n    return t // 16 % 2\n")
    await expect(answers.locator("figcaption span")).to_have_text("python")
    await expect(answers.locator("em")).to_have_text("one")
    await expect(answers.locator("td").last).to_have_text("1alone")
    assert await answers.locator("td").first.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert await answers.locator("input").evaluate_all("all => all.map(one => [one.type, one.checked])") == [
        ["checkbox", True],
        ["checkbox", False],
    ]
    link = answers.locator("a")
    assert await link.get_attribute("href") == "https://example.com/more"
    assert await link.get_attribute("rel") == "noopener noreferrer"


async def test_what_a_model_writes_does_nothing(browse: Browse) -> None:
    """Neither through Markdown, nor where HTML got as far as the sanitizer."""
    tab, page = await browse()
    await tab.turn("Hurt me", HOSTILE)
    await tab.expect_text('<img src=x onerror="window.hurt = 2">')  # as it was written
    links = page.locator(".said a")
    assert await links.evaluate_all("all => all.map(one => one.href)") == ["https://example.com/seen.png"]
    await tab.reload()  # and not when it is read back either
    await tab.expect_text('<img src=x onerror="window.hurt = 2">')
    assert await page.evaluate("window.hurt") is None

    beside = await tab.new_tab()  # the policy complains of what the sanitizer looks at
    await beside.ready()
    other = beside.page
    html = ["<img src=x onerror='window.hurt=1'>", "<svg onload='window.hurt=1'>", "<script>window.hurt=1</script>"]
    html += ["<a href='javascript:window.hurt=1'>x</a>", "<p style='position:fixed' onclick='window.hurt=1'>y</p>"]
    html += ["<math><mtext><table><mglyph><style><img src=x onerror='window.hurt=1'>", "<form id=talk><input name=z>"]
    for text in html:
        nodes = "(await import('/page/markdown.js')).nodesOf({type: 'html', raw: text, text})"
        await other.evaluate(f"async text => document.getElementById('turns').append(...{nodes})", text)
    talk = other.locator("#turns")
    assert await talk.locator("img, svg, script, style, iframe, form, math, a, [style], [onclick], [name]").count() == 0
    await talk.get_by_text("y").click()
    assert await other.evaluate("window.hurt") is None


@pytest.mark.parametrize("how", ["Escape", "button"])
async def test_an_answer_is_stopped(how: str, browse: Browse) -> None:
    tab, page = await browse()
    await tab.begin("Count", "one two")
    await (page.keyboard.press("Escape") if how == "Escape" else tab.press("Stop"))
    await until(lambda: tab.job.aborts)
    await tab.expect_status(re.compile("^Stopped · first token after "))
    await tab.expect_text("two")
    await tab.send("Go on")
    assert "one two" in tab.prompt  # what was said stays part of the chat


async def test_an_answer_is_given_anew(browse: Browse) -> None:
    tab, page = await browse()
    again = page.locator(".again:visible")
    await tab.turn("One?", "First.")
    await tab.turn("Two?", "Second.")
    before = tab.prompt
    await tab.expect_request(again.click())  # the last answer alone has it
    assert tab.prompt == before
    await expect(page.locator("#talk")).not_to_contain_text("Second.")
    await tab.answer("Third.")
    await expect(page.locator("article")).to_have_text([*map(re.compile, ("One", "First", "Two", "Third"))])
    await page.evaluate("localStorage.setItem('helix.settings', '{\"temperature\": \"200\"}')")
    await tab.reload()
    await again.click()
    await tab.expect_status(re.compile("temperature"))  # refused: all is as it was
    await tab.expect_text("Third.")
    await expect(again).to_have_count(1)


async def test_settings_are_sent_and_kept(browse: Browse) -> None:
    tab, page = await browse()
    job, system = tab.job, page.locator("#system")
    await tab.turn("Plain", "Yes.")
    await expect(system).to_be_hidden()
    plain = job.submits[-1]
    await tab.press("Settings")
    await expect(page.get_by_label("System prompt")).to_be_focused()
    await page.get_by_label("System prompt").fill("Speak like a sailor. " * 20 + "\nAnd no more.")
    for label, value in {"Temperature": "0.3", "Top-p": "0.9", "Seed": "7", "Max tokens": "33"}.items():
        await page.get_by_label(label).fill(value)
    await page.keyboard.press("Escape")
    for _ in range(2):
        await tab.send("With them")
        sent = job.submits[-1]
        assert sent.sampling.temperature == 0.3 and sent.sampling.top_p == 0.9 and sent.sampling.seed == 7
        assert sent.max_tokens == 33 and tab.prompt.count("And no more.") == 1
        await tab.answer("Aye.")
        await tab.reload()
    await expect(system).to_contain_text("System promptSpeak like a sailor.")
    assert (await system.bounding_box() or {})["height"] < 40  # a line
    await system.locator("summary").click()
    await expect(page.get_by_text("And no more.")).to_be_visible()
    await tab.press("Settings")
    await tab.press("Clear")
    await tab.press("Close")
    await tab.turn("Plain again", "Yes.")
    last = job.submits[-1]
    assert last.sampling.to_dict().keys() == plain.sampling.to_dict().keys() and last.max_tokens > 33
    assert "sailor" not in tab.prompt


@pytest.mark.parametrize("secure", [True, False])
async def test_texts_are_copied(secure: bool, browse: Browse) -> None:
    """Also where a browser has no clipboard for the page: over plain HTTP from another host."""
    tab, page = await browse()
    await tab.turn("Who *owns* it?", MARKDOWN)
    await page.evaluate("window.board = navigator.clipboard")
    if not secure:
        await page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    texts = {".code button": "def owner(t):\n    return t // 16 % 2\n", ".assistant .does :text('Copy')": MARKDOWN}
    texts[".user .does :text('Copy')"] = "Who *owns* it?"
    for place, text in texts.items():
        button = await page.query_selector(place)
        await button.click()
        await expect(page.locator("text=Copied").last).to_be_visible()
        assert await button.inner_text() == "Copied"
        assert await page.evaluate("board.readText()") == text


async def test_a_long_prompt_has_its_progress_and_the_time_left(browse: Browse) -> None:
    tab, page = await browse()
    progress = page.locator("#progress")
    await tab.send("A long prompt")
    name, total = tab.job.submits[-1].id, len(tab.job.submits[-1].prompt)
    for done in (total // 4, total // 2):
        tab.job.send(RequestUpdate(name, total, 0, done))
        await tab.expect_status(re.compile(rf"^Reading the prompt: {done} of {total} tokens(, about \d+ s left)?$"))
    await tab.expect_status(re.compile(r"about \d+ s left$"))
    assert abs(await progress.evaluate("one => one.value") - total // 2 / total) < 1e-6
    await expect(progress).to_be_visible()
    await tab.answer("Read.")
    await expect(progress).to_be_hidden()


async def test_a_restart_is_told_and_survived(tmp_path: Path, browse: Browse) -> None:
    tab, page = await browse()
    job = tab.job
    await tab.begin("Wait", "one ")
    await job.close()
    job.die()
    await tab.expect_status(re.compile("^The server is restarting: .*goes on"))
    await job.listen_again()
    await until(lambda: len(job.submits) == 2)
    await tab.expect_status(re.compile("^The server is back"))
    await tab.answer("two")
    await tab.expect_text("one two")

    await job.close()
    job.die()
    await until(lambda: tab.engine_client.state == "restarting")
    await page.fill("#text", "Lost?")
    await page.press("#text", "Enter")
    await tab.expect_status(re.compile("^The server is restarting.*goes on"))
    await tab.press("Stop")  # who does not want to wait has the text back
    await expect(page.locator("#text")).to_have_value("Lost?")
    await expect(page.locator("#talk")).not_to_contain_text("Lost?")
    await page.press("#text", "Enter")
    await tab.expect_status(re.compile("^The server is restarting.*goes on"))
    await job.listen_again()
    await until(lambda: len(job.submits) == 3)
    assert "one two" in tab.prompt and "Lost?" in tab.prompt


async def test_a_server_that_still_loads_is_waited_for(browse: Browse) -> None:
    tab, page = await browse(chat=False)
    tab.engine_client._state, tab.engine_client._why, known = (
        "starting",
        "the model is loading",
        tab.engine_client.engine_info,
    )
    tab.engine_client.engine_info = None
    await page.reload()
    await tab.expect_status(re.compile("^The server is starting: the model is loading"))
    await expect(page.locator("#send")).to_be_disabled()
    tab.engine_client._state, tab.engine_client.engine_info = "ready", known
    await tab.ready()

    asked: list[str] = []

    async def away(route: Route) -> None:  # as a proxy says it, for a server that it cannot reach
        asked.append(route.request.url)
        await route.fulfill(status=502, content_type="text/html", body="<html>")

    for path in ("**/v1/models", "**/health"):
        await page.route(path, away)
    await page.reload()
    await tab.expect_status("The server does not answer.")
    await until(lambda: len(asked) > 2)
    await page.unroute_all()
    await tab.ready()


async def test_a_key_is_wanted(tmp_path: Path, browse: Browse) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada key-1\n")
    tab, page = await browse(chat=False, api_keys=str(keys))
    key = page.get_by_label("API key")
    await tab.expect_status("The server needs an API key.")
    await expect(key).to_be_focused()
    await key.fill("key-2")
    await key.press("Enter")
    await tab.expect_status("The server rejects this API key.")
    await key.fill("key-1")
    await key.press("Enter")
    await tab.ready()
    await expect(key).to_be_hidden()
    await tab.send(keys="Control+Enter")
    await tab.reload()  # it lasts as long as the tab
    await (await tab.new_tab()).expect_status("The server needs an API key.")


@pytest.mark.parametrize("chat", [False, True])
async def test_a_long_answer_scrolls_along_until_its_reader_scrolls(chat: bool, browse: Browse) -> None:
    tab, page = await browse(chat=chat)
    box = page.locator("#talk" if chat else "#text")
    text = "one => (one.value ?? one.innerText).trimEnd()"
    behind = "one => one.scrollHeight - one.scrollTop - one.clientHeight"

    async def ends(with_: str) -> None:
        async with asyncio.timeout(60):
            while with_ not in (await box.evaluate(text))[-60:]:
                await asyncio.sleep(0.05)

    await tab.send("More", keys="Enter" if chat else "Control+Enter")
    for _ in range(5):
        await tab.job.write("a line of many\n" * 300)
    await tab.job.write("LAST")
    await ends("LAST")
    assert await box.evaluate("one => one.scrollHeight") > 20_000 and await box.evaluate(behind) < 5
    await box.evaluate("one => one.scrollTop = 100")
    await tab.answer("\nEND")
    await ends("END")
    assert await box.evaluate("one => one.scrollTop") == 100
    if chat:
        await tab.press("To the end")
        assert await box.evaluate(behind) < 5
        await expect(page.locator("#last")).to_be_hidden()


# Every two of these together.
@pytest.mark.parametrize(
    "chat, width, dark", [(False, 360, False), (False, 1000, True), (True, 360, True), (True, 1000, False)]
)
async def test_it_can_be_read_and_reached(chat: bool, width: int, dark: bool, browse: Browse) -> None:
    """On a phone too, by those who do not see it, and where colors are inverted."""
    look = {"viewport": {"width": width, "height": 700}, "color_scheme": "dark" if dark else "light"}
    tab, page = await browse(look | {"is_mobile": width < 600, "has_touch": width < 600}, chat)
    await tab.send("word " * 40 + "x" * 300, keys="Enter" if chat else "Control+Enter")
    wide = "| " + "wide cell | " * 12 + "\n|" + "---|" * 12 + "\n\n```python\n" + "y" * 300
    wide += '\n@f\ndef f(x: int) -> None:  # "\n    """D"""\n    return print(1, "a")\n```\n\n$$x^2$$\n'
    await tab.answer("answer " * 60 + "z" * 300 + f"\n\n{wide}[link](https://example.com)\n\n> so")
    for opened in (False, True):
        if opened:
            await tab.press("Settings")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        assert await page.evaluate("(talk => talk.scrollWidth <= talk.clientWidth)(document.getElementById('talk'))")
        assert await page.evaluate(CONTRAST) >= 4.5
    await page.keyboard.press("Escape")
    ground = await page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(ground) < 200) == dark
    found = re.findall(r'- (?:textbox|button|spinbutton|log|article) "(.*?)"', await page.aria_snapshot())
    named = {"Chats", "New chat", "Send", "Conversation", "Question", "Answer", "Copy", "Edit", "Regenerate"}
    named |= {"Rename, export or delete " + ("word " * 16).strip()} if width > 600 else set()
    assert set(found) == (named if chat else {"Undo", "Continue"}) | {"Text", "Settings"}
