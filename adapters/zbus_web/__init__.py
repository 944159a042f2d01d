"""HTTP over a bus: feeds of server-sent events, publishing, the log, figures, introspection, and the console."""
