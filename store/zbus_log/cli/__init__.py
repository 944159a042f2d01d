"""`zbus log` and `zbus schema`: commands to inspect, verify and maintain a log. The core finds them by entry points."""

from zbus.cli.apps import lazy_app

app = lazy_app("Inspect, verify and maintain a log.", "zbus_log.cli.commands:app")
schema_app = lazy_app("List, check, export and register the schemas of a log.", "zbus_log.cli.schema:app")
