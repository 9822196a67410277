"""Scripts that others wrote, alone and at two sites: python benchmarks/foreign_scripts.py DIR [--only mnist,nanogpt]

DIR has checkouts of karpathy/nanoGPT, pytorch/examples and huggingface/transformers (directories nanoGPT, examples and
transformers; those that are missing are left out). The diffs are those of docs/engines/scripts.md. Everything happens
in a copy; data are small and made here. For each script it prints the loss that it ends with

    alone       the script as it is, on the data of both sites
    half        the script as it is, on the data of one site
    two sites   the script with the diff, each site with its half

A site takes as many steps as the script alone, or half as many where the script counts epochs.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightgrad.lab.data.drawing import DrawPlan, draw
from weightgrad.machine import measured_on

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines" / "scripts.md"
SITES = ("virginia", "tokyo")
CHANGED_LINES = 8


class AnchorError(Exception):
    """A checkout does not have the lines that a diff refers to."""


@dataclass(frozen=True)
class Hunk:
    """Lines of a diff that stand together, without their signs; what is there before, and after."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Diff:
    """A diff of the page."""

    path: str
    hunks: tuple[Hunk, ...]
    changed: int

    def apply(self, text: str) -> str:
        """The text of a file with the diff in it.

        Raises:
            AnchorError: The text does not have the lines around a change exactly once.
        """
        lines = text.splitlines()
        for hunk in self.hunks:
            size = len(hunk.before)
            found = [at for at in range(len(lines)) if tuple(lines[at : at + size]) == hunk.before]
            if len(found) != 1:
                raise AnchorError(f"{self.path} has these lines {len(found)} times, wanted once: {hunk.before}")
            lines[found[0] : found[0] + size] = hunk.after
        return "\n".join(lines) + "\n"


def read_diffs(page: str) -> dict[str, Diff]:
    """The diffs of a page, by the path of the file that they change."""
    found = {}
    for block in re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        head, *parts = re.split(r"^@@.*\n", block, flags=re.MULTILINE)
        (path,) = re.findall(r"^\+\+\+ b/(\S+)$", head, re.MULTILINE)
        hunks, changed = [], 0
        for part in parts:
            lines = part.splitlines()
            assert all(line[:1] in " +-" for line in lines), part
            before = tuple(line[1:] for line in lines if line[:1] != "+")
            hunks.append(Hunk(before, tuple(line[1:] for line in lines if line[:1] != "-")))
            changed += sum(line[:1] in "+-" for line in lines)
        found[path] = Diff(path, tuple(hunks), changed)
    return found


@dataclass(frozen=True)
class Script:
    """A script that somebody else wrote.

    Attributes:
        path: where it is in the directory of checkouts; its directory is copied, and it runs there.
        data: makes small data in that copy: for `both`, and for each site.
        arguments: gives its arguments for `both` or a site.
        loss: finds the losses in what it prints; the last one counts.
        steps: how many steps the arguments make it take, for the table.
        what: what the figure is.
        halves: whether the script as it is can be given the data of one site.
    """

    path: str
    data: Callable[[Path], None]
    arguments: Callable[[str], list[str]]
    loss: str
    steps: str
    what: str = "test loss"
    halves: bool = True


# -- nanoGPT ----------------------------------------------------------------------------------------


