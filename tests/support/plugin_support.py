"""How a run of pytest in a test loads the plugin of zbus."""

from __future__ import annotations

from importlib.metadata import entry_points

PLUGIN = "zbus.testing.plugin"


def is_installed() -> bool:
    """Return whether pytest finds the plugin itself. It refuses a second name for a plugin that it has loaded."""
    return any(point.value == PLUGIN for point in entry_points(group="pytest11"))


def plugin_variables() -> dict[str, str]:
    """Return the environment variables that let pytest load the plugin."""
    return {} if is_installed() else {"PYTEST_PLUGINS": PLUGIN}
