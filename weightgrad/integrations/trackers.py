"""A site's numbers in the logger that a team already has, in a line each: `site.track(TensorBoardTracker("runs/x"))`.

A tracker is any function of a dictionary of numbers and words (`Site.stats`) and of a step. These three write the
numbers under "weightgrad/" and need their library only when they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "weightgrad/"


def _numbers(stats: Mapping[str, Any]) -> dict[str, float]:
    return {_PREFIX + name: float(value) for name, value in stats.items() if isinstance(value, (int, float))}


class TensorBoardTracker:
    """Writes to TensorBoard.

    Args:
        target: A directory of event files, or a `SummaryWriter` of your own.

    Raises:
        ImportError: `target` is a directory, and tensorboard is not installed.
    """

    def __init__(self, target: Any = "runs/weightgrad") -> None:
        if not hasattr(target, "add_scalar"):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "TensorBoardTracker needs tensorboard: pip install 'weightgrad[tensorboard]'"
                ) from error
            target = SummaryWriter(str(target))
        self.writer = target
        """The writer."""

    def __call__(self, stats: Mapping[str, Any], step: int) -> None:
        """Write the numbers of a step."""
        for name, value in _numbers(stats).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WandbTracker:
    """Writes to Weights & Biases.

    The step is logged as "weightgrad/step", an axis of its own, so that it does not meddle with steps of your calls.

    Args:
        run: What `wandb.init` has returned; None: the present run.

    Raises:
        ImportError: wandb is not installed.
        RuntimeError: There is no run.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            import wandb  # type: ignore[import-not-found,unused-ignore]

            run = wandb.run
        if run is None:
            raise RuntimeError("there is no run of Weights & Biases; call wandb.init() before WandbTracker()")
        self.run = run
        """The run."""
        run.define_metric(_PREFIX + "*", step_metric=_PREFIX + "step")

    def __call__(self, stats: Mapping[str, Any], step: int) -> None:
        """Write the numbers of a step."""
        self.run.log({**_numbers(stats), _PREFIX + "step": step})


class MlflowTracker:
    """Writes to MLflow.

    Args:
        run_id: The run; None: the active one, which MLflow starts if there is none.

    Raises:
        ImportError: mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None) -> None:
        import mlflow  # type: ignore[import-not-found,unused-ignore]

        self._log, self._run_id = mlflow.log_metrics, run_id

    def __call__(self, stats: Mapping[str, Any], step: int) -> None:
        """Write the numbers of a step."""
        named = {"run_id": self._run_id} if self._run_id is not None else {}
        self._log(_numbers(stats), step=step, **named)
