"""The one place where tests reach inside a bus."""

from __future__ import annotations

import zbus
from zbus.node import Node


def node_of(bus: zbus.Bus) -> Node:
    """The node under a bus."""
    return bus._node
