"""A hook of mkdocs: links between pages and files of the repository also lead somewhere on the site.

A link is written for the repository, relative to its page. On the site its file is a page, or a copy below files/. A link to
a file that is not there stays as it is, and mkdocs reports it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")  # a colon: an address of the web


def on_files(files: Any, config: Any) -> None:
    """Make pages of the Markdown files beside docs/."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links into those of the site; copy the files they lead to."""
    uri = page.file.src_uri
    path = next((path for path, made in PAGES.items() if made == uri), f"docs/{uri}")

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        if not (ROOT / target).is_file():
            return link[0]
        place = target.removeprefix("docs/") if target.startswith("docs/") else PAGES.get(target, f"files/{target}")
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
        return f"]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{link[2] or ''})"

    return LINK.sub(on_site, markdown)
