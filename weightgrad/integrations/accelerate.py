"""A site whose model, optimizer and loader an `Accelerator` of Hugging Face has prepared.

`Site.prepare` finds the optimizer inside an `AcceleratedOptimizer` by itself. `prepare` does both in the right order,
and checks what the accelerator does inside the site.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.session import Site

if TYPE_CHECKING:
    Accelerator = Any
else:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ImportError(
            "weightgrad.integrations.accelerate needs accelerate: pip install 'weightgrad[accelerate]'"
        ) from error

_OWN_OPTIMIZER = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def prepare(
    accelerator: Accelerator,
    site: Site,
    model: Any,
    optimizer: Any,
    *others: Any,
    strategy: str | Strategy | None = None,
    samples: int = 1,
    **options: Any,
) -> tuple[Any, ...]:
    """Prepare a model and its optimizer by an accelerator, and enter the run with them; called on every rank.

        model, optimizer, loader, schedule = prepare(accelerator, site, model, optimizer, loader, schedule)

    Args:
        accelerator: The accelerator, which decides what happens inside the site.
        site: What `weightgrad.join` has returned.
        model: The model.
        optimizer: Its optimizer.
        *others: Loaders and schedulers, for `Accelerator.prepare`.
        strategy: The strategy of the run, which must be the server's; None takes the server's.
        samples: How much the updates of this site weigh: the samples that it sees in one step.
        **options: Further arguments of `Site.prepare`.

    Returns:
        What `Accelerator.prepare` returns, in the order of the arguments.

    Raises:
        StrategyError: The accelerator gives the optimizer away, or has other ranks than the site.
        RefusedError: The server did not admit the site.
    """
    kind = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
    if kind in _OWN_OPTIMIZER:
        raise StrategyError(f"{kind} keeps optimizer and gradients to itself; use DDP or FSDP2 inside the site")
    if accelerator.num_processes != site.group.size:
        raise StrategyError(
            f"the accelerator has {accelerator.num_processes} processes and the site {site.group.size}; make the "
            "Accelerator before weightgrad.join, so that both have the same process group"
        )
    model, optimizer, *others_prepared = accelerator.prepare(model, optimizer, *others)
    site.prepare(model, optimizer, strategy=strategy, samples=samples, **options)
    return (model, optimizer, *others_prepared)
