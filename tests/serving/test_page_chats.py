"""What the page keeps and shows of chats, in a real browser. `make test-clients`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.serving.api_server import api_server, text_of, until
from tests.serving.browser import IN_CHROMIUM, Browse, PageDriver, ScriptedJob

pytestmark = IN_CHROMIUM
PHONE = {"viewport": {"width": 360, "height": 700}, "is_mobile": True, "has_touch": True}
FORMULAS = text_of("formulas.md")
# Whether the browser keeps a message with this text.
SAVED = """text => new Promise((done) => {
  const opened = indexedDB.open("helix", 1);
  opened.onsuccess = () => {
    const all = opened.result.transaction("messages").objectStore("messages").getAll();
    all.onsuccess = () => { opened.result.close(); done(all.result.some((one) => one.content === text)); };
  };
})"""


async def saved(page: Page, text: str) -> None:
    """Waits until the browser keeps a text: it is saved now and then."""
    async with asyncio.timeout(60):
        while not await page.evaluate(SAVED, text):
            await asyncio.sleep(0.05)


async def test_a_reload_loses_nothing_and_goes_on(browse: Browse) -> None:
    tab, page = await browse()
    job = tab.job
    await tab.send("Count")
    await tab.expect_request(page.reload())  # before a word came
    assert "Count" in tab.prompt
    await job.write("<think>Hm.</think>one two")
    await tab.expect_text("one two")
    await saved(page, "one two")
    await tab.expect_request(page.reload())
    await tab.expect_text("one two")
    assert tab.prompt.endswith("<|im_start|>assistant\none two")
    await tab.answer(" three")
    await expect(page.locator(".said")).to_have_text("one two three")
    await expect(page.locator(".thinking p")).to_have_text("Hm.")

    await tab.begin("Letters", "a b")
    await saved(page, "a b")
    other = await tab.new_tab(page.url)  # another tab does not answer it too
    await other.ready()
    await other.expect_text("a b")
    assert len(job.submits) == 4
    await other.page.close()
    await tab.press("Stop")
    await tab.reload()  # what was stopped goes on if somebody wants it
    await tab.expect_request(tab.press("Continue"))
    assert tab.prompt.endswith("<|im_start|>assistant\na b")
    await tab.answer(" c")
    await expect(page.locator(".said").last).to_have_text("a b c")
    await expect(page.get_by_role("button", name="Continue")).to_have_count(0)


async def test_formulas_are_rendered(browse: Browse) -> None:
    tab, page = await browse()
    answers, source = page.locator(".said"), "all => all.map(one => one.textContent)"
    await tab.send("Formulas")
    begin, end = FORMULAS.split(r"\\")
    await tab.job.write(begin)
    await tab.expect_text(r"\[ \sum_{i=1}^{n} x_i")  # a text for as long as it is not whole
    await tab.answer(rf"\\{end}")
    found = await answers.locator("annotation").evaluate_all(source)
    inline = ["a^2 + b_1", "x_i", "2^n", r"\boxed{4}"]
    assert sorted(one.strip() for one in found if one in inline) == sorted(inline) and len(found) == 7
    display = await answers.locator(".katex-display annotation").evaluate_all(source)
    assert [one.strip()[:5] for one in display] == [r"\sum_", r"\frac", "d_1"]
    for text in ("; $5 and $10 are prices, $HOME:$PATH is none", r"\(\wrong{\)", r"\(\alpha_1 * b_2 * c"):
        await expect(answers).to_contain_text(text)
    assert await answers.locator("code").evaluate_all(source) == [r"\(c\)", "$q$ \\(r\\)\n"]
    await page.evaluate("document.fonts.ready")
    fonts = await page.evaluate("[...document.fonts].filter(f => f.status === 'loaded').map(f => f.family)")
    assert "KaTeX_Math" in fonts and "KaTeX_Main" in fonts


async def test_code_is_highlighted(browse: Browse) -> None:
    tab, page = await browse()
    code = 'def f(x):  # <b>"\n    return "a" if x > 1 else None\n'
    await tab.turn("Code", f"```python\n{code}```\n\n```\nplain\n```\n\n```nonsense\ndef f\n```")
    await expect(page.locator("pre").first).to_have_text(code)
    await expect(page.locator(".hljs-keyword")).to_have_text(["def", "return", "if", "else"])
    plain = await page.locator("pre").first.evaluate("one => getComputedStyle(one).color")
    assert await page.locator(".hljs-keyword").first.evaluate("one => getComputedStyle(one).color") != plain
    await expect(page.locator("pre").nth(1)).to_have_text("plain\n")
    await page.locator(".code button").first.click()
    assert await page.evaluate("navigator.clipboard.readText()") == code


@pytest.mark.parametrize("phone", [False, True])
async def test_chats_are_listed(phone: bool, browse: Browse) -> None:
    tab, page = await browse(PHONE if phone else None, named="A-Model-8B-Instruct")
    name = page.locator("#name")
    await expect(name).to_have_text("A-Model-8B-Instruct")
    assert await name.evaluate("one => one.scrollWidth <= one.clientWidth")
    items, chats = page.locator("nav a"), page.get_by_role("button", name="Chats", exact=True)
    change = page.get_by_role("button", name="Rename, export or delete")

    async def list_chats() -> None:
        if phone:
            await expect(page.locator("nav")).to_be_hidden()
            await chats.click()

    await tab.turn("First question?\nWith more.", "One *answer*.")
    await tab.press("New chat")
    await tab.turn("Second question?", "Two.")
    await tab.reload()
    await list_chats()
    await expect(items).to_have_text(["Second question?", "First question?"])
    await expect(page.locator("nav [aria-current=page]")).to_have_text("Second question?")
    await items.last.click()
    await expect(page.locator(".said")).to_have_text("One answer.")
    await page.go_back()
    await expect(page.locator(".said")).to_have_text("Two.")
    await list_chats()
    await change.last.click()
    title = page.get_by_label("Title")
    await expect(title).to_have_value("First question?")
    assert await page.locator("#chat").evaluate("one => one.scrollWidth <= one.clientWidth")
    await title.fill("Renamed")
    markdown = "# Renamed\n\n## Question\n\nFirst question?\nWith more.\n\n## "
    for name, expected in {"Markdown": markdown, "JSON": ""}.items():
        async with page.expect_download() as saving:
            await tab.press(f"Save as {name}")
        saved = await saving.value
        assert saved.suggested_filename == ("Renamed.md" if name == "Markdown" else "Renamed.json")
        text = Path(await saved.path()).read_text()
        assert text.startswith(expected)
    messages = json.loads(text)["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant"] and messages[1]["content"] == "One *answer*."
    await title.press("Enter")
    await expect(items).to_have_text(["Second question?", "Renamed"])
    await change.first.click()
    await tab.press("Delete")
    await expect(items).to_have_count(2)
    await tab.press("Delete for good")
    await expect(items).to_have_text(["Renamed"])
    await expect(page.locator("#turns")).to_be_empty()  # it was open
    if phone:
        for closes in (page.keyboard.press("Escape"), page.touchscreen.tap(350, 300)):  # or beside it
            await closes
            await list_chats()
    await tab.reload()
    await expect(items).to_have_text(["Renamed"])
    await expect(page.locator("#turns")).to_be_empty()
    if phone:
        await expect(page.locator("nav")).to_be_hidden()


async def test_an_answer_goes_on_while_another_chat_is_read(browse: Browse) -> None:
    tab, page = await browse()
    items = page.locator("nav a")
    await tab.turn("First?", "One.")
    await tab.press("New chat")
    await tab.begin("Second?", "a b")
    await items.last.click()
    await expect(page.locator(".said")).to_have_text("One.")
    await tab.answer(" c")
    await expect(page.locator(".said")).to_have_text("One.")
    await items.first.click()
    await expect(page.locator(".said")).to_have_text("a b c")
    assert tab.job.aborts == []


async def test_a_changed_question_keeps_what_it_was(browse: Browse) -> None:
    tab, page = await browse()
    articles, versions = page.locator("article > :first-child, .said"), page.locator(".versions")

    async def reads(*texts: str) -> None:
        await expect(page.locator(".user > p, .said")).to_have_text(list(texts))

    await tab.turn("One?", "First.")
    await tab.turn("Two?", "Second.")
    area = page.locator(".user textarea")
    await page.press("#text", "ArrowUp")  # the last question
    await expect(area).to_have_value("Two?")
    await area.press("Escape")
    await expect(page.locator("#text")).to_be_focused()
    await page.locator(".user").first.hover()
    await page.locator(".edit").first.click()
    await expect(area).to_be_focused()
    await area.fill("Eins?")
    await tab.expect_request(area.press("Enter"))
    assert "Eins?" in tab.prompt and not re.search(r"One|First|Two|Second", tab.prompt)
    await tab.answer("Erstens.")
    await reads("Eins?", "Erstens.")
    await tab.expect_request(tab.press("Regenerate"))
    await tab.answer("Zuerst.")
    await reads("Eins?", "Zuerst.")
    await tab.reload()
    await expect(versions).to_have_text(["‹2/2›", "‹2/2›"])
    await page.get_by_role("button", name="Previous version").first.click()
    await reads("One?", "First.", "Two?", "Second.")
    await expect(versions.first).to_have_text("‹1/2›")
    await tab.reload()  # what is shown lasts
    await reads("One?", "First.", "Two?", "Second.")
    await tab.send("Three?")  # and goes on
    assert re.search(r"One\?.*First.*Two\?.*Second.*Three\?", tab.prompt, re.S)
    await tab.answer("Third.")
    await page.get_by_role("button", name="Next version").first.click()
    await reads("Eins?", "Zuerst.")
    await expect(articles.first).to_be_visible()


@pytest.mark.parametrize("how", ["Escape", "Close", "beside it"])
async def test_settings_are_closed_alike(how: str, browse: Browse) -> None:
    tab, page = await browse()

    async def close() -> None:
        if how == "Escape":
            await page.keyboard.press("Escape")
        elif how == "Close":
            await tab.press("Close")
        else:
            await page.mouse.click(5, 5)
        await expect(page.locator("dialog[open]")).to_have_count(0)

    await tab.press("Settings")
    await page.get_by_label("Temperature").fill("0.5")
    await page.get_by_label("Top-p").fill("7")
    await close()
    await tab.expect_status(re.compile("^Top-p is left out: "))
    await tab.press("Settings")
    await expect(page.get_by_label("Temperature")).to_have_value("0.5")
    await expect(page.get_by_label("Top-p")).to_have_value("")
    await close()
    await tab.turn("Hello", "Hi.")
    assert tab.job.submits[-1].sampling.temperature == 0.5 and tab.job.submits[-1].sampling.top_p == 1
    await page.get_by_role("button", name="Rename, export or delete").click()
    await page.get_by_label("Title").fill("Renamed")
    await close()
    await expect(page.locator("nav a")).to_have_text(["Renamed"])


async def test_a_server_that_ends_is_looked_for_and_the_answer_goes_on(
    tmp_path: Path, model: Path, browse: Browse
) -> None:
    tab, page = await browse()
    await tab.begin("Count", "one")
    tab.engine_client.draining = True  # as a server does, from its signal to its end
    tab.engine_client.fail("the server has shut down")
    await tab.expect_status(re.compile("^The server is draining: .* The answer goes on once it is back"))
    tab.server.should_exit = True
    await tab.expect_status(re.compile("^The server does not answer. The answer goes on once it is back"))
    await expect(page.locator(".said")).to_have_text("one")
    async with api_server(tmp_path, ScriptedJob(model), port=tab.port) as made:
        back = PageDriver(**vars(made), page=page)
        await until(lambda: back.job.submits)
        assert back.prompt.endswith("<|im_start|>assistant\none")
        await back.answer(" two")
        await expect(page.locator(".said")).to_have_text("one two")
    await page.fill("#text", "And then?")
    await page.press("#text", "Enter")
    await tab.expect_status(re.compile("goes on once it is back"))
    async with api_server(tmp_path, ScriptedJob(model), port=tab.port) as made:
        back = PageDriver(**vars(made), page=page)
        await until(lambda: back.job.submits)
        assert "And then?" in back.prompt
        await back.answer("Three.")
        await expect(page.locator(".said")).to_have_text(["one two", "Three."])


async def test_an_answer_that_fails_the_server_is_not_asked_again(browse: Browse) -> None:
    tab, page = await browse()
    await tab.begin("Hurt", "one")
    await page.clock.install()
    await tab.job.emit(tab.job.submits[-1], [], "error", reason="the engine failed")
    await tab.expect_status(re.compile("the engine failed"))
    await page.clock.run_for(10_000)
    assert len(tab.job.submits) == 1
    await tab.expect_text("one")
    await tab.expect_request(tab.press("Continue"))
