"""The dashboard and the alarms ask for metrics that the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
KNOWN = set(re.findall(r"`(weightgrad_\w+)", (ROOT / "docs" / "metrics.md").read_text()))


def unknown(expression: str) -> set[str]:
    names = set(re.findall(r"weightgrad_\w+", expression))
    return {name for name in names if name not in KNOWN and name.removesuffix("_bucket") not in KNOWN}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    panels = json.loads((GRAFANA / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) >= 12
    assert not [one for one in expressions if unknown(one)]
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in panels]
    assert len(set(places)) == len(places)


def test_alarms_are_about_metrics_that_there_are() -> None:
    (group,) = yaml.safe_load((GRAFANA / "alarms.yaml").read_text())["groups"]
    assert len(group["rules"]) >= 5
    for rule in group["rules"]:
        assert not unknown(rule["expr"]), rule
        assert rule["annotations"]["summary"]


def test_a_metric_that_is_not_there_is_noticed() -> None:
    assert unknown("rate(weightgrad_no_such_total[5m])") == {"weightgrad_no_such_total"}
