"""Links of README.md, CHANGELOG.md and docs/: files and anchors exist, and every page is reachable from the index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from zbus.keys import check_expression, check_key, matches
from zbus.sim.faults import KINDS
from zbus.sim.ledger import INVARIANTS
from zbus_web.http import http_errors

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "index.md"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Link(NamedTuple):
    """One link or image of a page; `path` is empty for an anchor of the same page."""

    page: Path
    path: str
    anchor: str

    @property
    def target(self) -> Path:
        return (self.page.parent / self.path).resolve() if self.path else self.page


def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())


def links_of(page: Path) -> Iterator[Link]:
    """The links and images of a page to other files of the project."""
    for token in tokens_of(page):
        for child in token.children or ():
            target = str(child.attrs.get("href" if child.type == "link_open" else "src", ""))
            if target and not re.match(r"[a-z]+:", target):
                path, _, anchor = target.partition("#")
                yield Link(page, path, anchor)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headlines: lower case, without punctuation, blanks as hyphens."""
    tokens = tokens_of(page)
    headlines = [tokens[at + 1] for at, token in enumerate(tokens) if token.type == "heading_open"]
    texts = ["".join(child.content for child in each.children or ()) for each in headlines]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def broken(link: Link) -> str | None:
    """The reason why a link does not work, or None."""
    if not link.target.exists():
        return f"{link.path} does not exist"
    if link.anchor and link.anchor not in anchors_of(link.target):
        return f"{link.target.name} has no headline #{link.anchor}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_headline(page: Path) -> None:
    assert [reason for link in links_of(page) if (reason := broken(link)) is not None] == []


def test_every_page_is_reachable_from_the_index() -> None:
    found, todo = {INDEX}, [INDEX]
    while todo:
        for link in links_of(todo.pop()):
            if link.target.suffix == ".md" and link.target.exists() and link.target not in found:
                found.add(link.target)
                todo.append(link.target)

    assert {page.relative_to(ROOT).as_posix() for page in set(PAGES) - found} == set()


def test_every_page_begins_with_one_title_and_no_two_titles_are_the_same() -> None:
    titles = []
    for page in PAGES:
        tokens = tokens_of(page)
        (title,) = [
            tokens[at + 1].content for at, token in enumerate(tokens) if token.tag == "h1" and token.nesting == 1
        ]
        titles.append(title)

    assert len(set(titles)) == len(titles)


def test_every_picture_is_used() -> None:
    used = {link.target for page in PAGES for link in links_of(page)}

    assert set((ROOT / "docs" / "images").iterdir()) <= used


def test_every_test_that_a_promise_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "guarantees.md").read_text())

    assert len(named) >= 9
    assert [each for each in named if not (ROOT / each).exists()] == []


