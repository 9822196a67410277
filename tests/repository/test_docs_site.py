"""The documentation site builds strictly, and no page of it loads anything from another host."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRA = ("material", "mkdocs", "mkdocstrings", "mkdocstrings_handlers")
LOADED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:href|src)=[\"']?((?:https?:)?//[^\"'\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: the extra `docs` is missing (./scripts/docs installs it)")
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize("page", ["index.html", "tutorial.html", "strategies.html", "reference/site.html"])
def test_pages_are_there(site: Path, page: str) -> None:
    assert (site / page).is_file()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    found = {str(page.relative_to(site)): LOADED.findall(page.read_text()) for page in pages}
    assert {name: hosts for name, hosts in found.items() if hosts} == {}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+", styles) == []


def test_the_reference_documents_join(site: Path) -> None:
    text = (site / "reference" / "site.html").read_text()
    for name in ("weightgrad.join", "weightgrad.Site", "weightgrad.Site.prepare", "weightgrad.Site.leave"):
        assert f'id="{name}"' in text
