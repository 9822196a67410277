"""A site as a Ray Train job: each worker of a `TorchTrainer` is a rank of the site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weightgrad.errors import StrategyError
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

if TYPE_CHECKING:
    RunConfig: TypeAlias = Any
    ScalingConfig: TypeAlias = Any
    TorchConfig: Any
    TorchTrainer: Any
else:
    try:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise ImportError("weightgrad.integrations.ray needs Ray Train: pip install 'weightgrad[ray]'") from error

TrainLoop = Callable[[Site, dict[str, Any]], object]


def site_trainer(
    train_loop: TrainLoop,
    address: str,
    *,
    site: str,
    scaling_config: ScalingConfig,
    train_loop_config: dict[str, Any] | None = None,
    run_config: RunConfig | None = None,
    credentials: str | Path | None = None,
    state: str | Path | None = None,
    options: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> Any:
    """Make a `TorchTrainer` whose workers are the ranks of a site; `fit()` runs it.

        def train(site, config):  # on every worker
            model, optimizer = site.prepare(model, optimizer)
            ...

        site_trainer(train, "gs.example.net:7443", site="virginia", credentials="certs/",
                     scaling_config=ScalingConfig(num_workers=4, use_gpu=True)).fit()

    The site joins before `train_loop` is called and leaves when it returns. If it raises, the other sites are told.

    Args:
        train_loop: Called on every worker with the site, which it gives its model, and with the configuration. Ray has
            made the process group by then; do not wrap the model by `ray.train.torch.prepare_model`.
        address: HOST:PORT of the global server.
        site: The name of the site.
        scaling_config: How many workers, and what each gets.
        train_loop_config: The configuration for `train_loop`.
        run_config: Storage, and what happens when a worker fails, for Ray.
        credentials: The site's directory of certificates, at the same path on every machine of the cluster.
        state: The directory of the site's checkpoints, on storage that every machine of the cluster has. With it, and
            with `FailureConfig(max_failures=N)`, a site whose worker has failed goes on where it was.
        options: Further arguments of `weightgrad.join`.
        **trainer_options: Further arguments of `TorchTrainer`.

    Returns:
        The trainer.

    Raises:
        StrategyError: `trainer_options` has a process group that cannot carry the site's messages.
    """
    backend = "cpu:gloo,cuda:nccl" if scaling_config.use_gpu else "gloo"
    torch_config = trainer_options.pop("torch_config", None) or TorchConfig(backend=backend)
    if "gloo" not in (torch_config.backend or ""):
        raise StrategyError(
            f"torch_config has the backend {torch_config.backend!r}, which cannot carry CPU tensors, as encoded "
            f"gradients are; wanted {backend!r}, or leave torch_config out"
        )
    joining = dict(options or {})
    for name, path in (("credentials", credentials), ("state", state)):
        if path is not None:  # a worker's directory is not that of this script
            joining[name] = str(Path(path).absolute())

    def loop(config: dict[str, Any]) -> None:
        with join(address, site=site, **joining) as joined:
            train_loop(joined, config)

    return TorchTrainer(
        loop,
        train_loop_config=train_loop_config or {},
        torch_config=torch_config,
        scaling_config=scaling_config,
        run_config=run_config,
        **trainer_options,
    )
