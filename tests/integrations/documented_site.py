"""A site with the script of a page of the documentation: `documented_site.py PAGE OUT SERVER SITE ...`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"


def script_of(page: str) -> dict[str, Any]:
    """What the one Python script of a page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    found: dict[str, Any] = {"__name__": f"documented_{page.removesuffix('.md')}"}
    exec(compile(code, page, "exec"), found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained = script_of(sys.argv[1])["main"](*sys.argv[3:])
    torch.save(parameters_to_vector(trained.parameters()).detach(), sys.argv[2])
