"""`zbus sim routes`: which event reaches which subscription, why or why not, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cli_processes import Commands

from zbus.keys import check_expression, matches
from zbus.sim.machine.fabric import SimFabric
from zbus.sim.route_rules import Topology, Verdict, mismatch
from zbus.sim.scenarios.declared import DeclaredSubscription, load_declared
from zbus.sim.scenarios.routes import Report, find_routes

Find = Callable[[str], Report]
zbus = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    zbus.close()


@pytest.fixture
def find(tmp_path: Path) -> Find:
    def find_in(text: str) -> Report:
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return find_routes(load_declared(path))

    return find_in


def whys(report: Report) -> dict[tuple[int, str], tuple[bool, str]]:
    """By number of the event and subscription: whether it was delivered, and why."""
    assert report.broken == []
    return {(each.event, each.subscription): (each.delivered, each.why) for each in report.routes}


# Key expressions.

NODES = """
[[node]]
name = "a"
log = true

[[node]]
name = "b"
log = true
subscribe = [
  { keys = ["shop/*"], name = "one" },
  { keys = ["shop/**"], name = "any" },
  { keys = ["shop/truck-$*"], name = "part" },
  { keys = ["shop/@private/*"], name = "private" },
  { keys = ["audit/**", "shop/*/created"], name = "two", durable = "durable" },
]
"""


@pytest.mark.parametrize(
    ("key", "reached", "not_reached"),
    [
        ("shop/x", {"one", "any"}, {"part": "segment 2 is 'x', which 'truck-$*' does not match"}),
        (
            "shop/x/created",
            {"any", "two"},
            {
                "one": "'*' matches exactly one segment; 'shop/**' would match",
                "private": "segment 2 is 'x', not '@private'",
            },
        ),
        (
            "shop",
            {"any"},
            {"one": "'*' matches exactly one segment", "part": "the key ends where 'truck-$*' must follow"},
        ),
        (
            "shop/truck-7",
            {"one", "any", "part"},
            {"two": "'audit/**' does not match: segment 1 is 'shop', not 'audit'"},
        ),
        (
            "shop/@private/x",
            {"private"},
            {
                "any": "no wildcard matches '@private', because it starts with '@'",
                "part": "segment 2 is '@private', and no wildcard matches a segment that starts with '@'",
            },
        ),
    ],
)
def test_the_expression_that_matches_is_named_and_otherwise_what_differs(
    find: Find, key: str, reached: set[str], not_reached: dict[str, str]
) -> None:
    found = whys(find(f'{NODES}\n[[event]]\nfrom = "a"\nkey = "{key}"'))

    assert {name for (_, name), (delivered, _) in found.items() if delivered} == reached
    for name, reason in not_reached.items():
        assert reason in found[1, name][1]
    for name in reached:
        expression = {"one": "shop/*", "any": "shop/**", "part": "shop/truck-$*"}.get(name)
        assert found[1, name][1].endswith("matches; over sim://world")
        assert expression is None or found[1, name][1].startswith(f"{expression!r} matches")


@pytest.mark.parametrize(
    ("expression", "key", "reason"),
    [
        ("a/b", "a/b/c", "the key continues with 'c'"),
        ("a/b", "a", "the key ends where 'b' must follow"),
        ("a/b/**", "a", "the key ends where 'b' must follow"),
        ("a/**/d", "a", "it needs at least 2 segments, and the key has 1"),
        ("**/d", "a/b", "segment 2 is 'b', not 'd'"),
        ("a/**/b/**/d", "a/c/d", "'c' does not match '**/b/**'"),
        ("a/$*c/*", "a/b/c", "segment 2 is 'b', which '$*c' does not match"),
    ],
)
def test_the_first_difference_of_an_expression_and_a_key_is_named(expression: str, key: str, reason: str) -> None:
    assert mismatch(expression, key) == reason


def test_every_expression_that_does_not_match_has_a_reason() -> None:
    def texts(*segments: str) -> list[str]:
        return ["/".join(each) for length in (1, 2, 3) for each in product(segments, repeat=length)]

    compared = 0
    for expression, key in product(texts("a", "@b", "*", "**", "a$*"), texts("a", "b", "@b", "ab")):
        if not matches(check_expression(expression), key):
            assert mismatch(expression, key)
            compared += 1
    assert compared > 5000


# Transports and bridges.

SIDES = """
[[node]]
name = "left"
log = true
transport = "sim://left"
subscribe = [{ keys = ["**"], name = "at-left" }]

