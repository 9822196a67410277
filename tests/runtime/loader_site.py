"""A site that trains through DataLoaders with workers of every kind; run as a script, for `test_data_loaders.py`."""

from __future__ import annotations

import importlib.util
import sys
import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weightgrad as wg

# How workers are started, whether they stay from epoch to epoch, how many, and for how many epochs.
CASES = (
    ("fork", False, 2, 4),
    ("fork", True, 2, 4),
    ("spawn", False, 1, 1),
    ("forkserver", True, 1, 2),
)
ITEMS, BATCH = 64, 16
HUGGING_FACE_EPOCHS = 2  # with two workers, where it is installed


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Random points, and the largest of their first four coordinates."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x[:4].argmax()


def train(address: str, name: str) -> None:
    """Train with every kind of worker, and say what is in the global model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wg.join(address, site=name, insecure=True, timeout=300.0) as site:
        site.prepare(model, optimizer)
        for context, persistent, workers, epochs in CASES:
            loader = DataLoader(
                Points(),
                batch_size=BATCH,
                num_workers=workers,
                multiprocessing_context=context,
                persistent_workers=persistent,
            )
            for _ in range(epochs):
                for x, y in loader:
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        if importlib.util.find_spec("transformers") is not None:
            train_with_hugging_face(model, optimizer)
        print("steps", site.steps, "model", site.digest())
    print("gRPC is loaded" if "grpc" in sys.modules else "gRPC is not loaded")


class WithLoss(nn.Module):
    """A model as the Hugging Face Trainer wants it: it returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.model(x), labels)}


def collate(items: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A batch as `WithLoss` takes it."""
    x, y = zip(*items, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


def train_with_hugging_face(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Some epochs under the Trainer, with two workers."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=HUGGING_FACE_EPOCHS,
            per_device_train_batch_size=BATCH,
            dataloader_num_workers=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=WithLoss(model),
            args=arguments,
            train_dataset=Points(),
            data_collator=collate,
            optimizers=(optimizer, None),
        )
        trainer.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(*sys.argv[1:])
