"""The diffs of docs/engines/scripts.md, and the command that applies them to a checkout."""

from __future__ import annotations

import ast
import textwrap

import pytest
from foreign_scripts import CHANGED_LINES, PAGE, SCRIPTS, AnchorError, Diff, read_diffs

DIFFS = read_diffs(PAGE.read_text())


def test_every_script_has_a_diff() -> None:
    assert sorted(DIFFS) == sorted(script.path for script in SCRIPTS.values())


@pytest.mark.parametrize("diff", DIFFS.values(), ids=list(DIFFS))
def test_a_diff_is_short_and_whole(diff: Diff) -> None:
    assert 5 <= diff.changed <= CHANGED_LINES
    added = "\n".join(line for hunk in diff.hunks for line in hunk.after if line not in hunk.before)
    assert "import weightgrad as wg" in added
    for call in ("wg.join(", ".prepare(model, optimizer)", ".leave()"):
        assert added.count(call) == 1, call
    for hunk in diff.hunks:
        assert hunk.before, "nobody would know where it goes"


@pytest.mark.parametrize("diff", DIFFS.values(), ids=list(DIFFS))
def test_a_diff_can_be_applied(diff: Diff) -> None:
    lines = [line for hunk in diff.hunks for line in ("first = 1", *hunk.before)]
    text = diff.apply("\n".join(lines))
    assert [line for line in text.splitlines() if line in lines] == lines, "nothing else has changed"
    for hunk in diff.hunks:
        for line in hunk.after:
            assert line in text.splitlines()
            if line not in hunk.before:
                ast.parse(textwrap.dedent(line))


def test_a_checkout_that_differs_is_noticed() -> None:
    diff = DIFFS["examples/mnist/main.py"]
    with pytest.raises(AnchorError, match=r"has these lines 0 times, wanted once: \('import torch.optim as optim'"):
        diff.apply("import torch\n")
    twice = "\n".join(line for hunk in diff.hunks for line in hunk.before)
    with pytest.raises(AnchorError, match="2 times"):
        diff.apply(f"{twice}\n{twice}")