[[node]]
name = "right"
transport = "sim://right"
subscribe = [{ keys = ["**"], name = "at-right" }]

[[event]]
from = "left"
key = "shop/x"

[[event]]
from = "right"
key = "shop/x"
"""


def bridge(**changed: Any) -> str:
    settings = {"name": "x", "between": ["sim://left", "sim://right"], "keys": ["shop/**"], "log": True} | changed
    return "\n[[bridge]]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())


def test_without_a_bridge_no_event_leaves_its_transport(find: Find) -> None:
    found = whys(find(SIDES))

    assert found[1, "at-left"] == (True, "'**' matches; same node")
    assert found[1, "at-right"] == (False, "'**' matches, but no bridge leads from sim://left to sim://right")
    assert found[2, "at-left"] == (False, "'**' matches, but no bridge leads from sim://right to sim://left")


@pytest.mark.parametrize("log", [True, False])
def test_a_bridge_is_part_of_the_reason(find: Find, log: bool) -> None:
    found = whys(find(SIDES + bridge(log=log)))

    assert found[1, "at-right"] == (True, "'**' matches; over sim://left, bridge x, sim://right")
    assert found[2, "at-left"] == (True, "'**' matches; over sim://right, bridge x, sim://left")


@pytest.mark.parametrize(
    ("direction", "blocked", "passed", "way"),
    [
        ("forward", (2, "at-left"), (1, "at-right"), "from sim://left to sim://right"),
        ("reverse", (1, "at-right"), (2, "at-left"), "from sim://right to sim://left"),
    ],
)
def test_the_direction_of_a_bridge_stops_events(
    find: Find, direction: str, blocked: tuple[int, str], passed: tuple[int, str], way: str
) -> None:
    found = whys(find(SIDES + bridge(direction=direction)))

    assert found[passed][0]
    assert found[blocked] == (
        False,
        f"'**' matches, but bridge x does not forward it: its direction is '{direction}', {way}",
    )


def test_the_keys_of_a_bridge_stop_events(find: Find) -> None:
    found = whys(find(SIDES + bridge(keys=["audit/**", "shop/y"])))

    reason = "'audit/**' does not match: segment 1 is 'shop', not 'audit'; 'shop/y' does not match: segment 2 is 'x'"
    assert found[1, "at-right"][0] is False
    assert f"bridge x does not forward it: {reason}" in found[1, "at-right"][1]


def test_a_chain_of_bridges_is_followed_and_the_one_that_stops_an_event_is_named(find: Find) -> None:
    first = bridge(between=["sim://left", "sim://middle"], name="first")

    passed = whys(find(SIDES + first + bridge(between=["sim://middle", "sim://right"], name="second")))
    stopped = whys(find(SIDES + first + bridge(between=["sim://middle", "sim://right"], name="second", keys=["no"])))

    assert passed[1, "at-right"][1].endswith("over sim://left, bridge first, sim://middle, bridge second, sim://right")
    assert "but bridge second does not forward it" in stopped[1, "at-right"][1]


def test_only_bridges_that_lead_to_the_subscriber_are_named(find: Find) -> None:
    aside = '\n[[node]]\nname = "aside"\ntransport = "sim://aside"\n' + bridge(
        between=["sim://left", "sim://aside"], name="aside-bridge", keys=["no"]
    )

    found = whys(find(SIDES + aside + bridge(keys=["never"])))

    assert "bridge x does not forward it" in found[1, "at-right"][1]
    assert "aside" not in found[1, "at-right"][1]


def test_a_node_on_two_transports_receives_only_on_those_that_it_names(find: Find) -> None:
    both = """
    [[node]]
    name = "both"
    transports = ["sim://left", "sim://right"]
    receive_on = ["sim://right"]
    subscribe = [{ keys = ["**"], name = "at-both" }]
    """

    found = whys(find(SIDES + both))

    assert found[1, "at-both"] == (
        False,
        "'**' matches, but node both does not receive on sim://left: its receive_on is sim://right",
    )
    assert found[2, "at-both"] == (True, "'**' matches; over sim://right")


def test_an_event_that_is_too_large_for_a_node_or_a_bridge_is_dropped_there(find: Find) -> None:
    large = SIDES.replace('key = "shop/x"', f'key = "shop/x"\npayload = "{"x" * 50}"')

    at_node = whys(find(large.replace('name = "right"', 'name = "right"\npayload_bytes_max = 10') + bridge()))
    at_bridge = whys(find(large + bridge(payload_bytes_max=20)))

    too_large = "the payload has 50 bytes, and its payload_bytes_max is"
    assert at_node[1, "at-right"] == (False, f"'**' matches, but node right drops it: {too_large} 10")
    assert at_node[2, "at-right"][1].startswith("not published: payload of 50 bytes exceeds the limit of 10")
    assert at_bridge[1, "at-right"][1].endswith(f"bridge x does not forward it: {too_large} 20")


def test_a_transport_that_carries_only_events_delivers_them_all_the_same(find: Find) -> None:
    found = whys(find(SIDES.replace("sim://right", "sim://left?events_only")))

    assert found[1, "at-right"] == (True, "'**' matches; over sim://left")
    assert found[2, "at-left"] == (True, "'**' matches; over sim://left")


# Publishing and schemas.


def test_an_event_that_is_refused_is_shown_with_the_reason(find: Find) -> None:
    report = find(SIDES + '\n[[event]]\nfrom = "left"\nkey = "shop/*"\nexpect = []')

    refused = [each for each in report.routes if each.event == 3]
    assert [each.delivered for each in refused] == [False, False]
    assert refused[0].why.startswith("not published: key 'shop/*' rejected: ")
    assert report.differences == []


SCHEMAS = """
[[node]]
name = "a"
log = true

