"""The generated reference pages are up to date and complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import reference_api

import zbus
import zbus.errors
from zbus.bridge.config import BridgeConfig
from zbus.cli.renamed import OPTIONS
from zbus_web.http.settings import WebSettings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_generator_writes(name: str) -> None:
    page = FOLDER / name

    assert page.is_file(), f"docs/reference/{name} is missing; run: make reference"
    assert page.read_text() == PAGES[name], f"docs/reference/{name} is not up to date; run: make reference"


def test_the_folder_has_no_page_that_is_no_longer_generated() -> None:
    marked = {path.name for path in FOLDER.iterdir() if path.read_text().startswith(reference.GENERATED)}

    assert marked == set(PAGES)


def test_the_pages_do_not_depend_on_the_terminal_or_the_environment(tmp_path: Path) -> None:
    narrow = os.environ | {"COLUMNS": "40", "ZBUS_LOG": "/no/such/log.db", "ZBUS_NODE": "x", "PYTHONHASHSEED": "7"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "reference.py"), str(tmp_path)]

    subprocess.run(command, env=narrow, cwd=tmp_path, check=True, timeout=120)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == PAGES


def test_every_setting_is_listed_with_its_variable() -> None:
    page = PAGES["settings.md"]

    for name in zbus.BusConfig.model_fields:
        assert f"| `{name}` | `ZBUS_{name.upper()}` |" in page
    for name in WebSettings.model_fields:
        assert f"| `{name}` | `ZBUS_WEB_{name.upper()}` |" in page
    for name in BridgeConfig.model_fields:
        assert f"| `{name}` |" in page.partition("## Bridge")[2]


def test_every_setting_has_a_description() -> None:
    for line in PAGES["settings.md"].splitlines():
        if line.startswith("| `"):
            assert re.fullmatch(r"\|.*\| \S.* \|", line), line


def listed(option: str, section: str) -> bool:
    """Whether the table of a command has this option, among its spellings."""
    return re.search(rf"^\| `([^`]*[ ,/])?{option}[ ,`/]", section, re.MULTILINE) is not None


def test_every_option_is_listed_under_its_command() -> None:
    sections = dict(re.findall(r"^## (zbus[^\n]*)\n(.*?)(?=^## |\Z)", PAGES["cli.md"], re.MULTILINE | re.DOTALL))

    assert set(OPTIONS) < set(sections)
    for path, command in reference.commands():
        for parameter in command.params:
            for name in parameter.opts if parameter.param_type_name == "option" else ():
                assert listed(name, sections[path]) is not bool(getattr(parameter, "hidden", False)), (path, name)
    for path, retired in OPTIONS.items():
        for old, new in retired.items():
            assert listed(new, sections[path])
            assert not listed(old, sections[path])


def test_every_public_name_has_a_section_or_is_an_error_with_a_link() -> None:
    page = PAGES["api.md"]
    sections = re.findall(r"^### (\S+)$", page, re.MULTILINE)

    assert len(sections) == len(set(sections))
    assert {name for name in zbus.__all__ if name not in sections} == set(reference_api.error_names())
    for name in reference_api.error_names():
        assert f"[`{name}`](errors.md#{name.lower()})" in page


def test_every_public_method_of_a_bus_is_listed_with_a_description() -> None:
    section = PAGES["api.md"].partition("\n### Bus\n")[2].partition("\n### ")[0]

    for name in dir(zbus.Bus):
        if not name.startswith("_"):
            assert re.search(rf"^- `(await )?{name}[(:][^`]*` – \S", section, re.MULTILINE), name


def test_every_error_is_in_the_tree_and_has_its_own_section() -> None:
    page = PAGES["errors.md"]
    tree, _, sections = page.partition("\n```\n")

    for error in reference.error_classes():
        assert re.search(rf"\b{error.__name__}\b", tree)
        assert f"## {error.__name__}\n" in sections
    assert zbus.errors.ZbusError in reference.error_classes()