def _text() -> str:
    """A text that everybody has: the documentation of this project."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def _characters(place: Path) -> None:
    text = _text()
    letters = sorted(set(text))
    numbers = np.array([letters.index(letter) for letter in text], dtype=np.uint16)
    cut = len(numbers) * 9 // 10
    train, test = numbers[:cut], numbers[cut:]
    for name, part in (("both", train), ("virginia", train[: cut // 2]), ("tokyo", train[cut // 2 :])):
        folder = place / "data" / name
        folder.mkdir(parents=True)
        part.tofile(folder / "train.bin")
        test.tofile(folder / "val.bin")
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def _nanogpt(name: str) -> list[str]:
    settings = {
        "dataset": name, "device": "cpu", "dtype": "float32", "compile": False, "eval_interval": 200, "eval_iters": 20,
        "log_interval": 100, "gradient_accumulation_steps": 1, "batch_size": 12, "block_size": 64, "n_layer": 4,
        "n_head": 4, "n_embd": 128, "learning_rate": 1e-3, "min_lr": 1e-4, "max_iters": 200, "lr_decay_iters": 200,
        "warmup_iters": 20, "beta2": 0.99, "out_dir": f"out-{name}", "always_save_checkpoint": False,
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in settings.items()]


# -- pytorch/examples -------------------------------------------------------------------------------


def _idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Bytes in the format of MNIST's files."""
    sizes = b"".join(side.to_bytes(4, "big") for side in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def _digits(place: Path) -> None:
    """scikit-learn's digits, enlarged to 28 by 28, where torchvision looks for MNIST."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.kron(found.images / 16 * 255, np.ones((3, 3))).astype(np.uint8)
    pixels = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(pixels))
    pixels, labels = pixels[order], found.target[order].astype(np.uint8)
    raw = place.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, part in (("train", slice(None, 1280)), ("t10k", slice(1280, None))):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(_idx(pixels[part]))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(_idx(labels[part]))


def _folders(place: Path) -> None:
    """Drawn pictures of four classes, in folders as ImageNet has them."""
    draw(place / "drawn", DrawPlan(classes=4, train=32, test=10, size=64, sites=SITES))
    for site in SITES:
        for target, old, new in ((site, "train", "train"), ("both", "train", "train"), ("both", "test", "val")):
            for path in (place / "drawn" / site / old).glob("*/*"):
                copy = place / "data" / target / new / path.parent.name / f"{site}-{path.name}"
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    for site in SITES:
        shutil.copytree(place / "data" / "both" / "val", place / "data" / site / "val")


def _imagenet(name: str) -> list[str]:
    arch = ["--arch", "shufflenet_v2_x0_5", "--lr", "0.025"]
    return [f"data/{name}", *arch, "--epochs", "5", "-b", "8", "-j", "0"]


# -- transformers -----------------------------------------------------------------------------------


def _tokenized(place: Path) -> None:
    """Text files, and a tokenizer and a small GPT-2 to begin from, without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    lines = [line for line in _text().splitlines() if line.strip()]
    cut = len(lines) * 9 // 10
    parts = {"both": lines[:cut], "virginia": lines[: cut // 2], "tokyo": lines[cut // 2 : cut], "test": lines[cut:]}
    for name, part in parts.items():
        (place / f"{name}.txt").write_text("\n".join(part))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=1000, special_tokens=["<unk>", "<end>"]))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", model_max_length=64
    )
    fast.save_pretrained(place / "small")
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": len(fast)}
    GPT2LMHeadModel(GPT2Config(**shape, eos_token_id=1, bos_token_id=1)).save_pretrained(place / "small")


def _clm(name: str) -> list[str]:
    return [
        "--model_name_or_path", "small", "--train_file", f"{name}.txt", "--validation_file", "test.txt",
        "--block_size", "64", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8",
        "--learning_rate", "1e-3", "--max_train_steps", "200", "--seed", "1", "--output_dir", f"out-{name}",
    ]  # fmt: skip


SCRIPTS = {
    "nanogpt": Script(
        "nanoGPT/train.py", _characters, _nanogpt, r"val loss ([\d.]+)", "200 steps of 12 x 64 characters"
    ),
    "mnist": Script(
        "examples/mnist/main.py",
        _digits,
        lambda name: ["--epochs", "4", "--batch-size", "32", "--test-batch-size", "100", "--log-interval", "1000"],
        r"Average loss: ([\d.]+)",
        "160 steps of 32 images, 80 a site",
        halves=False,
    ),
    "imagenet": Script(
        "examples/imagenet/main.py",
        _folders,
        _imagenet,
        r"\* +Acc@1 ([\d.]+)",
        "160 steps of 8 images, 80 a site",
        "test accuracy, %",
    ),
    "run_clm_no_trainer": Script(
        "transformers/examples/pytorch/language-modeling/run_clm_no_trainer.py",
        _tokenized,
        _clm,
        r"perplexity: ([\d.]+)",
        "200 steps of 8 x 64 tokens",
        "test perplexity",
    ),
}


