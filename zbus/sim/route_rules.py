"""The rules that decide which event reaches which subscription: key expressions, transports, bridges and size limits.

Nothing is run here. The ledger uses the rules to know what a subscription is owed, and `zbus sim routes` compares them
with what the production code did. Each rule is one step of `judge`, in the order in which an event meets them; access
rules belong there too, as a step of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from zbus.bridge.config import BridgeConfig
from zbus.config import BusConfig
from zbus.keys import KeySet, check_expression, matches
from zbus.mesh.link import link_names


class Verdict(NamedTuple):
    """Whether an event reaches a subscription by the rules, and why."""

    reaches: bool
    why: str
    matching: str = ""  # the key expression that matches


class Sample(NamedTuple):
    """An event, as the rules see it. `node` publishes it."""

    node: str
    key: str
    size_bytes: int = 0


class Topology:
    """The nodes and bridges of a world, by name, and the transports that connect them."""

    def __init__(self, configs: Mapping[str, BusConfig | BridgeConfig]) -> None:
        self._nodes = {name: config for name, config in configs.items() if isinstance(config, BusConfig)}
        self._bridges = {name: config for name, config in configs.items() if isinstance(config, BridgeConfig)}

    def judge(self, sample: Sample, expressions: Sequence[str], node: str) -> Verdict:
        """Return whether an event reaches a subscription to `expressions` on a node."""
        matching = [each for each in expressions if matches(check_expression(each), sample.key)]
        if not matching:
            return Verdict(False, _mismatches(expressions, sample.key))
        path = self.path(sample, node)
        if path is None:
            return Verdict(False, f"{matching[0]!r} matches, but {self._obstacle(sample, node)}", matching[0])
        return Verdict(True, f"{matching[0]!r} matches; {path}", matching[0])

    def path(self, sample: Sample, node: str) -> str | None:
        """Return how an event gets to a node: transports and bridges, in words. None if it does not get there."""
        if node == sample.node:
            return "same node"
        limit = self._nodes[node].payload_bytes_max if node in self._nodes else 0
        if sample.size_bytes > limit:
            return None
        reached = self._reached(sample)
        arrives = next((url for url in self._receives_on(node) if url in reached), None)
        return None if arrives is None else "over " + ", ".join((*reached[arrives], arrives))

    def _reached(self, sample: Sample) -> dict[str, tuple[str, ...]]:
        """Return the transports on which an event is sent, each with the transports and bridges before it."""
        reached: dict[str, tuple[str, ...]] = dict.fromkeys(self._transports(sample.node), ())
        queue = list(reached)
        for url in queue:  # it grows: breadth first, so the shortest way is found
            for name, bridge, other in self._bridges_at(url):
                if other not in reached and _refuses(bridge, url, sample) is None:
                    reached[other] = (*reached[url], url, f"bridge {name}")
                    queue.append(other)
        return reached

    def _obstacle(self, sample: Sample, node: str) -> str:
        """Return why an event does not get to a node."""
        config = self._nodes[node]
        if sample.size_bytes > config.payload_bytes_max:
            return f"node {node} drops it: {_too_large(sample, config.payload_bytes_max)}"
        reached = self._reached(sample)
        ignored = [url for url in self._transports(node) if url in reached]
        if ignored:
            return f"node {node} does not receive on {ignored[0]}: its receive_on is {', '.join(config.receive_on)}"
        # A bridge is named if one of its ends is reached, and its other end leads on to the node.
        stopped = [
            f"bridge {name} does not forward it: {reason}"
            for url in reached
            for name, bridge, other in self._bridges_at(url)
            if other not in reached
            and (reason := _refuses(bridge, url, sample)) is not None
            and not self._connected(other, reached).isdisjoint(self._receives_on(node))
        ]
        if stopped:
            return "; ".join(stopped)
        return f"no bridge leads from {_listed(reached)} to {_listed(self._receives_on(node))}"

    def _connected(self, url: str, without: Collection[str]) -> set[str]:
        """Return the transports that bridges connect with one, whatever they forward, without passing some others."""
        found = [url]
        for each in found:
            found += [other for _, _, other in self._bridges_at(each) if other not in found and other not in without]
        return set(found)

    def _bridges_at(self, url: str) -> list[tuple[str, BridgeConfig, str]]:
        """Return the bridges with an end on a transport: name, settings, and the transport of the other end."""
        found = []
        for name, bridge in self._bridges.items():
            first, second = map(net_name, bridge.urls)
            if url in (first, second):
                found.append((name, bridge, second if url == first else first))
        return found

    def _transports(self, node: str) -> list[str]:
        config = self._nodes.get(node)
        if config is None or config.read_only:  # a read-only bus opens no transport
            return []
        return [net_name(each) for each in config.transports or (config.transport,)]

    def _receives_on(self, node: str) -> list[str]:
        chosen = self._nodes[node].receive_on if node in self._nodes else ()
        if not chosen:
            return self._transports(node)
        labels = link_names(self._nodes[node].transports)
        return [net_name(url) for url, label in labels.items() if label in chosen or url.partition("://")[0] in chosen]


def net_name(url: str) -> str:
    """Return the name of the network that a URL belongs to: nodes with the same name reach each other."""
    return url.partition("?")[0]


def mismatch(expression: str, key: str) -> str:
    """Return why a key expression does not match a key.

    >>> mismatch("shop/*", "shop/orders/created")
    "'*' matches exactly one segment; 'shop/**' would match"
    >>> mismatch("shop/orders/**", "shop/returns/created")
    "segment 2 is 'returns', not 'orders'"
    """
    wanted, found = check_expression(expression).split("/"), key.split("/")
    reserved = [each for each in found if each.startswith("@") and each not in wanted]
    if reserved and matches("/".join(wanted), "/".join("any" if each in reserved else each for each in found)):
        return f"no wildcard matches {reserved[0]!r}, because it starts with '@'"
    wider = check_expression("/".join("**" if each == "*" else each for each in wanted))
    if "*" in wanted and matches(wider, key):
        return f"'*' matches exactly one segment; {wider!r} would match"
    if "**" not in wanted:
        return _compare(wanted, found, 0) or f"the key continues with {found[len(wanted)]!r}"
    head, tail = wanted[: wanted.index("**")], wanted[len(wanted) - wanted[::-1].index("**") :]
    differs = _compare(head, found, 0)
    if differs is None and len(found) < len(head) + len(tail):
        return f"it needs at least {len(head) + len(tail)} segments, and the key has {len(found)}"
    middle = wanted[len(head) : len(wanted) - len(tail)]
    rest = found[len(head) : len(found) - len(tail)]
    return (
        differs
        or _compare(tail, found[len(found) - len(tail) :], len(found) - len(tail))
        or f"{'/'.join(rest)!r} does not match {'/'.join(middle)!r}"
    )


def _compare(wanted: Sequence[str], found: Sequence[str], before: int) -> str | None:
    """Return the first difference of segments, of which `before` others come first."""
    for at, segment in enumerate(wanted):
        if at == len(found):
            return f"the key ends where {segment!r} must follow"
        if not matches(segment, found[at]):
            place = f"segment {before + at + 1} is {found[at]!r}"
            if "*" in segment and found[at].startswith("@"):
                return f"{place}, and no wildcard matches a segment that starts with '@'"
            return f"{place}, which {segment!r} does not match" if "*" in segment else f"{place}, not {segment!r}"
    return None


def _refuses(bridge: BridgeConfig, url: str, sample: Sample) -> str | None:
    """Return why a bridge does not forward an event that is sent on one of its transports, or None if it does."""
    first, second = map(net_name, bridge.urls)
    if bridge.direction == ("reverse" if url == first else "forward"):
        source, target = (second, first) if url == first else (first, second)
        return f"its direction is {bridge.direction!r}, from {source} to {target}"
    if sample.key not in KeySet(bridge.keys):
        return _mismatches(bridge.keys, sample.key)
    if sample.size_bytes > bridge.payload_bytes_max:
        return _too_large(sample, bridge.payload_bytes_max)
    return None


def _mismatches(expressions: Iterable[str], key: str) -> str:
    return "; ".join(f"{each!r} does not match: {mismatch(each, key)}" for each in expressions)


def _too_large(sample: Sample, limit_bytes: int) -> str:
    return f"the payload has {sample.size_bytes} bytes, and its payload_bytes_max is {limit_bytes}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nowhere"
