"""Which experts the rollout sent each token to, recorded while it samples, for the loss that asks.

    recorder = RouteRecorder(engine.instrument.routings)
    run = engine.generate(requests, observer=recorder)
    trajectories = recorder.added(trajectories, run)

Routing replay (R3) makes the trainer obey these choices. It is a comparison recipe: it hides a
router that disagrees, it does not align it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...kernels.errors import CapabilityError
from ...kernels.moe import Routing
from ..engines.base import Run
from ..engines.replay import ChoiceRecorder
from .records import Trajectory
from .trajectories import request_of


class RouteRecorder(ChoiceRecorder):
    """See the module. routings: of the model's routers; CapabilityError where it has none."""

    def __init__(self, routings: Mapping[str, Routing]) -> None:
        super().__init__()
        if not routings:
            raise CapabilityError(
                "routing replay needs a model with experts, and this one has no router; choose "
                "another loss"
            )
        self._routings = routings

    def added(self, trajectories: Sequence[Trajectory], run: Run) -> list[Trajectory]:
        """The trajectories with the choices of all their tokens, every earlier turn's included."""
        self.follow(run.executed)
        grown = [replace(each, routes=self._routes(each)) for each in trajectories]
        self.clear()
        return grown

    def _routes(self, trajectory: Trajectory) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The last token went through no layer, and nothing is scored from it: any choice does."""
        computed = self.forced(request_of(trajectory), len(trajectory.tokens) - 1)
        return {
            site: (*choices, tuple(range(self._routings[site].top_k)))
            for site, choices in computed.items()
        }
