"""Every code block in README.md and docs/ is run, and every doctest.

The blocks of one document share a folder and run from top to bottom, as a reader would run them.

| language         | what is done with it |
|------------------|-----------------------|
| python           | run in a fresh process; it must exit with 0. With Spark: here, in the one session of the tests. |
|                  | With a file name in its first line (`# shop.py`), it is also written to that file |
| text, output     | directly after a python, bash or console block: that block's real output, `…` stands for anything |
| bash, console    | each `zbus …` line is run (console: lines after `$ `, the others are output), `make x` must exist |
|                  | `pytest …` is run too, and may fail if the document shows what it prints then |
| toml             | loaded as a `BusConfig` and its table [web], as a pipeline with a source or a scenario with nodes;
|                  | `# name.toml` as its first line: later commands find it under that name |
| mermaid          | starts with a diagram that mermaid knows |
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from cli_processes import Commands
from markdown_it import MarkdownIt
from nats_support import nats_server
from plugin_support import plugin_variables

import zbus
import zbus_cache
import zbus_dynamo
import zbus_log
import zbus_nats
import zbus_spark
import zbus_web
import zbus_zmq
from zbus.config import load_config
from zbus.sim.scenarios.declared import load_declared
from zbus_spark.jobs import pipeline_file as declared
from zbus_web.http.settings import load_settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_S = 250
PLACES: dict[str, str] = {}  # the usual places, and where they are in this run
run = Commands(["zbus", "zbus_log", "zbus_zenoh", "zbus_cache", "zbus_nats", "zbus_zmq", "zbus_dynamo", "zbus_web"])
MERMAID = (
    *("flowchart", "graph", "sequenceDiagram", "stateDiagram", "stateDiagram-v2", "classDiagram", "erDiagram"),
    *("journey", "gantt", "pie", "timeline", "mindmap", "block-beta", "quadrantChart", "xychart-beta"),
)


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    text: str
    output: str | None = None  # what the document says that this block prints

    def __str__(self) -> str:
        return f"{self.document}:{self.line}:{self.language or 'no language'}"

    @property
    def uses_spark(self) -> bool:
        return self.language == "python" and "zbus_spark.session(" in self.text


class Wrong(AssertionError):
    """A block that does not do what the document says."""


def blocks_of(markdown: str, document: str) -> Iterator[Block]:
    """The fenced blocks in order; the output that directly follows a program belongs to it."""
    tokens = MarkdownIt().parse(markdown)
    program: Block | None = None
    for token in tokens:
        if token.type != "fence":
            if program is not None:
                yield program
            program = None
            continue
        language = (token.info.split() or [""])[0]
        block = Block(document, (token.map or [0])[0] + 1, language, token.content)
        if program is not None and language in ("text", "output"):
            yield Block(program.document, program.line, program.language, program.text, token.content)
            program = None
            continue
        if program is not None:
            yield program
            program = None
        if language in ("python", "bash", "console"):
            program = block
        else:
            yield block
    if program is not None:
        yield program


def check(block: Block, folder: Path) -> None:
    """Run a block in `folder` and raise `Wrong` if it does not do what the document says."""
    if block.language == "python":
        if (file := re.match(r"# (\w+\.py)\n", block.text)) is not None:
            (folder / file[1]).write_text(block.text)
        printed = (_run_here if block.uses_spark else _run)(_placed(block.text), folder)
        if block.output is not None:
            _compare(block.output, printed)
    elif block.language in ("bash", "console"):
        _check_commands(block, folder)
    elif block.language == "toml":
        named = re.match(r"# ([\w-]+\.toml)\n", block.text)
        path = folder / (named[1] if named else "block.toml")
        path.write_text(block.text)
        if "[[node]]" in block.text:
            load_declared(path)
            return
        declared.load(path) if "[source]" in block.text else load_config(path)
        load_settings(path)
    elif block.language == "mermaid":
        first = (block.text.split() or [""])[0]
        if first not in MERMAID:
            raise Wrong(f"{first!r} is no diagram of mermaid")
    elif block.language == "output":
        raise Wrong("output of nothing: it must directly follow the block that prints it")
    elif block.language != "text":
        raise Wrong(f"a block in {block.language or 'no language'!r}, which no test runs")


def _check_commands(block: Block, folder: Path) -> None:
    printed = ""
    for command, output in _commands(block):
        words = shlex.split(command, comments=True)
        if words[:1] == ["make"]:
            _check_make(words[1:])
            continue
        if re.match(r"(python3? -m )?pip install\b", command):
            continue
        if words[:1] == ["pytest"]:
            answer = _run_in_shell(command, folder, codes=(0,) if output is None else (0, 1))
            _compare(output or "…", answer)
            continue
        if "zbus" not in words:
            raise Wrong(f"no test runs this command: {command}")
        if re.match(r"zbus (router|broker|bridge|serve)\b(?!.*--(help|new-keys))", command):
            _check_service(shlex.split(_placed(command), comments=True), folder)
            continue
        answer = _run_in_shell(_placed(command), folder)
        printed += answer
        if output is not None:
            _compare(output, answer)
    if block.output is not None:
        _compare(block.output, printed)


def _commands(block: Block) -> Iterator[tuple[str, str | None]]:
    """Each command, and for a console what it is said to print."""
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        for line in text.splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip(), None
        return
    before, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    if before.strip() or not parts:
        raise Wrong("a console block starts with '$ ' and a command")
    for part in parts:
        command, _, output = part.partition("\n")
        yield command, output if output.strip() else None


def _check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [word for word in words if "=" not in word and not word.startswith("-")]
    if not targets.issuperset(wanted):
        raise Wrong(f"the Makefile has no target {', '.join(set(wanted) - targets)}")


def _placed(text: str) -> str:
    """Documents name the usual ports; here they are those of this run."""
    for usual, here in PLACES.items():
        text = text.replace(usual, here)
    return text


def _check_service(command: list[str], folder: Path) -> None:
    """A command that runs until it is stopped: it prints that it is ready, and ends with 0."""
    with subprocess.Popen(
        command, cwd=folder, env=_environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        ready = service.stdout.readline()
        service.terminate()
        _, stderr = service.communicate(timeout=RUN_S)
    if not ready.startswith("{") or service.returncode != 0:
        raise Wrong(f"exit code {service.returncode}\n{ready}{stderr}")


def _environment(folder: Path) -> dict[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ZBUS_", "DYN_", "PYTEST_"))
    }
    bin_folder = str(Path(sys.executable).parent)
    return environment | {
        "PATH": f"{bin_folder}{os.pathsep}{environment['PATH']}",
        "XDG_RUNTIME_DIR": str(folder),  # nodes of this host find each other there
        "ZBUS_SPARK_NICE": "0",  # or it would wait for the other tests
        "ZBUS_WEB_PORT": "0",  # documents name none, and the usual one may be taken
        "COLUMNS": "120",
        "PYTHONUTF8": "1",
    }


def _run(program: str, folder: Path) -> str:
    """The output of a program that succeeds, in the environment of a reader who set nothing."""
    ran = run.program(program, folder, _environment(folder))
    return _succeeded(ran.returncode, ran.stdout.decode(), ran.stderr.decode())


def _run_in_shell(command: str, folder: Path, codes: tuple[int, ...] = (0,)) -> str:
    environment = _environment(folder) | plugin_variables()
    environment["PATH"] = f"{run.path}{os.pathsep}{environment['PATH']}"
    shell = ["bash", "-euo", "pipefail", "-c", command]
    ran = subprocess.run(
        shell, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S
    )
    return _succeeded(ran.returncode, ran.stdout, ran.stderr, codes)


def _run_here(program: str, folder: Path) -> str:
    from spark_support import spark

    spark()  # is what the program's `session()` finds
    module, printed = ModuleType("__main__"), io.StringIO()
    with pytest.MonkeyPatch.context() as here, contextlib.redirect_stdout(printed):
        here.chdir(folder)
        here.setitem(sys.modules, "__main__", module)
        program = re.sub(r'"([\w-]+\.db)"', rf'"{folder}/\1"', program)  # Spark's own folder is another one
        exec(compile(program, "<string>", "exec"), module.__dict__)
    return printed.getvalue()


def _succeeded(code: int, output: str, errors: str, codes: tuple[int, ...] = (0,)) -> str:
    if code not in codes:
        raise Wrong(f"exit code {code}\n{output}{errors}")
    return output


def _compare(expected: str, printed: str) -> None:
    wanted, found = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (expected, printed))
    pattern = ".*".join(re.escape(part) for part in wanted.split("…"))
    if not re.fullmatch(pattern, found, re.DOTALL):
        raise Wrong(f"the document says:\n{wanted}\n\nit prints:\n{found}")


# The documents.

ALL_BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path.read_text(), path.relative_to(ROOT).as_posix())]
WITH_SPARK = {block.document for block in ALL_BLOCKS if block.uses_spark}
BLOCKS = [block for block in ALL_BLOCKS if block.document not in WITH_SPARK]
SPARK_BLOCKS = [block for block in ALL_BLOCKS if block.document in WITH_SPARK]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {document: tmp_path_factory.mktemp("docs") for document in {block.document for block in ALL_BLOCKS}}


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A nats-server, and free ports, for the places that the documents name."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        PLACES["127.0.0.1:4222"] = server.url.removeprefix("nats://")
        for usual in ("127.0.0.1:7447", "127.0.0.1:5555", "127.0.0.1:5556"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                PLACES[usual] = f"127.0.0.1:{free.getsockname()[1]}"
        yield
    PLACES.clear()
    run.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ZBUS_") or name == "DYN_EVENT_PLANE":
            monkeypatch.delenv(name)


@pytest.mark.timeout(3 * RUN_S)  # a block may have several commands
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_code_block_in_the_documents_does_what_they_say(block: Block, folders: dict[str, Path]) -> None:
    check(block, folders[block.document])


@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("block", SPARK_BLOCKS, ids=str)
def test_a_code_block_in_a_document_about_spark_does_what_it_says(block: Block, folders: dict[str, Path]) -> None:
    check(block, folders[block.document])


def test_the_readme_shows_a_python_example_with_its_real_output_and_the_two_commands() -> None:
    readme = [block for block in ALL_BLOCKS if block.document == "README.md"]
    commands = [line for block in readme if block.language == "bash" for line in block.text.splitlines()]

    assert any(block.language == "python" and block.output for block in readme)
    assert {line.partition("#")[0].strip() for line in commands} >= {"make demo", "make test"}


# The harness itself.


def check_all(markdown: str, folder: Path) -> list[Block]:
    blocks = list(blocks_of(markdown, "made-up.md"))
    for block in blocks:
        check(block, folder)
    return blocks


def file_with_test(body: str) -> str:
    return f"```python\n# test_a.py\ndef test_a(): {body}\n```\n\n"


GOOD = {
    "python with its output": "```python\nimport zbus\nprint('offset', 1)\n```\n\n```text\noffset 1\n```",
    "output with a part left open": "```python\nprint('17 ms\\nmore\\nend')\n```\n```output\n… ms\n…\nend\n```",
    "python without output": "```python\nprint(1)\n```\nSome words.\n```text\na picture\n```",
    "a block in a list": "- first\n\n  ```python\n  print(1)\n  ```\n\n  ```text\n  1\n  ```\n",
    "a log that a later block reads": "```python\nopen('a', 'w')\n```\n\n```python\nopen('a')\n```",
    "make": "```bash\nmake test\nmake demo  # twenty seconds\nmake PYTHON=python3.12 test\n```",
    "a test": file_with_test("...") + "```console\n$ pytest -q test_a.py\n.…1 passed…\n```",
    "a failing test": file_with_test("assert 0") + "```console\n$ pytest test_a.py\n…1 failed…\n```",
    "pip": "```bash\npip install 'zbus-mesh[nats]'\npython -m pip install zbus-mesh\n```",
    "toml": "```toml\nlog = 'app.db'\nretain_events = 5\n```",
    "a scenario that a later command reads": (
        "```toml\n# a.toml\n[[node]]\nname = 'a'\n```\n\n```bash\nzbus sim routes a.toml\n```"
    ),
    "mermaid": "```mermaid\nflowchart LR\n  a --> b\n```",
}
WRONG = {
    "another output": "```python\nprint('offset', 2)\n```\n\n```text\noffset 1\n```",
    "more output than said": "```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n```",
    "less output than said": "```python\nprint(1)\n```\n\n```output\n1\n…\n3\n```",
    "no output where some is said": "```python\nprint(end='')\n```\n```text\n1\n```",
    "an exception": "```python\nraise ValueError\n```",
    "a wrong exit code": "```python\nraise SystemExit(3)\n```",
    "a syntax error": "```python\nasync with zbus.open() as bus:\n```",
    "another output in a list": "- first\n\n  ```python\n  print(2)\n  ```\n\n  ```text\n  1\n  ```\n",
    "output of nothing": "Words.\n\n```output\n1\n```",
    "a make target that is not there": "```bash\nmake coffee\n```",
    "a command that no test runs": "```bash\ncurl https://example.org\n```",
    "a failing test without output": file_with_test("assert 0") + "```bash\npytest test_a.py\n```",
    "a test with another output": file_with_test("...") + "```console\n$ pytest test_a.py\n…1 failed…\n```",
    "a test that is not there": "```console\n$ pytest test_none.py\n…\n```",
    "a zbus command that fails": "```bash\nzbus no-such-command\n```",
    "a console without a command": "```console\nzbus doctor\n```",
    "an unknown language": "```brainfuck\n+\n```",
    "no language": "```\nprint(1)\n```",
    "a diagram that mermaid does not know": "```mermaid\npicture LR\n```",
}


@pytest.mark.parametrize("markdown", GOOD.values(), ids=GOOD.keys())
def test_the_harness_accepts_a_document_that_says_the_truth(markdown: str, tmp_path: Path) -> None:
    assert check_all(markdown, tmp_path)


@pytest.mark.parametrize("markdown", WRONG.values(), ids=WRONG.keys())
def test_the_harness_fails_on_a_document_that_does_not_say_the_truth(markdown: str, tmp_path: Path) -> None:
    with pytest.raises(Wrong):
        check_all(markdown, tmp_path)


@pytest.mark.parametrize("text", ["colour = 'red'", "mode = 'client'", "log = ", "[[node]]\nlog = true"])
def test_the_harness_fails_on_a_configuration_that_is_not_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(zbus.ConfigInvalid):
        check_all(f"```toml\n{text}\n```", tmp_path)


def test_the_harness_runs_the_commands_of_zbus_and_compares_what_they_print(tmp_path: Path) -> None:
    check_all("```console\n$ zbus --help\n…pub…sub…\n```", tmp_path)
    check_all("```bash\nzbus --help\n```\n\n```text\n…doctor…\n```", tmp_path)

    with pytest.raises(Wrong):
        check_all("```console\n$ zbus --help\nsomething else\n```", tmp_path)
    with pytest.raises(Wrong):
        check_all("```bash\nzbus --help\n```\n\n```text\nsomething else\n```", tmp_path)


# Doctests.


def modules() -> list[ModuleType]:
    found = []
    for package in (zbus, zbus_log, zbus_cache, zbus_spark, zbus_nats, zbus_zmq, zbus_dynamo, zbus_web):
        names = [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        found += [importlib.import_module(name) for name in names if not name.endswith("__main__")]
        found.append(package)
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_print_what_they_say(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert doctest.testmod(module).failed == 0


def test_there_are_examples_in_the_docstrings() -> None:
    finder = doctest.DocTestFinder()

    examples = sum(len(test.examples) for module in modules() for test in finder.find(module))

    assert examples >= 10
