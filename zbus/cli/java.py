"""The Java runtime that Spark needs: its version, and how to install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

JAVA_VERSION_MIN = 17
JAVA_INSTALL = "sudo apt-get install -y openjdk-17-jre-headless"


def java_version() -> int | None:
    """Return the major version of the Java that Spark would start, or None if Java is not installed."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        return None
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else None
