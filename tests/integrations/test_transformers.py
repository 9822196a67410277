"""The Hugging Face Trainer as two sites: the script of the documentation, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.user_sites import flat, served
from weightgrad.errors import StrategyError

from .documented_scripts import run_two_processes

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (the extra `transformers`)", exc_type=ImportError
)


def test_the_documented_script_trains_at_two_sites_one_of_two_ranks(tmp_path: Path) -> None:
    vector = run_two_processes("transformers.md", "baseline", tmp_path, str(tmp_path / "out"))
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    text = (torch.arange(16) + 5).unsqueeze(0) % 64
    with torch.no_grad():
        loss = float(model(input_ids=text, labels=text).loss)
    assert loss < 3.5, "an untrained model has a loss of log(64) = 4.2"


def test_training_that_was_interrupted_begins_again_in_the_same_process(tmp_path: Path) -> None:
    """A notebook's cell: Ctrl-C, and again with a new trainer, where nobody has the first callback any more."""
    from weightgrad.integrations.transformers import WeightGradCallback

    class Interrupting(transformers.TrainerCallback):  # type: ignore[misc,name-defined,unused-ignore]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    def trainer(address: str, *callbacks: Any) -> Any:
        config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
        texts = (torch.arange(16).unsqueeze(1) + torch.arange(16)) % 64
        return transformers.Trainer(
            model=transformers.GPT2LMHeadModel(config),
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path), max_steps=4, save_strategy="no", report_to="none", use_cpu=True
            ),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
            callbacks=[WeightGradCallback(address, site="east", insecure=True), *callbacks],
        )

    with served("diloco, every: 1", "east") as hub:
        with pytest.raises(KeyboardInterrupt):
            trainer(hub.address, Interrupting()).train()
        again = trainer(hub.address)
        again.train()
        hub.until(lambda: not hub.core.members.by_name["east"].live)
        assert torch.equal(flat(again.model), hub.global_model.vector)


def test_what_the_trainer_may_not_do(tmp_path: Path) -> None:
    from weightgrad.integrations.transformers import WeightGradCallback

    def arguments(**options: Any) -> Any:
        return transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)

    callback = WeightGradCallback("127.0.0.1:1", site="east", insecure=True)
    best = arguments(load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps")
    with pytest.raises(StrategyError, match="load_best_model_at_end loads other weights before the site has left"):
        callback.on_train_begin(best, None, None)
    assert callback.site is None
    callback.on_log(best, None, None, logs={"loss": 1.0})
    callback.on_epoch_end(best, None, None)
    callback.on_train_end(best, None, None)
