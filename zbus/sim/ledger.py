"""The ledger of a world: every publish, stored event and delivery, noted outside of all nodes. The invariants read it.

An event is owed to a subscription from the moment it was published until it is handed over. Events that were published
before the subscription was ready are not owed, nor those that retention or damage removed from the publisher's log; a
node that misses such events must report that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from zbus.errors import PayloadInvalid, SubscriberLagged
from zbus.event import Event
from zbus.headers import raw_headers
from zbus.keys import KeySet
from zbus.ports.log import Row

from .errors import Violation
from .machine.disk import Disk
from .machine.loop import Process, current_process

Identity = tuple[int, int]
GAPS = "@zbus/gap"
BEHIND_S = 2.0  # a subscription that received an event within this time is slow, and has not lost the others
SETTLE_S = 1.0  # a live subscription may miss what a node without a log publishes before it knows the subscription

DELIVERED = "acknowledged events are delivered"
ORDER = "order per publisher and key is kept"
AGAIN = "no event is delivered again after its acknowledgement"
EARLY = "no event is acknowledged before it was handled"
MATCHING = "only events of subscribed keys are delivered"
UNIQUE = "no offset or identity is used for two events"
GAP_REPORTED = "every gap is reported"
GAP_REAL = "every reported gap is real"
CONVERGES = "everything converges after the faults"
MEMORY = "memory bounds hold"
NO_EXCEPTION = "no callback raises"
CLOSES = "closing takes bounded time"
LOGS_EQUAL = "the simulated log equals the real one"
INVARIANTS = (
    *(DELIVERED, ORDER, AGAIN, EARLY, MATCHING, UNIQUE),
    *(GAP_REPORTED, GAP_REAL, CONVERGES, MEMORY, NO_EXCEPTION, CLOSES, LOGS_EQUAL),
)


class Published(NamedTuple):
    """An event that exists."""

    node: str
    key: str
    at_s: float
    content: int | None  # a hash of what subscribers must receive; None until the event was stored or delivered
    has_log: bool


class Gap(NamedTuple):
    """A gap that a node reported."""

    publisher_id: int
    first: int
    last: int
    key: str
    is_open: bool


class Reader(Protocol):
    """A subscription of the production code."""

    @property
    def durable(self) -> str | None:
        """Its durable name."""

    @property
    def key_exprs(self) -> tuple[str, ...]:
        """Its key expressions."""

    @property
    def queued(self) -> int:
        """The events in memory."""

    def forget(self) -> None:
        """Drop the events in memory."""


class Subscription:
    """A subscription as the ledger sees it: what it received, and what it is owed."""

    def __init__(self, ledger: Ledger, node: str, process: Process, reader: Reader) -> None:
        self._ledger, self.node, self.process, self.reader = ledger, node, process, reader
        self.durable, self.keys = reader.durable, KeySet(reader.key_exprs)
        self.is_internal = all(each.startswith("@") for each in reader.key_exprs)
        self.ready_at: float | None = None
        self.is_open = True
        self.missed = 0  # as `SubscriberLagged` says
        self._last: dict[tuple[int, str], int] = {}
        self._handled = 0  # the offset up to which a durable subscriber has acknowledged
        self._in_hand = 0  # the offset of the event that a durable subscriber handles now; 0: none
        self.account = ledger.account(self)

    def ready(self) -> None:
        """It is open: from now on events are owed to it."""
        if self.ready_at is None:
            self.ready_at = self._ledger.now()
            self.account.ready(self.ready_at, self)
            self._ledger.note("subscribed", self.node, self.durable or "-", *self.reader.key_exprs)

    def asked(self) -> None:
        """The next event is asked for, which acknowledges the last one: until now its position must not be stored."""
        in_hand, self._in_hand = self._in_hand, 0
        self._handled = max(self._handled, in_hand)
        if in_hand and self.durable is not None and self.process.alive:
            stored = self._ledger.acknowledged_up_to(self.node, self.durable)
            if stored >= in_hand:
                what = f"the position of {self.durable!r} is {stored}, and the event at {in_hand} is being handled"
                self._ledger.broken(EARLY, self.node, what)

    def acknowledged(self, offset: int) -> None:
        """The subscriber itself acknowledges everything up to an offset."""
        if offset >= self._in_hand:
            self._in_hand = 0

    def delivered(self, event: Event) -> None:
        """An event was handed over."""
        if event.key[0] == "@":
            if event.key == GAPS:
                self._ledger.gap_reported(self, json.loads(event.payload))
            return
        ledger, identity = self._ledger, event.identity
        ledger.note("delivered", self.node, self.durable or "-", event.key, *identity, event.offset)
        stream = (event.publisher_id, event.key)
        last = self._last.get(stream, -1)
        if event.sequence <= last:
            ledger.broken(ORDER, self.node, f"{_name(identity)} on {event.key} follows sequence {last}")
        self._last[stream] = event.sequence
        if self.durable is not None and event.offset <= max(
            self.account.released_at, ledger.acknowledged_up_to(self.node, self.durable)
        ):
            ledger.broken(AGAIN, self.node, f"{_name(identity)} at offset {event.offset} for {self.durable!r}")
        if event.key not in self.keys:
            what = f"{_name(identity)} on {event.key} was delivered for {', '.join(self.keys.expressions)}"
            ledger.broken(MATCHING, self.node, what)
        if self.durable is not None:
            self._in_hand = event.offset
        self.account.delivered(identity)
        ledger.delivered(self, event)

    def failed(self, error: Exception) -> None:
        """A read raised."""
        if isinstance(error, SubscriberLagged):
            self.missed += error.missed
            self._ledger.note("lagged", self.node, self.durable or "-", error.missed)
        elif isinstance(error, PayloadInvalid) and isinstance(error.event, Event):
            # A schema rejects it: the subscriber gets the error in place of the event, and reading continues after it.
            self._ledger.note("rejected", self.node, self.durable or "-", error.event.key, *error.event.identity)
            self.account.delivered(error.event.identity)

    def closed(self) -> None:
        """It was closed: nothing more is owed to it, unless it is durable."""
        self.is_open = False
        self.account.closed(self)

    def released(self) -> None:
        """It has stored its position, and was closed without an error."""
        self.account.released_at = max(self.account.released_at, self._handled)


class Account:
    """The events that are owed to one durable name, or to one subscription without a name."""

    def __init__(self, ledger: Ledger, node: str, durable: str | None, keys: KeySet) -> None:
        self._ledger, self.node, self.durable, self.keys = ledger, node, durable, keys
        self.ready_at: float | None = None
        self.unlogged_since = 0.0
        self.released_at = 0  # the offset that an orderly end must have stored
        self.got: set[Identity] = set()
        self.owed: dict[Identity, Published] = {}
        self.readers: list[Subscription] = []  # the open ones
        self.is_retired = False  # the scenario has closed it: nothing is expected of it until it is opened again
        self.delivered_at = 0.0

    @property
    def is_read(self) -> bool:
        """Whether a live process reads it now."""
        return any(reader.process.alive for reader in self.readers)

    def ready(self, at_s: float, reader: Subscription) -> None:
        """A subscription is open."""
        self.readers = [each for each in self.readers if each.process.alive] + [reader]
        if self.ready_at is None:
            self.ready_at = at_s
        self.is_retired = False
        # Events that a node without a log published before this process was ready are gone, and no node can know it.
        self.unlogged_since = at_s + SETTLE_S
        self.drop_owed(lambda published: not published.has_log)

    def owes(self, identity: Identity, published: Published) -> None:
        """An event exists: is it owed?"""
        if self.ready_at is None or identity in self.got or published.key not in self.keys:
            return
        since = self.ready_at if published.has_log or published.node == self.node else self.unlogged_since
        if published.at_s < since or not self._ledger.reaches(published.node, self.node, published.key):
            return
        if published.has_log or self.is_read:
            self.owed[identity] = published

    def drop_owed(self, which: Callable[[Published], bool]) -> None:
        """Forget some of the events that are owed, because they cannot be delivered."""
        for identity in [identity for identity, published in self.owed.items() if which(published)]:
            del self.owed[identity]

    def owes_past(self) -> None:
        """A subscription from the beginning is also owed what was published before it existed."""
        if self.ready_at is not None:
            self.ready_at = 0.0
            for identity, published in self._ledger.published.items():
                self.owes(identity, published)

    def delivered(self, identity: Identity) -> None:
        """An event was handed over."""
        self.delivered_at = self._ledger.now()
        self.got.add(identity)
        self.owed.pop(identity, None)

    def closed(self, reader: Subscription) -> None:
        """A subscription was closed."""
        self.readers = [each for each in self.readers if each is not reader]
        if self.durable is None:
            self.owed.clear()
        # A scenario that closes a durable subscription means it. A program that does has stopped reading.
        self.is_retired = current_process.get() is None


class Ledger:
    """Everything that happened in a world. `broken` notes a violation."""

    def __init__(self, now: Callable[[], float], note: Callable[..., None]) -> None:
        self.now, self.note = now, note
        self.published: dict[Identity, Published] = {}
        self.accounts: dict[tuple[str, str], Account] = {}  # by node, and durable name or number
        self.gaps: dict[str, list[Gap]] = {}  # by node
        self.violations: list[Violation] = []
        self.unchecked: set[str] = set()
        self.excused: set[Identity] = set()  # removed by retention, damage or a restore
        self.missed: dict[str, set[Identity]] = {}  # by node: those that it reported as a range of offsets of a log
        self.disks: dict[str, Disk] = {}  # by node, if it has a log
        self.reaches: Callable[[str, str, str], bool] = lambda source, target, key: True
        self.counted: Callable[[str, str], int] = lambda node, counter: 0  # a counter of a node
        self.last_errors: dict[str, str] = {}  # by node: its last log record of an error
        self._offsets: dict[tuple[str, int], Identity] = {}  # by log
        self._subscriptions: list[Subscription] = []

    # Steps of the world.

    def broken(self, invariant: str, node: str, what: str) -> None:
        """Note a violation, unless this world does not check that invariant."""
        if invariant in self.unchecked:
            return
        violation = Violation(invariant, self.now(), node, what)
        self.note("broken", node, invariant, what)
        self.violations.append(violation)

    def account(self, subscription: Subscription) -> Account:
        """Return the account of a subscription: a durable name keeps its account over restarts."""
        self._subscriptions.append(subscription)
        name = subscription.durable or f"#{len(self._subscriptions)}"
        found = self.accounts.get((subscription.node, name))
        if found is None:
            found = Account(self, subscription.node, subscription.durable, subscription.keys)
            self.accounts[subscription.node, name] = found
            if subscription.is_internal:
                del self.accounts[subscription.node, name]
        return found

    def acknowledged(self, node: str, identity: Identity, key: str, begun: float) -> None:
        """A publish has returned to its caller."""
        self.note("published", node, key, *identity)
        self._exists(identity, Published(node, key, begun, None, node in self.disks))

    def stored(self, node: str, disk: Disk, rows: Sequence[Row], offsets: Sequence[int], zero_ns: int) -> None:
        """Rows became durable. Those without a provenance were published on this node.

        `zero_ns` is what the clock of the node shows at virtual time 0.
        """
        for row, offset in zip(rows, offsets, strict=True):
            identity = (row.publisher_id, row.sequence)
            known = self._offsets.setdefault((disk.name, offset), identity)
            if known != identity:
                what = f"offset {offset} of {disk.name} was {_name(known)} and is now {_name(identity)}"
                self.broken(UNIQUE, node, what)
            if row.provenance is None:
                at_s = (row.published_at - zero_ns) / 1e9
                self._exists(identity, Published(node, row.key, at_s, _content(row), True))

    def delivered(self, subscription: Subscription, event: Event) -> None:
        """An event was handed over to a subscription."""
        identity = event.identity
        published = self.published.get(identity)
        if published is None:
            self.broken(UNIQUE, subscription.node, f"{_name(identity)} on {event.key} was never published")
            return
        disk = self.disks.get(subscription.node)
        if event.offset and disk is not None and self._offsets.get((disk.name, event.offset)) != identity:
            what = f"{_name(identity)} was delivered at offset {event.offset}, where {disk.name} has another event"
            self.broken(UNIQUE, subscription.node, what)
        content = _content(event)
        if published.content is None:
            self.published[identity] = published._replace(content=content)
        elif published.content != content:
            self.broken(UNIQUE, subscription.node, f"{_name(identity)} on {event.key} differs from what was published")

    def gap_reported(self, subscription: Subscription, fields: dict[str, Any]) -> None:
        """A node reported a gap."""
        node = subscription.node
        if "publisher_id" not in fields:  # retention passed a subscription: the removed events are excused already
            self.note("removed by retention", node, fields["after"], fields["until"])
            return
        gap = Gap(fields["publisher_id"], fields["first"], fields["last"], fields["key"], fields["open"])
        self.note("gap", node, *gap)
        self.gaps.setdefault(node, []).append(gap)
        missing = [
            (gap.publisher_id, sequence)
            for sequence in range(gap.first, gap.last + 1)
            if (gap.publisher_id, sequence) in self.published
        ]
        if not missing:
            self.broken(GAP_REAL, node, f"{_range(gap)} was never published")
            return
        accounts = [each for each in self._accounts_of(node) if gap.key in each.keys and each.ready_at is not None]
        if accounts and all(each.got.issuperset(missing) for each in accounts):
            self.broken(GAP_REAL, node, f"{_range(gap)} was reported missing, but every subscription had received it")

    def range_reported(self, node: str, log_id: int, after: int, until: int) -> None:
        """A node reported that a log no longer has events between two offsets. It cannot name them."""
        missed = self.missed.setdefault(node, set())
        for name in [disk.name for disk in self.disks.values() if disk.log_id == log_id]:
            found = [self._offsets.get((name, offset)) for offset in range(after + 1, until + 1)]
            missed.update(each for each in found if each in self.excused)

    def acknowledged_up_to(self, node: str, durable: str) -> int:
        """Return the stored position of a durable subscription."""
        disk = self.disks.get(node)
        cursor = disk.cursors.get(durable) if disk is not None else None
        return cursor.offset if cursor is not None else 0

    def killed(self, node: str) -> None:
        """A process was killed. Events that it had published without a log, and not sent yet, are gone."""
        if node not in self.disks:
            for account in self.accounts.values():
                account.drop_owed(lambda published: published.node == node)

    def excuse(self, rows: Iterable[Row]) -> None:
        """These events were removed from the log that stored them."""
        self.excused.update((row.publisher_id, row.sequence) for row in rows)

    def log_replaced(self, disk: Disk, everywhere: Iterable[Disk]) -> None:
        """A log was replaced by an older copy: what no log has any more cannot be delivered."""
        kept = {identity for each in everywhere for identity in each.identities}
        for account in self.accounts.values():
            account.released_at = 0
            for identity in [each for each in account.owed if each not in kept]:
                del account.owed[identity]
        self._offsets = {key: value for key, value in self._offsets.items() if key[0] != disk.name}
        for offset, row in disk.stored():
            self._offsets[disk.name, offset] = (row.publisher_id, row.sequence)

    def forget(self) -> None:
        """Drop the events that wait in subscriptions: the world has ended."""
        for subscription in self._subscriptions:
            subscription.reader.forget()

    # Events that are owed.

    def owed(self) -> list[tuple[Account, Identity, Published]]:
        """Return the events that open subscriptions are owed, without those that were reported as missing."""
        found = []
        for account in self.accounts.values():
            if not account.owed or not (account.is_read or (account.durable is not None and not account.is_retired)):
                continue
            lagged = sum(reader.missed for reader in account.readers)
            if account.durable is None:
                lagged += self.counted(account.node, "dropped_late")  # they were reported, without their identities
            missing = [each for each in account.owed.items() if not self._is_excused(account, *each)]
            if len(missing) > lagged:
                found += [(account, *each) for each in missing]
        return found

    def report_owed(self) -> None:
        """Note a violation for each subscription that is still owed events."""
        accounts: dict[int, list[tuple[Account, Identity, Published]]] = {}
        for each in self.owed():
            accounts.setdefault(id(each[0]), []).append(each)
        for group in accounts.values():
            account, identity, published = group[0]
            who = f"durable subscription {account.durable!r}" if account.durable else "a subscription"
            logged = [each for each in group if each[2].has_log]
            first = f"{_name(identity)} on {published.key}, published on {published.node} at {published.at_s:.3f} s"
            where = f"{who} to {', '.join(account.keys.expressions)}"
            if account.is_read and self.now() - account.delivered_at < BEHIND_S:
                what = f"{where} still receives events, and is behind by {len(group)}; the next is {first}"
                self.broken(CONVERGES, account.node, what)
                continue
            unread = "" if account.is_read else ", because nothing reads it any more"
            what = f"{where} never received {len(group)} events{unread}; the first is {first}"
            if account.node in self.last_errors:
                what += f". The last error record of the node: {self.last_errors[account.node]}"
            self.broken(DELIVERED if logged and account.durable else GAP_REPORTED, account.node, what)

    def _is_excused(self, account: Account, identity: Identity, published: Published) -> bool:
        if any(
            gap.publisher_id == identity[0] and gap.first <= identity[1] <= gap.last and not gap.is_open
            for gap in self.gaps.get(account.node, ())
        ):
            # A durable subscription must receive what its publisher's log still has.
            return account.durable is None or not published.has_log or identity in self.excused
        return identity in self.missed.get(account.node, ())

    def _exists(self, identity: Identity, published: Published) -> None:
        known = self.published.get(identity)
        if known is not None:
            if known.key != published.key:
                self.broken(UNIQUE, published.node, f"{_name(identity)} was used on {known.key} and {published.key}")
            if known.content is None and published.content is not None:
                self.published[identity] = known._replace(content=published.content)
            elif published.content is not None and published.content != known.content:
                self.broken(UNIQUE, published.node, f"{_name(identity)} was used for two different events")
            return
        self.published[identity] = published
        for account in self.accounts.values():
            account.owes(identity, published)

    def _accounts_of(self, node: str) -> list[Account]:
        return [account for (name, _), account in self.accounts.items() if name == node]


def _content(event: Event | Row) -> int:
    headers = event.headers if isinstance(event, Row) else raw_headers(event.headers)
    return crc32(event.payload, crc32(headers or b"", crc32(event.key.encode(), event.published_at & 0xFFFFFFFF)))


def _name(identity: Identity) -> str:
    return f"event {identity[0]:x}-{identity[1]}"


def _range(gap: Gap) -> str:
    return f"the gap {gap.publisher_id:x}-{gap.first}…{gap.last} on {gap.key}"
