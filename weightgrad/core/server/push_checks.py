"""Checks of pushes at the global server: of their numbers when they come, of their values by the guard."""

from __future__ import annotations

import math
from collections.abc import Callable

from weightgrad.core.optimizers.options import problem_with
from weightgrad.core.server.guard import CREDIT, Guard, Weighed
from weightgrad.core.server.open_round import OpenRound
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.core.server.strategy import ServerStrategy
from weightgrad.errors import ProtocolError
from weightgrad.wire.messages import Push

_AHEAD_ALONE = 4096  # rounds that a site may count further than the server, where each push is a round of its own


class PushChecks:
    """What a push must pass before it counts.

    Args:
        plan: the server's parts of the strategy.
        guard: checks the values; None: nothing is refused because of them.

    Attributes:
        guard: checks the values.
        described: the numbers among the options of the optimizer of the run, where gradients are shared.
        torchs_own: whether it is one of torch's, which writes nothing among its options; any other may.
    """

    def __init__(self, plan: ServerStrategy, guard: Guard | None) -> None:
        self.guard = guard
        self.described: tuple[tuple[str, float], ...] = ()
        self.torchs_own = True
        self._plan = plan

    def check_numbers(self, push: Push, *, pushed: int, closed: int, most_rate: float) -> None:
        """Refuse a push with numbers that no site can have.

        Args:
            push: the push; its values are not looked at.
            pushed: the last round that its site has pushed for.
            closed: the last closed round.
            most_rate: the largest learning rate that a site may state.

        Raises:
            ProtocolError: a number is beyond what the consistency and the trigger allow.
        """
        plan, who = self._plan, f"{push.site} pushes for round {push.round}"
        limit = max(pushed, closed) + (_AHEAD_ALONE if plan.consistency.alone else plan.rounds_ahead)
        if not plan.consistency.alone:
            limit = min(limit, closed + plan.most_waiting)
        if push.round > limit:
            raise ProtocolError(
                f"{who}, and the server has closed round {closed}: with {plan.consistency.word} it cannot "
                f"be further than {limit}; restart the site from its checkpoint"
            )
        most = plan.steps_a_round * (max(push.round, closed + 1) + 1 + plan.rounds_ahead)
        if push.step > most:
            raise ProtocolError(
                f"{who} at step {push.step}; with at most {plan.steps_a_round:g} steps from one round to the next "
                f"it cannot be past step {most:g}; restart the site from its checkpoint"
            )
        if push.rate is not None and push.rate > most_rate:
            raise ProtocolError(
                f"{who} with a learning rate of {push.rate:g}; the server takes at most {most_rate:g}, a hundred "
                "times that of its recipe"
            )
        numbers, own = push.options, self.torchs_own
        if numbers and (why := problem_with(numbers, self.described, push.rate or 0.0, most_rate, own=own)):
            raise ProtocolError(f"{who} with {why}")

    def problem(self, push: Push, facts: PushFacts) -> str | None:
        """Why the guard refuses a push by itself, when it comes; None if it does not."""
        return None if self.guard is None else self.guard.problem(push, facts)

    def compare(
        self, closing: OpenRound, weight: Callable[[Push], float], rate: float | None, first_norm: float
    ) -> None:
        """Let the guard compare the pushes of a round that closes with each other and with what is usual.

        Args:
            closing: the round, which gets the verdict.
            weight: the weight that a push claims.
            rate: the learning rate to step with, where gradients are shared.
            first_norm: the norm of the first global model; a first push of that size is plausible.
        """
        if self.guard is None:
            return
        found = [
            Weighed(push, math.sqrt(closing.facts[push.site, push.round].squares), weight(push))
            for push in sorted(closing.pushes, key=lambda push: (push.site, push.round))
            if (push.site, push.round) not in closing.refused
        ]
        plausible = first_norm if rate is None else first_norm / rate if rate > 0 else math.inf
        credit = CREDIT["updates" if rate is None else "gradients"]
        closing.verdict = self.guard.judge(found, plausible, credit=credit)
        closing.refused |= closing.verdict.refused
