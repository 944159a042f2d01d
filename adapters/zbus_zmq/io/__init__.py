"""The I/O thread, its sockets and their security."""
