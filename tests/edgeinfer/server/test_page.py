"""The page at /, in a browser."""

import json
import re

import pytest
from browser import Browser, chromium
from http_server import held

PLAIN = "[...document.querySelectorAll('article.assistant .said')].map((each) => each.textContent)"
IS_DONE = "document.getElementById('stop').hidden && document.querySelectorAll('article.assistant').length"


def test_it_loads_nothing_from_elsewhere(server):
    reply = server.get("/")
    text = reply.body.decode()
    assert reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"(src|href)=\s*[\"']?(https?:)?//", text) and "@import" not in text and "url(" not in text
    assert "innerHTML" not in text and "eval(" not in text and "document.write" not in text


@pytest.fixture
def browser(tmp_path, engine):
    chromium()
    with Browser(tmp_path / "profile") as found:
        yield found


@pytest.fixture
def tab(browser, server):
    found = browser.tab(f"http://127.0.0.1:{server.port}/")
    found.wait("document.getElementById('model')?.value === 'tiny'")
    return found


def set_to(tab, **settings):
    """Fill in settings."""
    for name, value in settings.items():
        place = f"document.getElementById('{name}')"
        tab.run(f"{place}.value = {json.dumps(str(value))}; {place}.onchange()")


def ask(tab, text):
    tab.run("document.getElementById('question').focus()")
    tab.type(text)
    tab.press("Enter")


def answer(engine, content, **options):
    chat = engine.chat()
    chat.messages = [{"role": "user", "content": content}]
    stream = chat.stream(**options)
    for _ in stream:
        pass
    return stream.completion.text


def test_a_question_is_typed_and_its_answer_streamed_and_kept(tab, server, engine):
    set_to(tab, seed=3, max_tokens=12)
    ask(tab, "hello")
    tab.wait(IS_DONE)
    expected = answer(engine, "hello", seed=3, max_tokens=12)
    kept = json.loads(tab.run("localStorage.getItem(Object.keys(localStorage).find((key) => key.startsWith('talk:')))"))
    assert [message["content"] for message in kept["messages"]] == ["hello", expected]
    assert "12 tokens" in tab.run("document.getElementById('figures').textContent")
    shown = tab.run(PLAIN)
    tab.call("Page.reload")
    tab.wait("document.querySelectorAll('article').length === 2")
    assert tab.run(PLAIN) == shown
    assert tab.run("document.getElementById('seed').value") == "3"


def test_an_answer_is_stopped_regenerated_and_its_question_edited(tab, server, engine):
    set_to(tab, seed=3, max_tokens=400)
    with held(engine, 30) as gate:
        ask(tab, "hello")
        tab.wait("document.querySelectorAll('article.assistant .said')[0]?.textContent.length > 3")
        server.wait(lambda: gate.holds)
        tab.press("Escape")
        tab.wait(IS_DONE)
        server.wait(lambda: all(text.is_cancelled for text in server.texts))
        gate.let()
        server.wait(lambda: not server.texts)
    assert tab.run("document.getElementById('figures').textContent") == "stopped"
    set_to(tab, max_tokens=3)
    tab.run("[...document.querySelectorAll('button')].find((each) => each.textContent === 'Regenerate').click()")
    tab.wait("document.getElementById('figures').textContent.includes('3 tokens')")
    assert tab.run("document.querySelectorAll('article').length") == 2
    tab.run("[...document.querySelectorAll('button')].find((each) => each.textContent === 'Edit').click()")
    tab.run("document.querySelector('article textarea').value = 'there is'")
    tab.run("[...document.querySelectorAll('button')].find((each) => each.textContent === 'Send again').click()")
    tab.wait(f"{IS_DONE} && document.querySelector('article.user .said').textContent === 'there is'")
    assert tab.run("document.querySelectorAll('article').length") == 2


def test_two_tabs_talk_at_once_and_keep_both(browser, tab, server):
    other = browser.tab(f"http://127.0.0.1:{server.port}/")
    other.wait("document.getElementById('model')?.value === 'tiny'")
    for each in (tab, other):
        set_to(each, seed=3, max_tokens=200)
    ask(tab, "hello one")
    ask(other, "hello two")
    for each in (tab, other):
        each.wait(IS_DONE)
        each.wait("document.querySelectorAll('#list li').length === 2")
    texts = tab.run(
        "Object.keys(localStorage).filter((key) => key.startsWith('talk:')).map((key) => localStorage[key])"
    )
    assert sorted(json.loads(text)["messages"][0]["content"] for text in texts) == ["hello one", "hello two"]


NASTY = "<script>window.bad = 1</script> <img src=x onerror='window.bad=1'> [a](javascript:window.bad=1) <b>bold</b>"
MARKDOWN = """# Title

Some **bold** `code`.

- one
- two
  1. deep

```python
def f(): # note
    return 'x'
```

| a | b |
|---|---|
| 1 | 2 |
"""


def given(tab, text):
    """Open a conversation whose answer is this text."""
    talk = {
        "title": "t",
        "changed": 1,
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}],
    }
    tab.run(f"localStorage.setItem('talk:x', {json.dumps(json.dumps(talk))}); location.hash = '#x'; location.reload()")
    tab.wait("document.querySelectorAll('article').length === 2")


def test_html_and_scripts_of_a_model_stay_text(tab):
    given(tab, f"{NASTY}\n\n```html\n{NASTY}\n```\n\n> {NASTY}\n\n- {NASTY}")
    assert tab.run("window.bad") is None
    assert tab.run("document.querySelectorAll('article script, article img, article b, article a').length") == 0
    assert (
        tab.run("document.querySelector('article.assistant').textContent").count("<script>window.bad = 1</script>") == 4
    )


def test_markdown_becomes_what_it_means(tab):
    given(tab, MARKDOWN)
    shown = tab.run("document.querySelector('article.assistant .said').innerHTML")
    for part in (
        "<h2>Title</h2>",
        "<strong>bold</strong>",
        "<code>code</code>",
        "<li>one</li>",
        "<ol><li>deep</li></ol>",
    ):
        assert part in shown, (part, shown)
    assert '<span class="k">def</span>' in shown and '<span class="c"># note</span>' in shown
    assert "<th>a</th>" in shown and "<td>2</td>" in shown


def test_an_error_is_shown(tab):
    set_to(tab, schema="{")
    ask(tab, "hello")
    tab.wait("document.querySelector('[role=alert]')?.textContent")
    set_to(tab, schema="")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_phone_in_both_themes(browser, server, theme, tmp_path):
    tab = browser.tab(f"http://127.0.0.1:{server.port}/", 390, 800)
    tab.theme(theme)
    tab.run("localStorage.clear()")
    tab.call("Page.reload")
    tab.wait("document.getElementById('model')?.value === 'tiny'")
    given(tab, MARKDOWN + "a" * 300)
    assert tab.run("document.documentElement.dataset.theme") == theme
    assert tab.run("document.documentElement.scrollWidth") == 390
    tab.run("document.getElementById('menu').click(); document.getElementById('memory-of').open = true")
    tab.wait("document.querySelectorAll('#memory dd').length > 2")
    assert tab.run("getComputedStyle(document.getElementById('side')).display") == "block"
    labelled = "document.querySelector(`label[for='${el.id}']`) || el.closest('label')"
    named = f"el.textContent.trim() || el.ariaLabel || {labelled}"
    every = "[...document.querySelectorAll('button, input, select, textarea')]"
    assert tab.run(f"{every}.filter((el) => !({named})).length") == 0
    tab.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 5000
