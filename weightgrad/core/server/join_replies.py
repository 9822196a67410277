"""What the global server replies to a site that joins: the way to the present global model.

A site that knows a version whose later results are all remembered is sent those. Any other site downloads the model.
Where only the sites can step with the gradients that they share, a download is the first global model and all results
since.
"""

from __future__ import annotations

from weightgrad.codecs import Fp32
from weightgrad.core.controller.gradient_controller import GradientController
from weightgrad.core.controller.update_controller import Controller
from weightgrad.core.server.membership import Member
from weightgrad.core.server.outbox import Download
from weightgrad.core.server.progress import ServerProgress
from weightgrad.core.server.result_headers import ResultHeaders
from weightgrad.errors import ProtocolError
from weightgrad.wire.messages import JoinReply, check_download_codec


class JoinReplies:
    """Makes the replies to sites that join.

    Args:
        progress: how far the server has come.
        results: the results that it remembers.
        controller: sets the sync schedule under `auto`; None where the strategy is fixed.
    """

    def __init__(
        self, progress: ServerProgress, results: ResultHeaders, controller: Controller | GradientController | None
    ) -> None:
        self._progress = progress
        self._results = results
        self._controller = controller

    def reply(
        self,
        member: Member,
        version: int,
        *,
        elsewhere: bool,
        download_codec: str | None = None,
        epoch: int | None = None,
        training: bool = False,
    ) -> Download:
        """The way of a site to the present global model: by the results it missed, or by a download.

        Args:
            member: the site, which is loading from then on if it is sent the exact model.
            version: of the global model that it has; -1 if it has none.
            elsewhere: whether only the sites can step with the gradients that they share.
            download_codec: the codec in which the site wants the model; None: exact.
            epoch: of the processes of the site that asked; None if they have not asked.
            training: whether the site trains while it loads.

        Raises:
            ProtocolError: the site needs a model that the server does not have.
        """
        progress = self._progress
        missed = self._results.since(version, progress.version)
        known = missed is not None or self._results.were_known(version)
        codec = None if known or download_codec is None else check_download_codec(download_codec)
        if isinstance(codec, Fp32) or elsewhere:
            codec = None  # it is exact: nothing has to be sent after it
        first = elsewhere and not known  # it is sent the first global model, and all results since
        results = self._results.from_first(progress.version) if first else missed
        if first and results is None:
            member.live = False  # nobody waits for it
            raise ProtocolError(
                f"{member.name} needs the global model of version {progress.version}, and the server does not have it: "
                "the sites step with an optimizer that the server cannot make, and it remembers too few of their "
                "gradients to begin with the first. Give the site the state of another one (Site.state_dict), or start "
                "the server with --optimizer MODULE:CLASS"
            )
        reply = JoinReply(
            version=0 if first else progress.version,
            round=progress.round + 1,
            step=progress.step,
            included=member.included_round,
            pushed=member.pushed_round,
            downloads=not known,
            approximate=codec is not None,
            schedule=None if known or self._controller is None else self._controller.now.schedule,
        )
        member.loading = not known and codec is None and not training
        member.loads = (epoch, reply.version) if member.loading and epoch is not None else None
        return Download(site=member.name, epoch=epoch, reply=reply, results=results or (), codec=codec)
