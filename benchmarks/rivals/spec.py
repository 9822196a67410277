"""Which rival, and with which settings: `post-local:period=8+start=10`."""

from __future__ import annotations

from dataclasses import dataclass, field

GLOO = ("ddp", "ddp-fp16", "ddp-powersgd", "post-local")
INSTALLED = ("torchft", "hivemind")  # in environments of their own, see install.sh
OWN = ("weightgrad", "auto")
RIVALS = (*GLOO, *INSTALLED, *OWN)


@dataclass(frozen=True)
class Spec:
    """A rival as the command line has it."""

    text: str
    name: str
    options: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> Spec:
        """Raises ValueError with what is allowed."""
        name, _, rest = text.partition(":")
        pairs = [one.partition("=") for one in rest.split("+") if one]
        if name not in RIVALS:
            raise ValueError(f"no rival {name!r}; there are {', '.join(RIVALS)}")
        if name in OWN and pairs:
            raise ValueError(f"{text!r}: {name} takes no settings here; change its row in wan/strategies.py")
        if wrong := [key for key, sign, _ in pairs if not sign]:
            raise ValueError(f"{text!r}: {wrong[0]!r} has no value; write e.g. post-local:period=8+start=10")
        return Spec(text, name, {key: value for key, _, value in pairs})
