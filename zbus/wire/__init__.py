"""The bytes that cross a transport: envelopes, frames, beacons and announcements. No sockets and no event loop."""
