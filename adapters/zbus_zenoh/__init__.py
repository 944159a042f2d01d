"""Zenoh as a transport: embedded without a network, as a peer, a client or a router."""
