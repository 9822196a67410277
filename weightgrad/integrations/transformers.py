"""A site in the Hugging Face `Trainer`: `Trainer(..., callbacks=[WeightGradCallback(ADDRESS, site=NAME)])`."""

from __future__ import annotations

import weakref
from typing import Any

from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site
from weightgrad.runtime.site import present_sites

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "weightgrad.integrations.transformers needs transformers and accelerate: pip install 'weightgrad[transformers]'"
    ) from error


_MADE: weakref.WeakSet[Site] = weakref.WeakSet()


class WeightGradCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Makes the process of a `Trainer` a rank of a site, from the beginning of `train()` to its end.

        trainer = Trainer(..., callbacks=[WeightGradCallback("gs.example.net:7443", site="virginia",
                                                             credentials="certs/")])
        trainer.train()

    When training begins, the model gets the weights of the global model; when it ends, it is the global model. The
    Trainer tells nobody of an error in `train()`: the site then leaves when the process ends, when `train()` is called
    again, or when the caller says `callback.site.leave()`.

    Args:
        address: HOST:PORT of the global server.
        site: The name of the site.
        strategy: The strategy of the run, which must be the server's; None takes the server's.
        samples: How much the updates of this site weigh; None: the samples of an optimizer step at this site.
        prepare: Further arguments of `Site.prepare`.
        **options: Further arguments of `weightgrad.join`.
    """

    def __init__(
        self,
        address: str,
        *,
        site: str,
        strategy: str | Strategy | None = None,
        samples: int | None = None,
        prepare: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._address, self._name, self._options = address, site, options
        self._strategy, self._samples, self._prepare = strategy, samples, prepare or {}
        self.site: Site | None = None
        """The site, while and after it trains."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join with the model and the optimizer that the trainer has made.

        Raises:
            StrategyError: The trainer would do something that no site can.
        """
        if args.load_best_model_at_end:
            raise StrategyError(
                "load_best_model_at_end loads other weights before the site has left, and the other sites would never "
                "see them; set it to False, and load the best checkpoint after train()"
            )
        if args.deepspeed is not None:
            raise StrategyError("DeepSpeed keeps optimizer and gradients to itself; use DDP or FSDP2 inside the site")
        samples = self._samples
        if samples is None:
            samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        before = present_sites.find(self._address, self._name)
        if before is not None and before in _MADE:  # its train() has ended by an error
            before.__exit__(InterruptedError, InterruptedError(), None)
        self.site = join(self._address, site=self._name, **self._options)
        _MADE.add(self.site)
        try:
            self.site.prepare(
                kwargs["model"], kwargs["optimizer"], strategy=self._strategy, samples=samples, **self._prepare
            )
        except BaseException as error:
            self.site.__exit__(type(error), error, error.__traceback__)
            raise

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Note the loss, for the site's lines of progress and its trackers."""
        if self.site is not None and logs is not None and isinstance(logs.get("loss"), (int, float)):
            self.site.note(float(logs["loss"]))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the site that an epoch has ended."""
        if self.site is not None:
            self.site.new_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave. The model becomes the global model."""
        if self.site is not None:
            self.site.leave()
