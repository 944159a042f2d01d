"""Scenarios in TOML files: what they may contain, errors that name the field, and a run of them with faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zbus.deliver.subscriber import EventSubscriber
from zbus.errors import ConfigInvalid
from zbus.sim.errors import Violation
from zbus.sim.faults import KINDS
from zbus.sim.ledger import DELIVERED
from zbus.sim.scenarios.declared import Declared, load_declared
from zbus.sim.scenarios.runner import run_seed
from zbus.sim.scenarios.scenario import load_scenarios

SEEDS = range(6)
COMPLETE = """
seconds = 8
converge_s = 40

[faults]
kill = [0, 2]
partition = 1
restart = [0, 1]
drop = [0.0, 0.1]
duplicate = 0.05
delay_s = 0.01
for_s = [0.1, 2.0]

[[node]]
name = "shop"
log = true
transport = "sim://europe"
publish = [
  { key = "shop/orders/created", per_s = 5, size_bytes = 200 },
  { key = "shop/stock", per_s = 2 },
]

[[node]]
name = "billing"
log = "bills.db"
transport = "sim://america"
keep = ["shop/**"]
clock_ahead_s = 0.5
schemas = [{ expression = "shop/**", schema = { type = "integer" }, mode = "permissive" }]
subscribe = [
  { keys = ["shop/orders/*"], durable = "bills", overflow = "block", queue_events = 10 },
  { keys = ["shop/orders/*", "shop/stock"], start = "beginning" },
  { keys = ["shop/**"], durable = "objects", schema = "dict", name = "rejects-all" },
]

[[bridge]]
name = "atlantic"
between = ["sim://europe", "sim://america"]
keys = ["shop/**"]
direction = "forward"
log = true

