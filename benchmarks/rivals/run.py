"""PyTorch's DDP and its hooks, post-local SGD, torchft's DiLoCo and hivemind beside WeightGrad, over the same lines.

    benchmarks/rivals/install.sh                               # torchft and hivemind, once
    python benchmarks/rivals/run.py --quick                    # two minutes, one line, digits
    python benchmarks/rivals/run.py                            # 20, 100, 500 Mbit/s with 10 and 80 ms
    python benchmarks/rivals/run.py --mbit 100 --rtt 80 --rivals ddp,post-local:period=4,auto --task cifarnet

Every rival trains the same model from the same weights on the same batches in two emulated hosts joined by one
line (tasks.py). It needs namespaces, and the machine for itself.
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
from rivals import arena, own
from rivals.outcome import Outcome, Trace, judge, mean_step
from rivals.sheets import LATE, Found, document
from rivals.spec import OWN, Spec
from rivals.tasks import SITES, TASKS, Line, Task
from tables import RESULTS, Options

from weightgrad.emulate.choose import open_wan
from weightgrad.emulate.network import Network
from weightgrad.emulate.stats import Verdict
from weightgrad.errors import NamespacesRefusedError, WeightGradError
from weightgrad.train.recipe import Recipe
from weightgrad.train.task import Training

RIVALS = "alone,ddp,ddp-fp16,ddp-powersgd,post-local,torchft,hivemind,weightgrad,auto"
QUICK_STEPS = 24


def network(line: Line) -> Network:
    """Of namespaces: a relay for every link, as a modelled one has, is nothing that Gloo could be led through."""
    wan = open_wan(SITES, [line.link()])
    if wan.describe()["kind"] == "modelled":
        wan.close()
        raise NamespacesRefusedError(f"rivals need hosts of their own, and this machine has none: {wan.reason}")
    return wan


def checked(line: Line) -> tuple[Verdict, str]:
    """Whether the emulator can carry this line at all, and what it measured."""
    with network(line) as wan:
        said = "; ".join(str(one) for one in wan.check())
        return wan.verdict(), said


def run_cell(spec: Spec, task: Task, steps: int, line: Line, out: Path, before: Verdict) -> Outcome:
    """One rival over one line, on a network of its own."""
    recipe = task.recipe(line, steps, spec.name if spec.name in OWN else "baseline")
    shutil.rmtree(out, ignore_errors=True)
    with network(line) as wan:
        patience = _patience(recipe, line)
        if spec.name in OWN:
            trace = own.race(recipe, out, wan, patience)
        else:
            trace = arena.race(spec, recipe, out, wan, patience)
        verdict = wan.verdict()
    verdict = _verdict(before, verdict, trace)
    curve, accuracy = judge(recipe, trace)
    return Outcome(
        rival=spec.text,
        mbit_s=line.mbit_s,
        rtt_ms=line.rtt_ms,
        steps=steps,
        step_seconds=mean_step(trace.ends),
        step_bytes=trace.line_bytes / steps,
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


def _patience(recipe: Recipe, line: Line) -> float:
    """Four times what DDP would need, and three minutes to start on a busy machine."""
    bits = 32 * Training(recipe).layout.numel
    step = float(recipe.compute.seconds_per_step) + 2 * bits / (line.mbit_s * 1e6) + 8 * line.rtt_ms / 1e3
    return 180 + 4 * recipe.training.steps * step


def run(specs: list[Spec], task: Task, steps: int, lines: list[Line], out: Path) -> Found:
    """Every cell, told as it goes; what fails is in the table too."""
    parameters = Training(task.recipe(lines[0], steps)).layout.numel
    found = Found(task, steps, lines, [spec.text for spec in specs], parameters, versions=arena.versions(specs))
    for line in lines:
        before, found.checks[line] = checked(line)
        print(f"{line}: {found.checks[line]}", file=sys.stderr, flush=True)
        for spec in specs:
            began, why = time.monotonic(), arena.refusal(spec)
            if why is None:
                place = out / f"{line.mbit_s:g}-{line.rtt_ms:g}" / spec.text.replace(":", "-")
                try:
                    one = run_cell(spec, task, steps, line, place, before)
                except Exception as error:  # whatever it is, the other cells are wanted all the same
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
                found.missing[spec.text, line] = why
                print(f"  {spec.text}: {why}", file=sys.stderr, flush=True)
    return found


def numbers(text: str) -> list[float]:
    """Numbers with commas between them, above 0."""
    found = [float(one) for one in text.split(",")]
    if not found or min(found) <= 0:
        raise ValueError
    return found


def rivals(text: str) -> list[Spec]:
    """Names with commas between them, each with settings if need be."""
    try:
        return [Spec.parse(one) for one in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one line, digits; nothing to conclude from")
    parser.add_argument("--mbit", type=numbers, help="bandwidths [20,100,500; quick: 100]")
    parser.add_argument("--rtt", type=numbers, help="round trips in ms [10,80; quick: 10]")
    parser.add_argument("--rivals", type=rivals, default=rivals(RIVALS), help=f"with settings if need be [{RIVALS}]")
    parser.add_argument("--task", choices=TASKS, help="what is trained [fashion; quick: digits]")
    parser.add_argument("--steps", type=int, help=f"of each run [the task's; quick: {QUICK_STEPS}]")
    parser.add_argument("--out", type=Path, help="where the result goes [benchmarks/results; quick: runs/rivals-quick]")
    given = parser.parse_args()
    out = given.out or (Path("runs/rivals-quick") if given.quick else RESULTS)
    if given.quick and out.resolve() == RESULTS.resolve():
        parser.error("--quick is nothing to conclude from: it does not write to benchmarks/results")
    task = TASKS[given.task or ("digits" if given.quick else "fashion")]
    steps = given.steps or (QUICK_STEPS if given.quick else task.steps)
    mbits, rtts = given.mbit or ([100.0] if given.quick else [20.0, 100.0, 500.0]), given.rtt or [10.0, 80.0]
    lines = [Line(mbit, rtt) for mbit in mbits for rtt in (rtts[:1] if given.quick and not given.rtt else rtts)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that networks are closed
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
        found = run(given.rivals, task, steps, lines, runs)
    except WeightGradError as error:
        parser.error(str(error))
    paths = document(found).write(options)
    print(paths[0].read_text(encoding="utf-8"))
    print("Written: " + ", ".join(map(str, paths)), file=sys.stderr)


if __name__ == "__main__":
    main()
