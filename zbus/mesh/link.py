"""Links: a transport in use, its send queue, and its name."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from zbus.ports.fabric import Fabric

from .send_queue import SendQueue


class Link:
    """A fabric that this node sends to and, if `receiving`, receives from."""

    send_queue: SendQueue

    def __init__(self, label: str, fabric: Fabric) -> None:
        self.label, self.fabric, self.receiving = label, fabric, True


def label(url: str) -> str:
    """Return the name of a link: its URL without secrets and options.

    >>> label("nats://user:secret@127.0.0.1:4222?tls_ca=x")
    'nats://127.0.0.1:4222'
    """
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def link_names(urls: Sequence[str]) -> dict[str, str]:
    """Return a name for each URL: its label, with a number if several URLs have the same label.

    >>> link_names(["zmq://?realm=a", "nats://b", "zmq://?realm=b"])
    {'nats://b': 'nats://b', 'zmq://?realm=a': 'zmq://', 'zmq://?realm=b': 'zmq://#2'}
    """
    names: dict[str, str] = {}
    for url in sorted(set(urls)):
        name = label(url)
        taken = sum(label(other) == name for other in names)
        names[url] = f"{name}#{taken + 1}" if taken else name
    return names
