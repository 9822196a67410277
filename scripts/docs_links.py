"""A hook of mkdocs: pages may link to files of the repository that are not in docs/.

On a Git host a page says `[laptop.yaml](../recipes/laptop.yaml)`, and the link works. The site has no such file, so
this hook adds the files that pages link to and rewrites the links: docs/x.md becomes x.md, every other file keeps
its path in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ADDED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/results/*.md",
    "benchmarks/results/*.svg",
    "deploy/Dockerfile",
    "deploy/*/*",
    "deploy/*/*/*",
    "examples/*",
    "recipes/*.yaml",
)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside docs/."""
    for pattern in ADDED:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                uri = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links between docs/ and the rest of the repository."""
    del config
    here = page.file.src_uri
    source = here if (ROOT / here).is_file() and not (ROOT / "docs" / here).is_file() else f"docs/{here}"

    def rewritten(match: re.Match[str]) -> str:
        address, hash_mark, anchor = match[2].partition("#")
        if not address or ":" in address:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), address))
        uri = target.removeprefix("docs/") if target.startswith("docs/") else target
        if files.get_file_from_path(uri) is None:
            return match[0]
        relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{match[1]}{relative}{hash_mark}{anchor}{match[3]}"

    fences = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in fences)
