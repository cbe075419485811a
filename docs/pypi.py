"""What a package index shows of this project: the README, with links and pictures that work there.

Called by Hatchling for every build. Paths of the checkout become addresses below `repository`, which
pyproject.toml names once there is a public one; until then a link is its text, and a picture its description.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Code stays as it is, and so do links with a scheme and those to another part of the page.
_PIECES = re.compile(
    r"(?P<code>^```.*?^```$|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


class ProjectPage(MetadataHookInterface):
    """Adds the long description and the addresses of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`, which pyproject.toml declares as dynamic."""
        repository = self.config["repository"].rstrip("/")
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(readme, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(repository)


def long_description(readme: str, repository: str, tag: str) -> str:
    """Return the README with its relative links and pictures at their place in the tagged repository."""

    def absolute(piece: re.Match[str]) -> str:
        if piece["code"] is not None:
            return piece["code"]
        if not repository:
            return f"*{piece['text']}*" if piece["picture"] else piece["text"]
        view = "raw" if piece["picture"] else "blob"
        return f"{piece['picture']}[{piece['text']}]({repository}/{view}/{tag}/{piece['path']})"

    return _PIECES.sub(absolute, readme)


def addresses(repository: str) -> dict[str, str]:
    """Return `project.urls`: none without a public repository."""
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
