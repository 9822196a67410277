"""The first world the core runs in: virtual time, modelled links and compute, real everything else."""

from weightgrad.sim.plan import Fault, SitePlace, WorldPlan
from weightgrad.sim.task import Gradient, Score, Task
from weightgrad.sim.world import Progress, World

__all__ = ["Fault", "Gradient", "Progress", "Score", "SitePlace", "Task", "World", "WorldPlan"]
