"""A retired name raises an error that names its replacement."""

from __future__ import annotations

import inspect
import pickle
from types import ModuleType
from typing import Any

import pytest

import zbus
import zbus_log
from zbus.util.lazy_names import lazy_names
from zbus_log import Rules, SqliteLog


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("NobodyAnswers", "NoResponders"),
        ("FabricError", "TransportError"),
        ("FabricLacks", "TransportUnsupported"),
        ("LogOwned", "LogLocked"),
        ("LogMissing", "LogRequired"),
        ("LogStopped", "LogWriterFailed"),
        ("read_session", "verify_session_token"),
        ("sign_session", "sign_session_token"),
        ("write_records", "configure_logging"),
        ("JsonLines", "JsonFormatter"),
    ],
)
def test_a_retired_name_of_the_module_names_its_replacement(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"'zbus' has no attribute '{old}'; renamed: use {new}$"):
        getattr(zbus, old)
    assert hasattr(zbus, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("age_s", "max_age_s"),
        ("size_bytes", "max_bytes"),
        ("events", "max_events"),
        ("past_cursors", "ignore_cursors"),
        ("upto", "until"),
    ],
)
def test_a_retired_retention_rule_names_its_replacement(old: str, new: str) -> None:
    with pytest.raises(TypeError, match=rf"^Rules\(\) got an unexpected keyword argument '{old}'; renamed: use {new}$"):
        Rules(**{old: 1})
    assert getattr(Rules(**{new: 1}), new) == 1  # type: ignore[arg-type]


def test_rules_can_be_pickled_copied_and_inspected() -> None:
    rules = Rules(60, max_events=5)

    assert pickle.loads(pickle.dumps(rules)) == rules._replace(until=None) == (60, None, 5, False, None, False, ())
    assert [*inspect.signature(Rules).parameters] == [*Rules._fields]
    with pytest.raises(TypeError, match="nonsense"):
        Rules(nonsense=1)  # type: ignore[call-arg]


def test_a_retired_method_of_the_log_names_its_replacement() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'retain'; renamed: use prune$"):
        SqliteLog.retain  # noqa: B018
    assert hasattr(SqliteLog, "prune")


def test_a_name_that_never_was_has_no_hint() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Nonsense'$"):
        zbus.Nonsense  # noqa: B018


async def test_retired_names_of_objects_name_their_replacements() -> None:
    async with zbus.open("memory") as bus:
        publisher = await bus.publisher("a")
        async with bus.subscribe("a") as sub:
            await publisher.publish(b"x")
            event = await sub.next()
        renamed: list[tuple[Any, dict[str, str]]] = [
            (sub, {"take": "next_batch", "nudge": "wake", "declared": "ready"}),
            (event, {"trail": "correlation"}),
            (bus.nodes()[0], {"node": "id", "here": "is_self", "present": "alive", "more": "truncated"}),
        ]
        for found, names in renamed:
            for old, new in names.items():
                with pytest.raises(AttributeError, match=f"has no attribute '{old}'; renamed: use {new}$"):
                    getattr(found, old)
                assert hasattr(found, new)


def test_a_package_imports_its_names_on_first_use() -> None:
    find = lazy_names("zbus", {"Bridge": ".bridge.bridge", "blocking": ".blocking"}, {"Bridges": "Bridge"})

    assert find("Bridge") is zbus.Bridge
    assert find("blocking") is zbus.blocking
    with pytest.raises(AttributeError, match=r"^module 'zbus' has no attribute 'Bridges'; renamed: use Bridge$"):
        find("Bridges")


@pytest.mark.parametrize("package", [zbus, zbus_log], ids=lambda package: package.__name__)
def test_every_public_name_is_found(package: ModuleType) -> None:
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_a_retired_name_of_the_log_names_its_replacement() -> None:
    with pytest.raises(AttributeError, match=r"^module 'zbus_log' has no attribute 'retain'; renamed: use prune$"):
        zbus_log.retain  # noqa: B018
