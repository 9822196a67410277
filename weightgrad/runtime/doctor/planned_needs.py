"""What a plan says that a site needs, read from the file that `weightgrad plan --json` prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from weightgrad.errors import PlanError

_CHECKPOINT_BYTES = 12.0  # a parameter: two checkpoints of a global model and a residual, less what a snapshot shares


@dataclass(frozen=True)
class PlannedNeeds:
    """Of one rank and its site.

    Attributes:
        memory_bytes: of the host, for one rank; 0: not known.
        room_bytes: of the disk, for checkpoints; 0: not known.
    """

    memory_bytes: float = 0.0
    room_bytes: float = 0.0


def planned_needs(path: Path, site: str | None) -> PlannedNeeds:
    """The needs of the largest rank of a site under the strategy that the plan would take.

    Args:
        path: the file.
        site: the site; None: that which needs most.

    Raises:
        PlanError: the file is not a plan, or has no such site.
    """
    try:
        found = json.loads(path.read_text())
        chosen = found["strategies"].get(found["chosen"]["strategy"]) or next(iter(found["strategies"].values()))
        workers = {str(one["site"]): one for one in chosen["workers"]}
        parameters = int(found["parameters"])
        needs = {
            name: float(one["host_peak"]) + float(one["device_peak"]) * (one.get("device_is_host", True))
            for name, one in workers.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise PlanError(
            f"{path} is not a plan ({error!r}); make one: weightgrad plan RECIPE --json > plan.json"
        ) from error
    if site is not None and site not in needs:
        raise PlanError(f"no site {site!r} in {path}; it has {', '.join(needs)}")
    needed = max(needs.values(), default=0.0) if site is None else needs[site]
    return PlannedNeeds(memory_bytes=needed, room_bytes=_CHECKPOINT_BYTES * parameters)
