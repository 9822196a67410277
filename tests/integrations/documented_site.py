"""A rank of a site with the script of a page of the documentation: `documented_site.py PAGE OUT SERVER SITE ...`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"
TWO_RANKS = {"lightning.md": ('accelerator="cpu",', 'accelerator="cpu", devices=2, strategy="ddp",')}
"""What a page says is to be changed where a site has several ranks; other scripts stay as they are."""


def script_of(page: str) -> dict[str, Any]:
    """What the one Python script of a page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    if "RANK" in os.environ and page in TWO_RANKS:
        assert TWO_RANKS[page][0] in code
        code = code.replace(*TWO_RANKS[page])
    found: dict[str, Any] = {"__name__": f"documented_{page.removesuffix('.md')}"}
    exec(compile(code, page, "exec"), found)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained = script_of(sys.argv[1])["main"](*sys.argv[3:])
    vector = parameters_to_vector(trained.parameters()).detach()
    torch.save(vector, f"{sys.argv[2]}-{os.environ.get('RANK', 0)}.pt")
