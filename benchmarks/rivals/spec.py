"""Which rival, and with which settings: `post-local:period=8+start=10`."""

from __future__ import annotations

from dataclasses import dataclass, field

ALONE = "alone"  # no rival: the same loop without an exchange
GLOO = ("ddp", "ddp-fp16", "ddp-powersgd", "post-local")
INSTALLED = ("torchft", "hivemind")  # in environments of their own, see install.sh
OWN = ("weightgrad", "auto")
RIVALS = (ALONE, *GLOO, *INSTALLED, *OWN)

SETTINGS = {
    "alone": "the same loop without an exchange, which shows the step time over a WAN that costs nothing.",
    "ddp": "DistributedDataParallel over Gloo, float32, buckets of 25 MB as by default.",
    "ddp-fp16": "the same with fp16_compress_hook.",
    "ddp-powersgd": "the same with powerSGD_hook, rank 4, from step 10 on, error feedback and warm start.",
    "post-local": "PostLocalSGDOptimizer: DDP for 10 steps, then models averaged every 16 steps and at the end.",
    "torchft": "torchft's DiLoCo over its ProcessGroupGloo: every 20 steps, outer Nesterov at 0.7, momentum 0.5.",
    "hivemind": "hivemind.Optimizer with local updates: averages every 20 steps in the background, 16-bit floats.",
    "weightgrad": "`weightgrad serve` and `train` with the strategy of that name; no site is ever given up.",
    "auto": "the same with the strategy `auto`, without settings.",
}


@dataclass(frozen=True)
class Spec:
    """A rival and its settings, as given on the command line."""

    text: str
    name: str
    options: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> Spec:
        """Parse the text of a rival.

        Raises:
            ValueError: The text is wrong; the message says what is allowed.
        """
        name, _, rest = text.partition(":")
        pairs = [one.partition("=") for one in rest.split("+") if one]
        if name not in RIVALS:
            raise ValueError(f"no rival {name!r}; there are {', '.join(RIVALS)}")
        if name in OWN and pairs:
            raise ValueError(
                f"{text!r}: {name} takes no settings here; change its preset in weightgrad/core/strategies/presets.py"
            )
        if wrong := [key for key, sign, _ in pairs if not sign]:
            raise ValueError(f"{text!r}: {wrong[0]!r} has no value; write e.g. post-local:period=8+start=10")
        return Spec(text, name, {key: value for key, _, value in pairs})
