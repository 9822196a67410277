"""The second world the core runs in: real processes on one machine, joined by links that are as far as one likes."""

from weightgrad.emulate.check import LinkCheck
from weightgrad.emulate.choose import open_wan
from weightgrad.emulate.modelled import ModelledWan
from weightgrad.emulate.network import Host, Network
from weightgrad.emulate.stats import Lateness, PairStats, Verdict, WanStats
from weightgrad.emulate.topology import WanLink
from weightgrad.emulate.wan import Wan

__all__ = [
    "Host",
    "Lateness",
    "LinkCheck",
    "ModelledWan",
    "Network",
    "PairStats",
    "Verdict",
    "Wan",
    "WanLink",
    "WanStats",
    "open_wan",
]
