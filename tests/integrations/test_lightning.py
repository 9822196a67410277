"""The Lightning Trainer as two sites: the script of the documentation, exceptions, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.user_sites import flat, served
from weightgrad.errors import StrategyError

from .documented_scripts import run_two_processes, run_two_sites
from .documented_site import script_of

pl = pytest.importorskip(
    "lightning.pytorch", reason="Lightning is not installed (the extra `lightning`)", exc_type=ImportError
)

QUIET = [
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*GPU available but not used:UserWarning",
    "ignore:.*logging interval:UserWarning",
    "ignore:.*isinstance.*LeafSpec:FutureWarning",
    "ignore:.*LeafSpec.*:FutureWarning",
]
pytestmark = [pytest.mark.filterwarnings(one) for one in QUIET]


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("strategy", ["baseline", "diloco, every: 4"])
def test_the_documented_script_trains_at_two_sites(strategy: str, manual: bool) -> None:
    modules = run_two_sites(script_of("lightning.md")["main"], strategy, manual)
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(9))
    right = (modules[0].net(x).argmax(1) == (x.sum(1) > 0).long()).float().mean()
    assert right > 0.8


def test_a_site_of_two_ranks(tmp_path: Path) -> None:
    vector = run_two_processes("lightning.md", "diloco, every: 4", tmp_path)
    module = script_of("lightning.md")["Classifier"]()
    torch.nn.utils.vector_to_parameters(vector, module.parameters())
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(9))
    assert (module.net(x).argmax(1) == (x.sum(1) > 0).long()).float().mean() > 0.8


def quiet_trainer(callback: Any, **options: Any) -> Any:
    return pl.Trainer(
        **options,
        max_epochs=1,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader() -> Any:
    data = torch.utils.data.TensorDataset(torch.ones(8, 8), torch.ones(8, dtype=torch.long))
    return torch.utils.data.DataLoader(data, batch_size=4)


def test_an_exception_tells_the_server_that_the_site_is_gone() -> None:
    from weightgrad.integrations.lightning import WeightGradCallback

    class Failing(script_of("lightning.md")["Classifier"]):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            raise RuntimeError("the disk of the data is gone")

    with served("diloco, every: 2", "east") as hub:
        callback = WeightGradCallback(hub.address, site="east", insecure=True)
        with pytest.raises(RuntimeError, match="the disk of the data is gone"):
            quiet_trainer(callback).fit(Failing(), loader())
        hub.until(lambda: not hub.core.members.by_name["east"].live)


def test_lines_have_the_loss_of_the_module(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning hands over the loss divided by the batches that it accumulates."""
    from weightgrad.integrations.lightning import WeightGradCallback

    caplog.set_level("INFO", "weightgrad")
    losses: list[float] = []

    class Module(script_of("lightning.md")["Classifier"]):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            losses.append(float(loss.detach()))
            return loss

    with served("diloco, every: 1", "east") as hub:
        callback = WeightGradCallback(hub.address, site="east", insecure=True)
        quiet_trainer(callback, accumulate_grad_batches=2).fit(Module(), loader())
        assert callback.site is not None
        assert callback.site.stats()["loss"] == pytest.approx(losses[-1])
    assert f"east leaves after step 1, loss {losses[-1]:.4g}; " in caplog.text


def test_lbfgs_is_refused() -> None:
    from weightgrad.integrations.lightning import WeightGradCallback

    class Module(script_of("lightning.md")["Classifier"]):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    callback = WeightGradCallback("127.0.0.1:1", site="east", insecure=True, strategy="baseline")
    with pytest.raises(StrategyError, match="LBFGS calls its closure many times"):
        quiet_trainer(callback).fit(Module(manual=True), loader())


@pytest.mark.parametrize(("strategy", "steps"), [("diloco, every: 2", 1), ("baseline", 2)])
def test_two_optimizers(strategy: str, steps: int) -> None:
    """Where updates are shared, a step of the site is one of each; where gradients are, each is a step of its own."""
    from weightgrad.integrations.lightning import WeightGradCallback

    class Module(script_of("lightning.md")["Classifier"]):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]

        def training_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.manual_backward(torch.nn.functional.cross_entropy(self.net(x), y))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    with served(strategy, "east") as hub:
        callback = WeightGradCallback(hub.address, site="east", insecure=True)
        module = Module(manual=True)
        first = flat(module)
        quiet_trainer(callback).fit(module, loader())
        assert callback.site is not None
        assert callback.site.steps == steps * len(loader())
        moved = flat(module) != first
        assert bool(moved[: module.net[0].weight.numel()].any())
        assert bool(moved[-module.net[2].bias.numel() :].any())
        if hub.core.elsewhere:  # where sites step with several optimizers, the server has the first model
            assert torch.equal(first, hub.global_model.vector)
        else:
            assert torch.equal(flat(module), hub.global_model.vector)
