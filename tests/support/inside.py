"""The one place where tests reach inside a bus."""

from __future__ import annotations

from typing import Any

import zbus
from zbus import plugins
from zbus.config import BusConfig
from zbus.node import Node
from zbus.ports.log import Log


def node_of(bus: zbus.Bus) -> Node:
    """The node under a bus."""
    return bus._node


def bus_over(log: Log, **settings: Any) -> zbus.Bus:
    """An embedded bus over a log that is open already."""
    bus = zbus.Bus(BusConfig.exactly(log="memory", **settings))
    node_of(bus)._ports = _Ports(log)
    return bus


class _Ports:
    open_fabric, open_tracing = staticmethod(plugins.open_fabric), staticmethod(plugins.open_tracing)

    def __init__(self, log: Log) -> None:
        self._log = log

    def open_log(self, config: BusConfig) -> Log:
        return self._log
