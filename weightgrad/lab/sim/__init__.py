"""The simulator: the real core in one process, on virtual time, with modelled links and compute times."""

from weightgrad.lab.sim.plan import Fault, SimulationPlan, SiteSpec
from weightgrad.lab.sim.progress import Progress
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.lab.sim.task import Gradient, Score, Task

__all__ = ["Fault", "Gradient", "Progress", "Score", "SimulationPlan", "Simulator", "SiteSpec", "Task"]