# -- running ----------------------------------------------------------------------------------------


class Trial:
    """One script in a copy of its directory, with its data."""

    def __init__(self, name: str, checkouts: Path, place: Path, diff: Diff) -> None:
        self.script = SCRIPTS[name]
        source = checkouts / self.script.path
        self.place = place / source.parent.name
        shutil.copytree(source.parent, self.place, ignore=shutil.ignore_patterns(".git", "data", "out*"))
        self.plain = self.place / source.name
        self.changed = self.place / f"at_a_site_{source.name}"
        self.changed.write_text(diff.apply(self.plain.read_text()))
        self.script.data(self.place)

    def alone(self, name: str) -> float:
        """The loss that the script ends with as it is."""
        command = [sys.executable, str(self.plain), *self.script.arguments(name)]
        return self._loss(self._start(command, f"alone-{name}"), f"alone-{name}")

    def two_sites(self, strategy: str) -> list[float]:
        """The loss that each of two sites ends with."""
        options = ["--insecure", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--until-finished"]
        command = [sys.executable, "-m", "weightgrad", "serve", "--sites", ",".join(SITES), "--strategy", strategy]
        server = self._start([*command, *options], "server")
        try:
            port = self._port(server)
            sites = {name: self._start(self._at(name, port), name) for name in SITES}
            losses = [self._loss(process, name) for name, process in sites.items()]
            server.wait(600)
        finally:
            server.kill()
        return losses

    def _at(self, name: str, port: str) -> list[str]:
        words = [f"--server=127.0.0.1:{port}", f"--site={name}"]
        return [sys.executable, str(self.changed), *self.script.arguments(name), *words]

    def _start(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(self.place / f"{log}.log", "wb") as out:
            return subprocess.Popen(
                command, cwd=self.place, env=environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def _port(self, server: subprocess.Popen[bytes]) -> str:
        while server.poll() is None:
            if found := re.search(r"listening on port (\d+)", (self.place / "server.log").read_text()):
                return found[1]
            time.sleep(0.05)
        raise SystemExit((self.place / "server.log").read_text())

    def _loss(self, process: subprocess.Popen[bytes], log: str) -> float:
        code = process.wait()
        said = (self.place / f"{log}.log").read_text(errors="replace")
        found = re.findall(self.script.loss, said)
        if code or not found:
            raise SystemExit(f"{self.script.path} ({log}) ended with {code}:\n{said[-3000:]}")
        return float(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, metavar="DIR", help="the directory of the checkouts")
    parser.add_argument("--only", help=f"some of {', '.join(SCRIPTS)}, separated by commas")
    parser.add_argument("--strategy", default="diloco(every=10)", help="the strategy between the sites")
    given = parser.parse_args()
    diffs = read_diffs(PAGE.read_text())
    names = given.only.split(",") if given.only else list(SCRIPTS)
    print(f"| script | steps | what | alone | half | two sites, {given.strategy} |\n|---|---|---|---:|---:|---:|")
    for name in names:
        script = SCRIPTS[name]
        if not (given.checkouts / script.path).is_file():
            print(f"{name}: no {given.checkouts / script.path}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="foreign-") as place:
            trial = Trial(name, given.checkouts.absolute(), Path(place), diffs[script.path])
            alone = trial.alone("both")
            half = f"{trial.alone('virginia'):g}" if script.halves else "-"
            sites = ", ".join(f"{loss:g}" for loss in trial.two_sites(given.strategy))
        print(f"| {name} | {script.steps} | {script.what} | {alone:g} | {half} | {sites} |", flush=True)
    print(f"\n{measured_on()}")


if __name__ == "__main__":
    main()
