"""What users see of a bus: the names of `Bus`, and nothing that it inherits."""

from __future__ import annotations

import inspect

import zbus

# A name is added here only if DESIGN.md's API section or an issue has it.
NAMES = {
    "publish": {"publisher", "put", "session", "namespace", "component"},
    "read": {"subscribe", "on", "replay", "head"},
    "request": {"request", "serve"},
    "data": {"schemas", "cache", "cached"},
    "inspect": {"stats", "nodes", "diagnostics", "span", "config"},
    "transports": {"switch_transport", "receive_on", "zenoh"},
    "lifecycle": {"start", "aclose"},
    "log": {"backup"},
}
PUBLIC = set().union(*NAMES.values())


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_")}  # type: ignore[attr-defined]


def test_a_bus_has_the_public_names_that_the_design_lists_and_no_others() -> None:
    assert len(PUBLIC) == sum(map(len, NAMES.values())) == 25
    assert public(dir(zbus.Bus)) == PUBLIC


def test_every_public_name_of_a_bus_is_a_method_or_a_property_that_its_class_defines_and_documents() -> None:
    assert zbus.Bus.__mro__ == (zbus.Bus, object)
    for name in PUBLIC:
        found = vars(zbus.Bus)[name]
        assert isinstance(found, property) or inspect.isfunction(found), name
        assert inspect.getdoc(found), name


async def test_an_open_bus_has_no_public_attribute_beside_them() -> None:
    async with zbus.open("memory") as bus:
        assert public(dir(bus)) == PUBLIC
        assert set(vars(bus)) == {"_node"}
