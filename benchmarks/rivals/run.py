"""PyTorch's DDP and its hooks, post-local SGD, torchft's DiLoCo, hivemind and WeightGrad, over the same links.

    benchmarks/rivals/install.sh                               # torchft and hivemind, once
    python benchmarks/rivals/run.py --quick                    # two minutes, one link, digits
    python benchmarks/rivals/run.py                            # 20, 100, 500 Mbit/s with 10 and 80 ms
    python benchmarks/rivals/run.py --mbit 100 --rtt 80 --rivals ddp,post-local:period=4,auto --task cifarnet

Every rival trains the same model from the same weights on the same batches, on two emulated hosts with one link between
them (tasks.py). The benchmark needs network namespaces and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rivals import emulated_run, weightgrad_run
from rivals.outcome import Outcome, Trace, evaluate, mean_step
from rivals.report import LATE, Found, document
from rivals.spec import OWN, Spec
from rivals.tasks import SITES, TASKS, Link, Task
from tables import Options, output_directory, publish

from weightgrad.errors import NamespacesRefusedError, WeightGradError
from weightgrad.lab.emulate.choose import open_wan
from weightgrad.lab.emulate.network import Network
from weightgrad.lab.emulate.stats import Verdict
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.task import Training

RIVALS = "alone,ddp,ddp-fp16,ddp-powersgd,post-local,torchft,hivemind,weightgrad,auto"
QUICK_STEPS = 24


def network(link: Link) -> Network:
    """An emulated network of namespaces. Gloo cannot use the relays of a modelled network.

    Raises:
        NamespacesRefusedError: This machine does not allow network namespaces.
    """
    wan = open_wan(SITES, [link.wan_link()])
    if wan.describe()["kind"] == "modelled":
        wan.close()
        raise NamespacesRefusedError(f"rivals need hosts of their own, and this machine has none: {wan.reason}")
    return wan


def checked(link: Link) -> tuple[Verdict, str]:
    """Whether the emulator can carry this link, and what it measured."""
    with network(link) as wan:
        said = "; ".join(str(one) for one in wan.check())
        return wan.verdict(), said


def run_cell(spec: Spec, task: Task, steps: int, link: Link, out: Path, before: Verdict) -> Outcome:
    """Run one rival over one link, on a new network."""
    recipe = task.recipe(link, steps, spec.name if spec.name in OWN else "baseline")
    shutil.rmtree(out, ignore_errors=True)
    with network(link) as wan:
        timeout = _timeout(recipe, link)
        if spec.name in OWN:
            trace = weightgrad_run.run(recipe, out, wan, timeout)
        else:
            trace = emulated_run.run(spec, recipe, out, wan, timeout)
        verdict = wan.verdict()
    verdict = _verdict(before, verdict, trace)
    curve, accuracy = evaluate(recipe, trace)
    return Outcome(
        rival=spec.text,
        mbit_s=link.mbit_s,
        rtt_ms=link.rtt_ms,
        steps=steps,
        step_seconds=mean_step(trace.ends),
        step_bytes=trace.link_bytes / steps,
        seconds=trace.finished,
        accuracy=accuracy,
        curve=curve,
        late=trace.late,
        trusted=verdict.trusted,
        verdict=verdict.reason,
        notes=trace.notes,
    )


def _verdict(before: Verdict, after: Verdict, trace: Trace) -> Verdict:
    if not before.trusted:
        return before
    if after.trusted and trace.late > LATE:
        return Verdict(False, f"{trace.late:.0%} of the passes took longer than they should: too much for this machine")
    return after


def _timeout(recipe: Recipe, link: Link) -> float:
    """Four times what DDP would need, and three minutes to start on a busy machine, in seconds."""
    bits = 32 * Training(recipe).layout.numel
    step = float(recipe.compute.seconds_per_step) + 2 * bits / (link.mbit_s * 1e6) + 8 * link.rtt_ms / 1e3
    return 180 + 4 * recipe.training.steps * step


def run(specs: list[Spec], task: Task, steps: int, links: list[Link], out: Path) -> Found:
    """Run every rival over every link and print each result. Failures are in the table too."""
    parameters = Training(task.recipe(links[0], steps)).layout.numel
    found = Found(task, steps, links, [spec.text for spec in specs], parameters, versions=emulated_run.versions(specs))
    for link in links:
        before, found.checks[link] = checked(link)
        print(f"{link}: {found.checks[link]}", file=sys.stderr, flush=True)
        for spec in specs:
            began, why = time.monotonic(), emulated_run.refusal(spec)
            if why is None:
                place = out / f"{link.mbit_s:g}-{link.rtt_ms:g}" / spec.text.replace(":", "-")
                try:
                    one = run_cell(spec, task, steps, link, place, before)
                except Exception as error:  # the other cells still run
                    why = f"failed: {type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")
                else:
                    found.outcomes.append(one)
                    said = f"{1e3 * one.step_seconds:.1f} ms a step, {one.step_bytes / 1e3:.1f} kB a step"
                    print(
                        f"  {spec.text}: {said}, accuracy {100 * one.accuracy:.2f} %, "
                        f"{'' if one.trusted else 'NOT '}trusted ({time.monotonic() - began:.0f} s)",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
            if why is not None:
                found.missing[spec.text, link] = why
                print(f"  {spec.text}: {why}", file=sys.stderr, flush=True)
    return found


def numbers(text: str) -> list[float]:
    """Parse positive numbers with commas between them."""
    found = [float(one) for one in text.split(",")]
    if not found or min(found) <= 0:
        raise ValueError
    return found


def rivals(text: str) -> list[Spec]:
    """Parse rivals with commas between them, each with optional settings."""
    try:
        return [Spec.parse(one) for one in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    """Parse the command line, run, and write the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one link, digits, to see that it works")
    parser.add_argument("--mbit", type=numbers, help="bandwidths [20,100,500; quick: 100]")
    parser.add_argument("--rtt", type=numbers, help="round trips in ms [10,80; quick: 10]")
    parser.add_argument("--rivals", type=rivals, default=rivals(RIVALS), help=f"with settings if need be [{RIVALS}]")
    parser.add_argument("--task", choices=TASKS, help="what is trained [fashion; quick: digits]")
    parser.add_argument("--steps", type=int, help=f"of each run [the task's; quick: {QUICK_STEPS}]")
    parser.add_argument("--out", type=Path, help="where the result goes [benchmarks/results; quick: runs/rivals-quick]")
    given = parser.parse_args()
    out = output_directory(parser, given, Path("runs/rivals-quick"))
    task = TASKS[given.task or ("digits" if given.quick else "fashion")]
    steps = given.steps or (QUICK_STEPS if given.quick else task.steps)
    mbits, rtts = given.mbit or ([100.0] if given.quick else [20.0, 100.0, 500.0]), given.rtt or [10.0, 80.0]
    links = [Link(mbit, rtt) for mbit in mbits for rtt in (rtts[:1] if given.quick and not given.rtt else rtts)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that networks are closed
    torch.set_num_threads(1)
    runs = out / "runs" if given.quick or given.out else Path("runs/rivals")
    options = Options(
        name="rivals",
        command=shlex.join(["python", "benchmarks/rivals/run.py", *sys.argv[1:]]),
        quick=given.quick,
        out=out,
        runs=runs,
    )
    try:
        found = run(given.rivals, task, steps, links, runs)
    except WeightGradError as error:
        parser.error(str(error))
    publish(document(found), options)


if __name__ == "__main__":
    main()
