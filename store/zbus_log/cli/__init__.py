"""`zbus log` and `zbus schema`: look at a log, check it, and look after it. The core finds them by entry points."""

from zbus.cli.apps import lazy_app

app = lazy_app("Look at a log, check it, and look after it.", "zbus_log.cli.commands:app")
schema_app = lazy_app("List, check, export and register the schemas of a log.", "zbus_log.cli.schema:app")