[[event]]
from = "shop"
key = "shop/orders/created"
payload = { id = 1, lines = [{ sku = "x" }] }
headers = { "x-tenant" = "eu" }
expect = ["bills", "billing#2"]
"""

Load = Callable[[str], Declared]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_text(text: str) -> Declared:
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return load_declared(path)

    return load_text


def test_a_file_has_nodes_bridges_events_and_faults(load: Load) -> None:
    declared = load(COMPLETE)

    shop, billing = declared.node
    assert (declared.name, declared.seconds, declared.converge_s) == ("scenario", 8, 40)
    assert shop.settings == {"transport": "sim://europe"}
    assert [(each.key, each.per_s, each.size_bytes) for each in shop.publish] == [
        ("shop/orders/created", 5, 200),
        ("shop/stock", 2, 100),
    ]
    assert billing.settings["keep"] == ["shop/**"]
    assert declared.event[0].payload == {"id": 1, "lines": [{"sku": "x"}]}
    assert declared.event[0].headers == {"x-tenant": "eu"}
    assert declared.faults is not None
    faults = declared.faults.faults()
    assert faults.numbers == {"kill": (0, 2), "partition": (1, 1), "restart": (0, 1)}
    assert (faults.drop, faults.duplicate, faults.delay_s, faults.for_s) == ((0.0, 0.1), (0.05,), (0.01,), (0.1, 2.0))


def test_a_subscription_is_named_by_its_name_its_durable_name_or_its_node_and_number(load: Load) -> None:
    assert [each.name for each in load(COMPLETE).subscriptions] == ["bills", "billing#2", "rejects-all"]


def test_every_kind_of_fault_can_be_declared(load: Load) -> None:
    text = "[faults]\n" + "\n".join(f"{kind} = 1" for kind in KINDS) + '\n[[node]]\nname = "a"'

    found = load(text).faults

    assert found is not None
    assert set(found.faults().numbers) == set(KINDS)


NODE = '[[node]]\nname = "a"\n'
SUBSCRIBE = 'subscribe = [{ keys = ["a"], name = "s" }]'
BRIDGE = '[[bridge]]\nname = "x"\nkeys = ["**"]\n'
WRONG = {
    "no nodes": ("seconds = 3", "node", "Field required"),
    "an unknown name": (NODE + "[other]", "other", "there is no such setting; known are: name, seconds"),
    "an unknown name in a node": (NODE + "colour = 1", "node.1.colour", "known are: name, log, clock_ahead_s"),
    "an unknown name in a subscription": (
        NODE + 'subscribe = [{ key = "a" }]',
        "node.1.subscribe.1.key",
        "known are: keys, name, durable",
    ),
    "an unknown fault": (NODE + "[faults]\nmeteor = 1", "faults.meteor", "partition, one_way"),
    "a wrong number of faults": (NODE + "[faults]\nkill = [2, 1]", "faults.kill", "such as [0, 2]"),
    "a wrong probability": (NODE + "[faults]\ndrop = [0.1, 1.5]", "faults.drop.2", "less than or equal to 1"),
    "durations in the wrong order": (NODE + "[faults]\nfor_s = [5, 1]", "faults.for_s", "the shortest and the longest"),
    "a negative time": ("seconds = -1\n" + NODE, "seconds", "greater than 0"),
    "a log that is a number": (NODE + "log = 1", "node.1.log", "must be true, false, or the name of a log"),
    "a wrong setting": (NODE + "node_ttl_s = -1", "node.1.node_ttl_s", "greater than 0"),
    "a transport that is not a URL": (NODE + 'transport = "zenoh"', "node.1.transport", "such as sim://world"),
    "a setting that needs a log": (NODE + 'keep = ["**"]', "node.1.keep", "needs a log"),
    "a wrong key": (NODE + 'publish = [{ key = "a/*" }]', "node.1.publish.1.key", "without wildcards"),
    "a wrong expression": (NODE + 'subscribe = [{ keys = ["a*"] }]', "node.1.subscribe.1.keys", "write '$*'"),
    "an expression that is not in a list": (
        NODE + 'subscribe = [{ keys = "a" }]',
        "node.1.subscribe.1.keys",
        "must be a list of key expressions",
    ),
    "no expression": (NODE + "subscribe = [{ keys = [] }]", "node.1.subscribe.1.keys", "at least 1 item"),
    "a durable subscription without a log": (
        NODE + 'subscribe = [{ keys = ["a"], durable = "d" }]',
        "node.1.log",
        "a durable subscription needs a log",
    ),
    "a durable subscription that drops": (
        NODE + 'log = true\nsubscribe = [{ keys = ["a"] }, { keys = ["a"], durable = "d", overflow = "drop_oldest" }]',
        "node.1.subscribe.2.overflow",
        "never drops",
    ),
    "a durable name twice": (
        NODE + 'log = true\nsubscribe = [{ keys = ["a"], durable = "d" }, { keys = ["b"], durable = "d", name = "e" }]',
        "node.1.subscribe.1.durable",
        "uses 'd' twice",
    ),
    "a wrong type": (NODE + 'subscribe = [{ keys = ["a"], schema = "set" }]', "node.1.subscribe.1.schema", "'dict'"),
    "a wrong JSON Schema": (
        NODE + 'schemas = [{ expression = "a", schema = { type = "thing" } }]',
        "node.1.schemas.1.schema",
        "not a valid JSON Schema",
    ),
    "a wrong expression of a schema": (
        NODE + 'schemas = [{ expression = "a*", schema = {} }]',
        "node.1.schemas.1.expression",
        "write '$*'",
    ),
    "a node twice": (NODE + NODE, "node.2.name", "'a' is already used by node.1"),
    "a log twice": (
        NODE + 'log = "x.db"\n[[node]]\nname = "b"\nlog = "x.db"',
        "node.2.log",
        "'x.db' is already used by node.1",
    ),
    "a name twice": (
        NODE + SUBSCRIBE + '\n[[node]]\nname = "b"\n' + SUBSCRIBE,
        "node.2.subscribe.1.name",
        "'s' is already used by node.1.subscribe.1",
    ),
    "a bridge to itself": (
        NODE + BRIDGE + 'between = ["sim://world", "sim://world"]',
        "bridge.1.between",
        "two different transports",
    ),
    "a bridge to a transport of no node": (
        NODE + BRIDGE + 'between = ["sim://world", "sim://elsewhere"]',
        "bridge.1.between",
        "no node and no other bridge uses sim://elsewhere",
    ),
    "a bridge without ends": (NODE + BRIDGE, "bridge.1.between", "Field required"),
    "a bridge with a wrong direction": (
        NODE + BRIDGE + 'between = ["sim://world", "sim://b"]\ndirection = "up"',
        "bridge.1.direction",
        "'both', 'forward' or 'reverse'",
    ),
    "an event of an unknown node": (NODE + '[[event]]\nfrom = "b"\nkey = "x"', "event.1.from", "no node 'b'"),
    "an event without a key": (NODE + '[[event]]\nfrom = "a"', "event.1.key", "Field required"),
    "an unknown subscription": (
        NODE + '[[event]]\nfrom = "a"\nkey = "x"\nexpect = ["s"]',
        "event.1.expect",
        "there is no subscription 's'; known are: none",
    ),
    "a node that is not a table": ('node = ["a"]', "node.1", "must be a table"),
}


@pytest.mark.parametrize(("text", "field", "reason"), WRONG.values(), ids=WRONG.keys())
def test_an_error_names_the_file_the_field_and_the_reason(load: Load, text: str, field: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(text)

    assert caught.value.field.endswith(f"scenario.toml: {field}")
    assert reason in caught.value.reason


@pytest.mark.parametrize("text", ["seconds = ", None])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "scenario.toml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigInvalid, match="scenario: "):
        load_declared(path)


def test_a_scenario_in_which_no_node_publishes_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(NODE)

    with pytest.raises(ConfigInvalid, match="no node publishes"):
        load_scenarios(path)


def run_declared(tmp_path: Path, text: str) -> list[Any]:
    path = tmp_path / "shop.toml"
    path.write_text(text)
    (scenario,) = load_scenarios(path)
    assert (scenario.name, scenario.converge_s) == ("shop", 40)
    return [run_seed(scenario, seed)[0] for seed in SEEDS]


def test_a_declared_scenario_runs_with_faults_and_keeps_every_promise(tmp_path: Path) -> None:
    results = run_declared(tmp_path, COMPLETE)

    assert [each.violations for each in results] == [()] * len(SEEDS)
    assert all(each.events > 50 for each in results)
    assert sum(each.faults.get("kill", 0) for each in results) > 0
    assert all(each.faults["partition"] == 1 for each in results)
    assert len({each.hash for each in results}) == len(SEEDS)
    assert run_declared(tmp_path, COMPLETE)[0].hash == results[0].hash


def test_a_declared_scenario_finds_events_that_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = EventSubscriber._offer

    def loses(self: Any, events: Any, received: bool = False) -> int:
        kept = [event for event in events if event.sequence % 10]
        return real(self, kept, received) if kept else 0

    monkeypatch.setattr(EventSubscriber, "_offer", loses)

    violations: list[Violation] = [
        violation for each in run_declared(tmp_path, COMPLETE) for violation in each.violations
    ]

    assert DELIVERED in [each.invariant for each in violations]
