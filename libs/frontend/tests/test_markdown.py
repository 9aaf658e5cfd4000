"""The page's Markdown, run by an engine for JavaScript: what is drawn, and that no answer becomes HTML or a script."""

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

quickjs = pytest.importorskip("quickjs", reason="needs pip install 'openinfer-frontend[test]'")

TAGS = {"a", "blockquote", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong",
        "table", "tbody", "td", "th", "thead", "tr", "ul"}  # fmt: skip
ATTRIBUTES = {"class", "data-language", "href", "rel", "start", "target", "title"}
Markdown = Callable[[str], Any]


@pytest.fixture(scope="module")
def markdown() -> Markdown:
    """markdown(text): the tree of nodes."""
    context = quickjs.Context()
    context.set_time_limit(10)  # of the processor, in seconds
    context.eval(files("openinfer.frontend.http.pages").joinpath("static", "markdown.js").read_text())
    tree = context.eval("text => JSON.stringify(markdown(text))")
    return lambda text: json.loads(tree(text))


def words(node: Any) -> str:
    """The text of a node."""
    return node if isinstance(node, str) else "".join(map(words, node[2:]))


def outline(node: Any) -> Any:
    """A node without its attributes: the tag, then text or nodes; neighbouring strings as one."""
    if isinstance(node, str):
        return node
    found: list[Any] = [node[0]]
    for child in map(outline, node[2:]):
        if isinstance(child, str) and len(found) > 1 and isinstance(found[-1], str):
            found[-1] += child
        else:
            found.append(child)
    return found


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("a **b** *c*", [["p", "a ", ["strong", "b"], " ", ["em", "c"]]]),
        ("***d*** ~~e~~", [["p", ["strong", ["em", "d"]], " ", ["del", "e"]]]),
        ("**a *b***", [["p", ["strong", "a ", ["em", "b"]]]]),
        ("2 * 3 * 4, snake_case_name, 2 ** 3, **open", [["p", "2 * 3 * 4, snake_case_name, 2 ** 3, **open"]]),
        ("`x < *y*` ``a`b`` `open", [["p", ["code", "x < *y*"], " ", ["code", "a`b"], " `open"]]),
        (r"\*no\* \_ \d", [["p", r"*no* _ \d"]]),
        ("# A\n## B ##\n####### c", [["h3", "A"], ["h4", "B"], ["p", "####### c"]]),
        ("one\ntwo\n\nthree", [["p", "one\ntwo"], ["p", "three"]]),
        ("```py\nx = 1\n\n# y\n```\nafter", [["pre", ["code", "x = 1\n\n# y"]], ["p", "after"]]),
        ("~~~\n```\n~~~", [["pre", ["code", "```"]]]),
        ("still coming:\n```\nx", [["p", "still coming:"], ["pre", ["code", "x"]]]),
        (
            "- a\n- b\n  1. c\n  2. d\n- e",
            [["ul", ["li", "a"], ["li", "b", ["ol", ["li", "c"], ["li", "d"]]], ["li", "e"]]],
        ),
        ("1. a\n\n2. b\n\n   more\n\nafter", [["ol", ["li", "a"], ["li", "b", ["p", "more"]]], ["p", "after"]]),
        ("- ```\n  x\n  ```", [["ul", ["li", ["pre", ["code", "x"]]]]]),
        ("> a\n> > b\n\nc", [["blockquote", ["p", "a"], ["blockquote", ["p", "b"]]], ["p", "c"]]),
        ("a\n\n---\n* * *", [["p", "a"], ["hr"], ["hr"]]),
        (
            "| a | b |\n|---|:-:|\n| 1 | *2* |\n",
            [
                [
                    "table",
                    ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                    ["tbody", ["tr", ["td", "1"], ["td", ["em", "2"]]]],
                ]
            ],
        ),
        ("a | b\nno table", [["p", "a | b\nno table"]]),
        ("", []),
    ],
)  # fmt: skip
def test_what_is_drawn(markdown: Markdown, text: str, nodes: Any) -> None:
    assert [outline(node) for node in markdown(text)] == nodes


def links(node: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(node, str):
        if node[0] == "a":
            yield node[1]["href"], words(node)
        for child in node[2:]:
            yield from links(child)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](https://x.org/b_(c)?d=1)", [("https://x.org/b_(c)?d=1", "a")]),
        ('[a *b*](http://x.org "title") [m](mailto:a@b.c)', [("http://x.org", "a b"), ("mailto:a@b.c", "m")]),
        ("see https://x.org/a_b, or <https://y.org>.", [("https://x.org/a_b",) * 2, ("https://y.org",) * 2]),
        ("![a picture](https://x.org/a.png)", [("https://x.org/a.png", "a picture")]),  # it is not fetched
        ("[a](javascript:alert(1)) [b](JAVASCRIPT:x) [c](java\nscript:x) [d](data:text/html,x)", []),
        ("[a](//x.org) [b](/v1/models) [c]( javascript:x) <javascript:x> [d](vbscript:x)", []),
        ('[a](https://x.org/"onclick="x) [b](https://x.org/<b>)', [("https://x.org/",) * 2] * 2),
    ],
)
def test_only_links_that_are_safe_are_links(markdown: Markdown, text: str, found: Any) -> None:
    assert [link for node in markdown(text) for link in links(node)] == found


def check(node: Any) -> None:
    """Only tags and attributes that the page knows; links as they must be."""
    if isinstance(node, str):
        return
    tag, attributes, *children = node
    assert tag in TAGS
    assert attributes.keys() <= ATTRIBUTES
    if tag == "a":
        assert attributes["href"].lower().startswith(("http://", "https://", "mailto:"))
        assert attributes["rel"] == "noopener noreferrer nofollow"
    for child in children:
        check(child)


PIECES = st.lists(
    st.sampled_from(
        ["<script>", "</p>", '<img src=x onerror="x">', "[a](", "javascript:x", "https://x.y", ")", "](", "![", "<",
         ">", "*", "**", "***", "_", "`", "```", "~~~", "\n", "\n\n", "  ", "- ", "1. ", "> ", "# ", "|", "-|-", "\\",
         "a", "é"]
    ),
    max_size=40,
)  # fmt: skip


@given(PIECES)
@settings(deadline=None)
@example(["<script>"])
@example(["[a](", "javascript:x", ")"])
def test_no_text_becomes_anything_else(markdown: Markdown, pieces: list[str]) -> None:
    text = "".join(pieces)
    for node in markdown(text):
        check(node)
        assert all(char in text for char in words(node))


@given(PIECES)
@settings(deadline=None, max_examples=30)
def test_letters_are_kept_while_an_answer_comes(markdown: Markdown, pieces: list[str]) -> None:
    text = "".join(pieces)
    shown = "".join(map(words, markdown(text + "\n\nend")))
    assert shown.endswith("end")


@pytest.mark.parametrize(
    "text",
    ["[" * 20_000 + "](x)", "**a " * 5000, "*a" * 10_000, "_*" * 10_000, "`a``" * 5000, "> " * 10_000, "- " * 10_000,
     "|-" * 5000 + "\n" + "|-" * 5000, "![a](" * 4000, "https://" * 3000, "> a\n" * 5000, "- a\n" * 5000,
     "\n".join("  " * depth + "- x" for depth in range(150))],
    ids=range(13),
)  # fmt: skip
def test_a_long_answer_of_marks_takes_no_square_time(markdown: Markdown, text: str) -> None:
    markdown(text)  # the limit of the context ends it otherwise
