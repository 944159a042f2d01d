"""Prose uses the words of the field: no docstring, comment, message or page contains a word that the glossary retired.

Only comments and strings of Python files and the text of Markdown files are searched. Inline code and fenced blocks are
left out, so that a name in the code never counts. Strings of one or two words are names that users see in records,
statistics and settings: of these, only words that can have no other meaning are rejected.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("zbus", "adapters", "store", "benchmarks", "docs")
PROSE = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))

WORDS_MIN = 3  # shorter strings are keys and values, not prose
CODE = ("zbus", "adapters", "store")
NAMES = re.compile(
    "asked|asker|asking|answering|errands?|figures|heard|hearing|holes?|nobody|questions?|tell|telling|told"
)
# Names that files and frames of the first version have. They can be read forever, so they stay.
FIRST_VERSION = {
    ("adapters/zbus_zmq/find/discovery.py", "questions"),
    ("store/zbus_log/file/old_folder.py", "-errands"),
    ("store/zbus_spark/cli/gaps.py", "heard/"),
    ("zbus/mesh/network.py", "heard"),
    ("zbus/mesh/network.py", "heard/"),
}

# A retired word, and what to write instead.
RETIRED = {
    r"[Nn]obody|[Ss]omebody|[Ee]verybody|[Ww]hoever": "name the part: the caller, a subscriber, another node",
    r"errands?": "proxied write",
    r"figures": "metrics, or statistics",
    r"holes?": "gap",
    r"hears?|heard|hearing": "receive, see, listen",
    r"(?:is|are|was|were|be|being) told|tells? of|told of": "report, log, notify, return",
    r"for ever": "forever",
    r"under way": "in flight, in progress",
    r"(?:go|goes|going|went) on": "continue, resume",
    r"far (?:end|side)": "remote end, peer",
    r"th(?:is|at|e) very": "leave it out, or name the instant",
    r"(?<!there )(?:is|are) none(?! of)": "say what was expected",
    r"so many(?! that)|for so long(?! as)": "name the quantity",
    r"telephone|rubbish|nonsense": "phone, malformed input",
}
ANY = re.compile(r"\b(?:" + "|".join(f"(?P<w{number}>{each})" for number, each in enumerate(RETIRED)) + r")\b")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The pieces of prose of a file, each with its line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in PROSE and token.string.count(" ") >= WORDS_MIN - 1:
                yield token.start[0], token.string
    else:
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
        yield from enumerate(text.split("\n"), 1)


def retired(text: str) -> Iterator[str]:
    """The retired words of a text, each with what to write instead."""
    for found in ANY.finditer(re.sub(r"``[^`]+``|`[^`\n]+`", "", text)):
        number = next(int(name[1:]) for name, value in found.groupdict().items() if value is not None)
        yield f"{found[0]!r}: {list(RETIRED.values())[number]}"


def files() -> list[Path]:
    found = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md")]
    return sorted([*found, ROOT / "README.md", ROOT / "CHANGELOG.md"])


def test_no_prose_uses_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {hint}"
        for path in files()
        for line, text in prose(path)
        for hint in retired(text)
    ]
    assert found == []


def short_strings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a Python file that are too short for prose, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) < WORDS_MIN:
            yield node.lineno, node.value


def test_no_name_that_users_see_is_a_retired_word() -> None:
    found = {
        (str(path.relative_to(ROOT)), text): line
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in short_strings(path)
        if any(NAMES.fullmatch(word) for word in re.split(r"[\W_]+", text))
    }
    assert {where: line for where, line in found.items() if where not in FIRST_VERSION} == {}
    assert FIRST_VERSION - found.keys() == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What nobody heard goes on.", 3),
        ("`heard` and `holes` are names", 0),
        ("so many that it matters, none of them", 0),
    ],
)
def test_the_check_finds_retired_words_in_prose_only(text: str, words: int) -> None:
    assert len(list(retired(text))) == words