[[node]]
name = "b"
subscribe = [
  { keys = ["shop/**"], name = "all" },
  { keys = ["shop/**"], name = "numbers", schema = "int" },
  { keys = ["shop/**"], name = "objects", schema = "dict" },
]

[[node]]
name = "strict"
log = true
subscribe = [{ keys = ["shop/**"], durable = "checked" }]
schemas = [{ expression = "shop/orders", schema = { type = "object", required = ["id"] } }]

[[node]]
name = "lenient"
subscribe = [{ keys = ["shop/**"], name = "warned" }]
schemas = [{ expression = "shop/orders", schema = { type = "object", required = ["id"] }, mode = "permissive" }]

[[event]]
from = "a"
key = "shop/orders"
payload = { name = "x" }

[[event]]
from = "strict"
key = "shop/orders"
payload = { name = "x" }

[[event]]
from = "strict"
key = "shop/orders"
payload = { id = 1 }
"""


def test_a_schema_that_rejects_a_payload_is_named(find: Find) -> None:
    found = whys(find(SCHEMAS))

    assert found[1, "all"][0]
    assert found[1, "objects"][0]
    assert not found[1, "numbers"][0]
    assert found[1, "numbers"][1].startswith(
        "'shop/**' matches, but the schema int of the subscription rejects it: the payload is not a valid int"
    )
    assert not found[1, "checked"][0]
    assert "the schema of 'shop/orders' on node strict rejects it: " in found[1, "checked"][1]
    assert found[1, "warned"][0]
    assert {delivered for (event, _), (delivered, _) in found.items() if event == 2} == {False}
    assert "not published: " in found[2, "all"][1]
    assert {name for (event, name), (delivered, _) in found.items() if event == 3 and delivered} == {
        *("all", "objects", "checked", "warned")
    }


# Expectations.


def expecting(expect: list[str]) -> str:
    return f'{NODES}\n[[event]]\nfrom = "a"\nkey = "shop/x"\nexpect = {json.dumps(expect)}'


def test_an_expectation_that_is_met_is_no_difference(find: Find) -> None:
    report = find(expecting(["any", "one"]))

    assert report.differences == []
    assert {each.subscription for each in report.routes if each.expected} == {"any", "one"}


def test_a_missing_and_an_unexpected_delivery_are_differences(find: Find) -> None:
    report = find(expecting(["any", "part"]))

    unexpected, missing = report.differences
    start = "event 1 (shop/x from a): subscription"
    assert unexpected == f"{start} one received it, but is not in `expect`: 'shop/*' matches; over sim://world"
    assert missing.startswith(f"{start} part did not receive it, but is in `expect`: 'shop/truck-$*' does not match")


def test_an_event_without_an_expectation_is_only_shown(find: Find) -> None:
    report = find(f'{NODES}\n[[event]]\nfrom = "a"\nkey = "shop/x"')

    assert {each.expected for each in report.routes} == {None}
    assert report.differences == []


# Disagreements of the rules and the production code.


def test_a_match_that_is_not_delivered_is_a_defect_even_if_nothing_is_expected(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimFabric, "send", lambda self, frames: None)

    report = find(SIDES + bridge())

    (first, *_) = report.differences
    assert "at-right: matched but not delivered, which is a defect of zbus or of its simulator: '**' matches" in first
    assert [each.delivered for each in report.routes if each.node == each.source] == [True, True]


def test_a_delivery_that_the_rules_do_not_explain_is_a_defect(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Topology, "judge", lambda *args: Verdict(False, "no reason"))

    report = find(SIDES)

    assert all("delivered against the rules" in each for each in report.differences)
    assert len(report.differences) == 2


def test_a_rejection_without_a_schema_is_a_defect(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeclaredSubscription, "_open", lambda self, bus: bus.subscribe(*self.keys, schema=int))

    report = find(SIDES)

    assert len(report.differences) == 2
    assert all("rejected without a schema" in each for each in report.differences)


def test_a_broken_invariant_is_a_difference(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimFabric.arrived

    def arrived(self: SimFabric, key: str, frame: bytes) -> None:
        if key.startswith("shop"):
            raise ValueError("a bug")
        real(self, key, frame)

    monkeypatch.setattr(SimFabric, "arrived", arrived)

    assert any("a bug" in each for each in find(SIDES + bridge()).broken)


# The command.


def test_the_command_prints_a_table_and_exits_with_0_if_all_is_as_expected(tmp_path: Path) -> None:
    path = tmp_path / "shop.toml"
    path.write_text(expecting(["any", "one"]))

    done = zbus("sim", "routes", path)

    assert (done.returncode, done.stderr) == (0, b"")
    header, *rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in done.stdout.decode().splitlines()
        if line[0] in "│┃"
    ]
    assert header == ["event", "from", "key", "subscription", "node", "delivered", "why"]
    assert rows[0] == ["1", "a", "shop/x", "one", "b", "yes", "'shop/*' matches; over sim://world"]
    assert len(rows) == 5


def test_the_command_exits_with_1_and_prints_each_difference_to_stderr(tmp_path: Path) -> None:
    path = tmp_path / "shop.toml"
    path.write_text(expecting(["any", "part"]))

    done = zbus("sim", "routes", path, "--only-wrong")

    assert done.returncode == 1
    assert [line.partition(":")[0] for line in done.stderr.decode().splitlines()] == ["zbus", "zbus"]
    assert "subscription part did not receive it, but is in `expect`" in done.stderr.decode()
    assert [line.split("│")[4].strip() for line in done.stdout.decode().splitlines() if line[0] == "│"] == [
        "one",
        "part",
    ]
    assert "yes (not expected)" in done.stdout.decode()
    assert "no (expected)" in done.stdout.decode()


def test_the_command_prints_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "shop.toml"
    path.write_text(expecting(["any", "part"]))

    done = zbus("sim", "routes", path, "--json")

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert len(lines) == 5
    assert lines[0] == {
        "event": 1,
        "from": "a",
        "key": "shop/x",
        "subscription": "one",
        "node": "b",
        "delivered": True,
        "why": "'shop/*' matches; over sim://world",
        "expected": False,
        "disagrees": False,
        "wrong": True,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("node = 1", "node: Input should be a valid tuple"),
        (NODES + '\n[[event]]\nfrom = "z"\nkey = "x"', "event.1.from: there is no node 'z'; known are: a, b"),
    ],
)
def test_the_command_exits_with_2_if_the_file_is_wrong(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "shop.toml"
    if text is not None:
        path.write_text(text)

    done = zbus("sim", "routes", path)

    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr.decode()