@pytest.mark.parametrize(
    ("markdown", "reason"),
    [
        ("# A\n\n[x](#a)", None),
        ("# A and *B*: `c/d`, e!\n\n[x](#a-and-b-cd-e)", None),
        ("# A\n\n[x](page.md#a)", None),
        ("# A\n\n| a |\n|---|\n| [x](none.md) |", "none.md does not exist"),
        ("# A\n\n![x](none.png)", "none.png does not exist"),
        ("# A\n\n[x](#b)", "page.md has no headline #b"),
        ("# A\n\n[x](page.md#b)", "page.md has no headline #b"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, markdown: str, reason: str | None) -> None:
    page = tmp_path / "page.md"
    page.write_text(markdown)

    (link,) = links_of(page)

    assert broken(link) == reason


def test_links_to_other_sites_are_not_looked_up(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[x](https://example.org/none.md#a) [y](mailto:x@example.org)")

    assert list(links_of(page)) == []


# Facts that a page states, compared with the code or with another page.


def rows_between(page: Path, start: str, end: str) -> list[list[str]]:
    """The cells of the tables between two comments, without their headers."""
    text = page.read_text().partition(start)[2].partition(end)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    headers = {at for at, line in enumerate(lines) if line.startswith("|---")}
    return [row for at, row in enumerate(rows) if at not in headers and at + 1 not in headers]


MATCHING = rows_between(ROOT / "docs" / "reference" / "keys.md", "<!-- matching -->", "<!-- /matching -->")


@pytest.mark.parametrize(("expression", "matching", "others"), MATCHING, ids=lambda cell: cell)
def test_the_table_of_key_expressions_is_true(expression: str, matching: str, others: str) -> None:
    (written,) = re.findall(r"`([^`]+)`", expression)
    inside, outside = (re.findall(r"`([^`]+)`", cell) for cell in (matching, others))

    assert inside
    assert outside
    for key in (*inside, *outside):
        assert key.startswith("@") or check_key(key) == key
    assert [key for key in inside if not matches(check_expression(written), key)] == []
    assert [key for key in outside if matches(check_expression(written), key)] == []


def test_the_table_of_key_expressions_has_every_wildcard() -> None:
    written = "".join(row[0] for row in MATCHING)

    assert len(MATCHING) >= 12
    assert all(each in written for each in ("`**`", "/*/", "/**/", "$*", "@"))


def test_the_table_of_http_error_codes_has_every_error_of_zbus() -> None:
    table = rows_between(ROOT / "docs" / "web.md", "<!-- codes -->", "<!-- /codes -->")
    listed = {(int(status), code.strip("`")) for status, code, _ in table}

    known = {(status, code) for _, status, code, _ in http_errors._KNOWN}
    known |= {(status, code) for status, code, _ in http_errors._BY_OUTCOME.values()}
    assert listed == known | {(status, code) for status, (code, _) in http_errors._BY_STATUS.items()}


def test_the_page_of_the_simulator_has_every_fault_with_its_meaning_and_every_invariant() -> None:
    page = ROOT / "docs" / "simulator.md"

    assert {f"`{kind}`": meaning for kind, meaning in KINDS.items()} == dict(
        rows_between(page, "<!-- faults -->", "<!-- /faults -->")  # type: ignore[arg-type]
    )
    assert [row[0] for row in rows_between(page, "<!-- invariants -->", "<!-- /invariants -->")] == list(INVARIANTS)


def test_the_install_page_names_every_extra_and_what_it_installs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "install.md").read_text().partition("## Extras")[2].partition("```")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", table, re.MULTILINE))

    def words(text: str) -> str:
        return re.sub(r"[^a-z]", "", text.lower())

    assert rows.keys() == extras.keys()
    for extra in extras.keys() - {"all"}:
        names = [re.split(r"[\[<>=]", each)[0] for each in extras[extra]]
        assert [name for name in names if words(name).removesuffix("driversqlite") not in words(rows[extra])] == []


def numbers(text: str) -> list[str]:
    """The measured values of a cell, such as `85,771 events/s`."""
    return re.findall(r"\d[\d,.]* (?:events/s|µs|ms|MB)", text)


def test_the_six_benchmark_rows_of_the_readme_are_rows_of_the_benchmark_page() -> None:
    measured = rows_between(ROOT / "docs" / "benchmarks.md", "<!-- benchmarks -->", "<!-- /benchmarks -->")
    known = {tuple(numbers(row[1]) + numbers(row[2])): float(row[3]) for row in measured}
    shown = rows_between(README, "<!-- benchmark-rows -->", "<!-- /benchmark-rows -->")

    assert len(measured) >= 40
    assert len(shown) == 6
    for row in shown:
        values = tuple(numbers(row[1]) + numbers(row[2]))
        assert len(values) == 2, row
        assert known[values] == pytest.approx(float(row[3]), rel=0.03), row


@pytest.mark.parametrize(
    ("page", "name"),
    [(README, "benchmark-rows"), (ROOT / "docs" / "benchmarks.md", "benchmarks")],
    ids=["README", "page"],
)
def test_benchmark_rows_have_their_command_commit_and_date(page: Path, name: str) -> None:
    text = page.read_text().partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    tables = text.count("\n|---")
    command, commit = r"`(?:make bench|python benchmarks/run\.py [^`]+)`", r"commit [0-9a-f]{7,}"
    runs = re.findall(rf"{command},? (?:at )?{commit}(?:,| on) 20\d\d-\d\d-\d\d", " ".join(text.split()))

    assert tables == len(runs) >= 1
