"""Build hook: the README as PyPI shows it.

PyPI resolves no relative link. In the distribution's description, links to files of the project are therefore absolute,
under the URL `Repository` of `[project.urls]`. Until the project has such a URL, a link becomes its text and its path,
and a picture is left out, because a link that leads nowhere is worse than none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def for_pypi(markdown: str, repository: str | None) -> str:
    """Return the README with links that work outside of the repository.

    >>> for_pypi("[Guide](docs/a.md#b) ![](docs/a.svg) [x](https://example.org)", "https://example.org/zbus/")
    '[Guide](https://example.org/zbus/blob/HEAD/docs/a.md#b) ![](https://example.org/zbus/raw/HEAD/docs/a.svg) [x](https://example.org)'
    >>> for_pypi("[Guide](docs/a.md#b) ![Picture](docs/a.svg)", None)
    'Guide (docs/a.md) '
    """

    def replace(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if repository is None:
            return "" if mark else f"{text} ({target.partition('#')[0]})"
        return f"{mark}[{text}]({repository.rstrip('/')}/{'raw' if mark else 'blob'}/HEAD/{target})"

    return _LINK.sub(replace, markdown)


class ReadmeHook(MetadataHookInterface):
    """Sets the dynamic field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description to the README with absolute links."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = for_pypi(readme, metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
