"""The page at / in a headless Chromium: chats, settings, the server's live state, as wide as a desk and a phone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
PLOT = "return document.getElementById('line').getAttribute('points')"
PHONE = {"deviceMetrics": {"width": 390, "height": 844, "pixelRatio": 1.0}}


def missing() -> str | None:
    """The programs that this machine lacks for the check; None if it has all."""
    if CHROMIUM is None or DRIVER is None:
        return "no chromium and chromedriver here (Debian: apt-get install chromium chromium-driver)"
    return None


@contextmanager
def browser(url: str, phone: bool = False) -> Iterator[Any]:
    """The page, loaded; a line on its console fails the check."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1100,800",
    ):
        options.add_argument(flag)
    if phone:
        options.add_experimental_option("mobileEmulation", PHONE)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        page.get(url)
        yield page
        lines = page.get_log("browser")
        assert not lines, lines
    finally:
        page.quit()


def text(page: Any, selector: str) -> str:
    return "\n".join(node.text for node in page.find_elements(By.CSS_SELECTOR, selector))


def until(what: str, condition: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


def send(page: Any, words: str) -> None:
    page.find_element(By.ID, "text").send_keys(words + Keys.ENTER)


def idle(page: Any) -> bool:
    return bool(page.find_element(By.ID, "send").is_enabled())


def setting(page: Any, name: str) -> Any:
    """One of the settings, shown."""
    if page.find_element(By.ID, "settings").get_attribute("open") is None:
        page.find_element(By.CSS_SELECTOR, "summary").click()
    return page.find_element(By.CSS_SELECTOR, f"#settings [name={name}], #settings #{name}")


def bodies(page: Any) -> None:
    """Keep what the page sends, for sent()."""
    page.execute_script(
        "window.sent = []; const fetched = window.fetch;"
        "window.fetch = (url, asked) => {"
        " if (asked?.body) window.sent.push(JSON.parse(asked.body)); return fetched(url, asked); };"
    )


def sent(page: Any) -> Any:
    return page.execute_script("return window.sent")


def number(page: Any, name: str) -> float:
    """One of the figures; -1 before there is one."""
    word = text(page, f"#{name}").split(" ")[0]
    return float(word) if word[:1].isdigit() else -1.0


def check_an_answer_is_shown_as_it_was_said(real: str, speaker: str) -> None:
    with browser(speaker) as page:
        until("the model's name", lambda: text(page, "#model") == "speaker")
        bodies(page)
        send(page, "hi")
        until("the answer", lambda: "tokens" in text(page, ".note"))
        assert text(page, ".user") == "hi"
        assert text(page, ".reasoning") == "hm"
        assert text(page, ".content") == "Hello there, friend."
        assert page.find_element(By.ID, "text").get_attribute("value") == ""
        send(page, "and again")
        until("the second answer", lambda: text(page, ".content").count("Hello there") == 2)
        roles = [[message["role"] for message in body["messages"]] for body in sent(page)]
        assert roles == [["user"], ["user", "assistant", "user"]]


def check_markdown_is_drawn_and_html_stays_text(real: str, speaker: str) -> None:
    with browser(speaker) as page:
        send(page, "Markdown")
        until("the answer", lambda: "tokens" in text(page, ".note"))
        for selector, shown in {
            "h3": "Title",
            "p strong": "bold",
            "p code": "x < y",
            "li": "one\ntwo site [evil](javascript:document.title='owned')",
            "pre code": 'print("hi")',
            "th": "a\nb",
            "td.right": "2",
        }.items():
            assert text(page, f".content {selector}") == shown, selector
        assert "<img src=x onerror=" in text(page, ".content p")
        assert not page.find_elements(By.CSS_SELECTOR, ".content img, .content script, .content [onerror]")
        links = page.find_elements(By.CSS_SELECTOR, ".content a")
        assert [link.get_attribute("href") for link in links] == ["https://example.com/a"]
        assert page.title == "openinfer"


def check_an_answer_and_its_code_can_be_copied(real: str, speaker: str) -> None:
    with browser(speaker) as page:
        page.execute_script(
            "window.copies = []; navigator.clipboard.writeText = async text => { window.copies.push(text); }"
        )
        send(page, "Markdown")
        until("the answer", lambda: "tokens" in text(page, ".note"))
        for button in page.find_elements(By.CSS_SELECTOR, "button.copy"):
            button.click()
            until("the word", lambda button=button: button.text == "Copied")
        code, whole = page.execute_script("return window.copies")
        assert code == 'print("hi")'
        assert whole.startswith("# Title\n\n**bold**")
        # A page that came over plain HTTP from another machine has no such object.
        page.execute_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        until("its old word", lambda: button.text == "Copy")
        button.click()
        until("the word", lambda: button.text == "Copied")


def check_enter_stops_no_answer_and_stop_does(real: str, speaker: str) -> None:
    with browser(real) as page:
        send(page, "hi")
        until("the first words", lambda: len(text(page, ".content, .reasoning")) > 1)
        page.find_element(By.ID, "text").send_keys("more" + Keys.ENTER)
        before = len(text(page, ".content, .reasoning"))
        until("more words", lambda: len(text(page, ".content, .reasoning")) > before)
        assert not idle(page)
        assert page.find_element(By.ID, "text").get_attribute("value") == "more"
        page.find_element(By.ID, "stop").click()
        until("the end", lambda: idle(page) and not page.find_element(By.ID, "stop").is_displayed())
        assert "stopped after" in text(page, ".note")
        until("figures at rest", lambda: number(page, "running") == 0)
        send(page, "")  # what was written meanwhile
        until("the second question", lambda: text(page, ".user") == "hi\nmore")


def check_a_sign_of_life_comes_before_the_first_token(real: str, speaker: str) -> None:
    with browser(speaker) as page:
        page.execute_script(
            "const fetched = window.fetch; window.fetch = async (url, asked) => {"
            " if (asked?.body) await new Promise(done => setTimeout(done, 700)); return fetched(url, asked); };"
        )
        send(page, "hi")
        until("a sign of life", lambda: "waiting for the first token: 0." in text(page, ".waiting"), 2)
        until("the answer", lambda: "tokens" in text(page, ".note"))
        assert text(page, ".waiting") == ""


def check_settings_and_a_system_prompt_are_sent(real: str, speaker: str) -> None:
    with browser(speaker) as page:
        bodies(page)
        send(page, "plain")
        until("the answer", lambda: idle(page))
        for name, value in {
            "system": "Be kind.",
            "temperature": "0.5",
            "top_k": "7",
            "max_tokens": "9",
        }.items():
            setting(page, name).send_keys(value)
        setting(page, "thinking").send_keys("off")
        send(page, "hi")
        until("the second answer", lambda: idle(page))
        first, second = sent(page)
        assert first.keys() == {"messages", "stream", "stream_options"}
        assert second["messages"][0] == {"role": "system", "content": "Be kind."}
        given = {
            "temperature": 0.5,
            "top_k": 7,
            "max_tokens": 9,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        assert given.items() <= second.items()
        assert "top_p" not in second
        setting(page, "top_p").send_keys("7")
        page.find_element(By.CSS_SELECTOR, "summary").click()
        send(page, "refused")  # by the browser, which shows the field
        until("the field", lambda: page.find_element(By.ID, "settings").get_attribute("open"))
        assert len(sent(page)) == 2


def check_a_new_chat_forgets_the_last(real: str, speaker: str) -> None:
    with browser(real) as page:
        bodies(page)
        send(page, "hi")
        until("the first words", lambda: text(page, ".content, .reasoning"))
        page.find_element(By.ID, "new").click()  # while the answer streams
        assert idle(page)
        until("figures at rest", lambda: number(page, "running") == 0)
        assert text(page, "#log") == ""
        send(page, "anew")
        until("the first words", lambda: text(page, ".content, .reasoning"))
        assert [len(body["messages"]) for body in sent(page)] == [1, 1]
        assert text(page, ".user") == "anew"


def check_tokens_stream_and_the_state_lives(real: str, speaker: str) -> None:
    with browser(real) as page:
        until("figures at rest", lambda: number(page, "running") == 0 and number(page, "waiting") == 0)
        blank = page.execute_script(PLOT)
        send(page, "hi")
        said: set[int] = set()

        def grows() -> bool:
            said.add(len(text(page, ".content, .reasoning")))
            return len(said) > 5

        until("text that grows", grows)
        until("tokens a second", lambda: number(page, "rate") > 0)
        until("the end", lambda: idle(page))
        until("figures at rest", lambda: number(page, "running") == 0 and number(page, "cache") == 0)
        assert number(page, "steps") > 0 or number(page, "width") > 0
        until("a plot", lambda: page.execute_script(PLOT) != blank)
        assert text(page, "figcaption") == "tokens/s of the server"
        assert (text(page, "#first"), text(page, "#last"), text(page, "#bottom")) == ("2 min ago", "now", "0")
        assert float(text(page, "#top")) > 0


def check_a_refusal_is_shown_and_leaves_the_chat(real: str, speaker: str) -> None:
    with browser(real) as page:
        send(page, "a" * 600)
        # Longer than the context: refused, and Chromium notes every answer of 400 on its console.
        until("the refusal", lambda: "context" in text(page, ".error"))
        assert [line["message"] for line in page.get_log("browser") if "400" not in line["message"]] == []
        send(page, "hi")
        until("an answer", lambda: text(page, ".content, .reasoning"))


def check_it_has_an_icon(real: str, speaker: str) -> None:
    with browser(speaker) as page:
        (icon,) = page.find_elements(By.CSS_SELECTOR, "link[rel=icon]")
        ask = "return fetch(arguments[0]).then(answer => answer.status + answer.headers.get('content-type'))"
        assert page.execute_script(ask, icon.get_attribute("href")) == "200image/svg+xml"


def check_it_fits_a_phone(real: str, speaker: str) -> None:
    with browser(speaker, phone=True) as page:
        send(page, "w" * 200)
        until("the answer", lambda: text(page, ".content"))
        send(page, "Markdown")
        until("the second answer", lambda: text(page, ".content table"))
        setting(page, "system")
        width, inner = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= inner == 390
        shown = "h1, #new, dl div, figure *, form, #send, #text, label, input, select, .user, .content, .note"
        for node in page.find_elements(By.CSS_SELECTOR, shown):
            if not node.is_displayed() or node.tag_name in ("polygon", "polyline"):
                continue
            box = node.rect
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390, (node.get_attribute("id"), box)
            assert float(node.value_of_css_property("font-size").removesuffix("px")) >= 12
        for node in page.find_elements(By.CSS_SELECTOR, "button"):
            assert not node.is_displayed() or node.rect["height"] >= 32, "a thumb cannot hit it"
