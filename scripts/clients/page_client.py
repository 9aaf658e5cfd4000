"""The page at / in a headless Chromium: a chat whose tokens stream, the engine's live state, on a desk and a phone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
PLOT = "return document.getElementById('plot').toDataURL()"
PHONE = {"deviceMetrics": {"width": 390, "height": 844, "pixelRatio": 1.0}}


def missing() -> str | None:
    """What a machine lacks for this."""
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


def number(page: Any, name: str) -> float:
    """One of the figures; -1 before there is one."""
    word = text(page, f"#{name}").split(" ")[0]
    return float(word) if word[:1].isdigit() else -1.0


def check_an_answer_is_shown_as_it_was_said(real: str, speaker: str) -> None:
    with browser(speaker) as page:
        until("the model's name", lambda: text(page, "#model") == "speaker")
        page.find_element(By.ID, "text").send_keys("hi\n")
        until("the answer", lambda: "tokens" in text(page, ".note"))
        assert text(page, ".user") == "hi"
        assert text(page, ".reasoning") == "hm"
        assert text(page, ".content") == "Hello there, friend."
        assert page.find_element(By.ID, "text").get_attribute("value") == ""
        page.find_element(By.ID, "text").send_keys("and again\n")
        until("the second answer", lambda: text(page, ".content").count("Hello there") == 2)


def check_tokens_stream_and_the_state_lives(real: str, speaker: str) -> None:
    with browser(real) as page:
        blank = page.execute_script(PLOT)
        until("figures at rest", lambda: number(page, "running") == 0 and number(page, "waiting") == 0)
        page.find_element(By.ID, "text").send_keys("hi\n")
        said: set[int] = set()

        def grows() -> bool:
            said.add(len(text(page, ".content, .reasoning")))
            return len(said) > 5

        until("text that grows", grows)
        until("tokens a second", lambda: number(page, "rate") > 0)
        until("the end", lambda: text(page, "#send") == "Send")
        until("figures at rest", lambda: number(page, "running") == 0 and number(page, "cache") == 0)
        assert number(page, "steps") > 0 or number(page, "width") > 0
        until("a plot", lambda: page.execute_script(PLOT) != blank)


def check_a_refusal_is_shown_and_leaves_the_chat(real: str, speaker: str) -> None:
    with browser(real) as page:
        page.find_element(By.ID, "text").send_keys("a" * 600 + "\n")
        # Longer than the context: refused, and Chromium notes every answer of 400 on its console.
        until("the refusal", lambda: "context" in text(page, ".error"))
        assert [line["message"] for line in page.get_log("browser") if "400" not in line["message"]] == []
        page.find_element(By.ID, "text").send_keys("hi\n")
        until("an answer", lambda: text(page, ".content, .reasoning"))


def check_it_fits_a_phone(real: str, speaker: str) -> None:
    with browser(speaker, phone=True) as page:
        page.find_element(By.ID, "text").send_keys("w" * 200 + "\n")
        until("the answer", lambda: text(page, ".content"))
        width, inner = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= inner == 390
        for node in page.find_elements(By.CSS_SELECTOR, "h1, dl div, form, #send, #text, .user, .content"):
            box = node.rect
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390, (node.get_attribute("id"), box)
            assert float(node.value_of_css_property("font-size").removesuffix("px")) >= 12
        send = page.find_element(By.ID, "send").rect
        assert send["height"] >= 32, "a thumb cannot hit it"
