"""The network emulator: real processes on one machine, joined by links with real bandwidth, delay, loss and cuts."""

from weightgrad.lab.emulate.check import LinkCheck
from weightgrad.lab.emulate.choose import open_wan
from weightgrad.lab.emulate.modelled import ModelledWan
from weightgrad.lab.emulate.network import Host, Network
from weightgrad.lab.emulate.stats import Lateness, PairStats, Verdict, WanStats
from weightgrad.lab.emulate.topology import WanLink
from weightgrad.lab.emulate.wan import Wan

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
