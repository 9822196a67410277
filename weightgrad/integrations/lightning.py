"""A site in the Lightning `Trainer`: `Trainer(..., callbacks=[WeightGradCallback(ADDRESS, site=NAME)])`.

A callback is enough: Lightning passes a closure to `optimizer.step`, after which the site exchanges. A Lightning
`Strategy` would have to be one for each way of running inside a site (DDP, FSDP2, one device), and there are those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightgrad.core.strategies import Strategy
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

if TYPE_CHECKING:
    Callback = Any
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise ImportError(
                "weightgrad.integrations.lightning needs Lightning: pip install 'weightgrad[lightning]'"
            ) from error


class WeightGradCallback(Callback):  # type: ignore[misc]
    """Makes the process of a `Trainer` a rank of a site, from the beginning of `fit()` to its end.

        trainer = Trainer(..., callbacks=[WeightGradCallback("gs.example.net:7443", site="virginia",
                                                             credentials="certs/")])
        trainer.fit(module, loader)

    It works with automatic and with manual optimization, the latter also with several optimizers.

    Args:
        address: HOST:PORT of the global server.
        site: The name of the site.
        strategy: The strategy of the run, which must be the server's; None takes the server's.
        samples: How much the updates of this site weigh: the samples that it sees in one step.
        prepare: Further arguments of `Site.prepare`.
        **options: Further arguments of `weightgrad.join`.
    """

    def __init__(
        self,
        address: str,
        *,
        site: str,
        strategy: str | Strategy | None = None,
        samples: int = 1,
        prepare: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._address, self._name, self._options = address, site, options
        self._strategy, self._samples, self._prepare = strategy, samples, prepare or {}
        self.site: Site | None = None
        """The site, while and after it trains."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join with the module and its optimizers."""
        optimizers = list(trainer.optimizers)
        wrapped = trainer.strategy.model  # DistributedDataParallel, where Lightning averages gradients
        model = pl_module if wrapped is None else wrapped
        self.site = join(self._address, site=self._name, **self._options)
        self.site.prepare(
            model,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            self._strategy,
            samples=self._samples,
            **self._prepare,
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss, for the site's lines of progress and its trackers."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.site is not None and loss is not None:
            # Lightning has divided it by the batches of a step, where it accumulates by itself.
            self.site.note(loss * trainer.accumulate_grad_batches if pl_module.automatic_optimization else loss)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Tell the site that an epoch has ended."""
        if self.site is not None:
            self.site.new_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave. The module becomes the global model."""
        if self.site is not None:
            self.site.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tell the server at once that the site is gone, without its residual."""
        if self.site is not None:
            self.site.__exit__(type(exception), exception, exception.__traceback__)
