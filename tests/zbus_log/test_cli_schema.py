"""`zbus schema`: what is registered, whether the events fit, and an AsyncAPI document that is valid."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from cli_processes import Commands
from pydantic import BaseModel

import zbus
from zbus.ports.log import Schema
from zbus.schema.asyncapi import asyncapi

DATA = Path(__file__).parents[1] / "data"
EXPRESSION = "shop/*/created"

call = Commands()


class Line(BaseModel):
    sku: str
    part_of: Line | None = None


class Order(BaseModel):
    id: int
    lines: list[Line] = []


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    call.close()


@pytest.fixture
def log(log_path: Path) -> Path:
    """A log with schemas, and events of which one does not fit: it was there before."""
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("shop/orders/created").publish(b"from before")
        bus.schemas.register(EXPRESSION, Order)
        bus.schemas.register("shop/**", {"type": "object"}, mode="permissive")
        bus.publisher("shop/orders/created").publish(Order(id=1))
        bus.publisher("shop/returns/created").publish({"id": 2})
        bus.publisher("audit/{x}").publish(b"no schema")
    return log_path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = call("schema", *arguments)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def lines(*arguments: object) -> list[dict[str, Any]]:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_list_shows_what_is_in_force_and_every_version_on_request(log: Path) -> None:
    with zbus.blocking.open(log) as bus:
        bus.schemas.remove("shop/**")

    (listed,) = lines("list", log, "--json")
    assert {key: listed[key] for key in ("expression", "version", "mode")} == {
        "expression": EXPRESSION,
        "version": 1,
        "mode": "strict",
    }
    assert [each["mode"] for each in lines("list", log, "--json", "--all")] == ["permissive", "removed", "strict"]
    assert EXPRESSION in run("list", log).stdout
    assert listed["hash"] in run("list", log).stdout


def test_a_log_without_schemas_says_so(log_path: Path) -> None:
    with zbus.blocking.open(log_path):
        pass
    for command in ("list", "check"):
        done = run(command, log_path)
        assert (done.returncode, done.stdout) == (0, "")
        assert "no schemas" in done.stderr


def test_show_prints_the_json_schema(log: Path) -> None:
    done = run("show", log, EXPRESSION)

    assert json.loads(done.stdout) == Order.model_json_schema()
    assert run("show", log, EXPRESSION, "--version", 1).stdout == done.stdout
    for missing in (("nothing/**",), (EXPRESSION, "--version", 2)):
        done = run("show", log, *missing)
        assert (done.returncode, done.stdout) == (2, "")
        assert "there is no such schema" in done.stderr


def test_check_finds_every_stored_event_that_does_not_fit(log: Path) -> None:
    done = run("check", log)

    assert done.returncode == 1
    (found,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (found["offset"], found["key"], found["expression"]) == (1, "shop/orders/created", EXPRESSION)
    assert found["reason"].startswith("it is not JSON")
    assert "3 events were checked; 1 is invalid" in done.stderr
    assert run("check", log, "-n", 0).stdout == ""


def test_check_is_content_with_a_log_that_fits(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.schemas.register("a", Order)
        bus.publisher("a").publish_many([{"id": n} for n in range(5000)])

    done = run("check", log_path)

    assert (done.returncode, done.stdout) == (0, "")
    assert "5,000 events were checked; 0 are invalid" in done.stderr


def test_check_says_whether_a_schema_could_follow(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "next.json"

    def checked(schema: Any, expression: str = EXPRESSION) -> subprocess.CompletedProcess[str]:
        file.write_text(schema if isinstance(schema, str) else json.dumps(schema))
        return run("check", log, expression, file)

    same = Order.model_json_schema()
    assert checked(same).returncode == 0
    assert checked({**same, "required": []}).returncode == 0
    assert checked({"type": "string"}, "new/**").returncode == 0
    refused = checked({**same, "required": ["id", "lines"]})
    assert refused.returncode == 1
    assert "now required: lines" in refused.stderr
    for bad in ("{", {"type": "objekt"}):
        done = checked(bad)
        assert done.returncode == 2
        assert "nothing was changed" in done.stderr
    assert len(lines("list", log, "--json", "--all")) == 2


def test_register_keeps_a_schema_unless_somebody_owns_the_log(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')

    (made,) = lines("register", log, "notes/**", file, "--mode", "permissive")

    assert (made["expression"], made["version"], made["mode"]) == ("notes/**", 1, "permissive")
    assert len(lines("list", log, "--json")) == 3
    assert run("register", log, EXPRESSION, file).returncode == 1
    assert run("register", log, "x", file, "--mode", "loose").returncode == 2
    (forced,) = lines("register", log, EXPRESSION, file, "--force")
    assert forced["version"] == 2
    with zbus.blocking.open(log):
        done = run("register", log, "y", file)
        assert done.returncode == 1
        assert "owned by process" in done.stderr
        assert "register the schema in that process, or stop it first" in done.stderr
        assert "read_only=True" not in done.stderr
    assert run("register", tmp_path / "none.db", "y", file).returncode == 2
    assert not (tmp_path / "none.db").exists()


# AsyncAPI.


@pytest.fixture(scope="module")
def official() -> Any:
    """The JSON Schema of AsyncAPI 3.0.0 itself, as its project publishes it."""
    return jsonschema_rs.validator_for(json.loads(gzip.decompress((DATA / "asyncapi-3.0.0.json.gz").read_bytes())))


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def resolve(document: Any, reference: str) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        document = document[step]
    return document


def test_export_is_a_valid_asyncapi_document_of_every_key_and_expression(log: Path, official: Any) -> None:
    done = run("export", log)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)

    official.validate(document)
    assert {each["title"]: each["address"] for each in document["channels"].values()} == {
        "shop/**": "shop/{part1}",
        EXPRESSION: "shop/{part1}/created",
        "shop/orders/created": "shop/orders/created",
        "shop/returns/created": "shop/returns/created",
        "audit/{x}": "audit/%7Bx%7D",
    }
    assert {each["action"] for each in document["operations"].values()} == {"send", "receive"}
    for reference in references(document):
        assert resolve(document, reference) is not None
    message = resolve(document, document["channels"]["shop_orders_created"]["messages"]["event"]["$ref"])
    assert len(message["payload"]["allOf"]) == 2  # held to both expressions
    assert "payload" not in document["components"]["messages"]["audit_x"]


def test_what_a_schema_refers_to_inside_itself_moves_with_it(official: Any) -> None:
    schema = Schema(EXPRESSION, 3, "strict", "ab", {**Order.model_json_schema(), "$schema": "x"}, 1)

    document = asyncapi("shop", ["shop/a/created"], [schema])

    official.validate(document)
    moved = document["components"]["schemas"]["shop_one_created"]
    assert moved["properties"]["lines"]["items"]["$ref"] == "#/components/schemas/shop_one_created/$defs/Line"
    assert moved["x-zbus-version"] == 3
    payload = {"$ref": "#/components/schemas/shop_one_created", "components": document["components"]}
    validator = jsonschema_rs.validator_for(payload)
    assert validator.is_valid({"id": 1, "lines": [{"sku": "a", "part_of": {"sku": "b"}}]})
    assert not validator.is_valid({"id": 1, "lines": [{"sku": "a", "part_of": {"sku": 7}}]})


def test_keys_that_look_alike_are_channels_of_their_own(official: Any) -> None:
    document = asyncapi("x", ["a/b", "a_b", "a-b", "é", "ü"], [])

    official.validate(document)
    assert len(document["channels"]) == 5
    assert len(document["operations"]) == 10
