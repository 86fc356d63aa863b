"""A peer that trains serves its global state to those that join; which one is asked, the rendezvous decides."""

from __future__ import annotations

import logging

from diloco.global_model import GlobalModel
from diloco.link import Link
from diloco.state_file import packed

logger = logging.getLogger(__name__)


class StateServer:
    def __init__(self, link: Link, model: GlobalModel, peer: str) -> None:
        """`peer`: this one's name."""
        self._link, self._model, self._peer = link, model, peer
        self._damaged = ""
        """Hash of the global model that was found damaged last."""

    def serve(self, serial: int) -> None:
        """Copy the global state and upload the copy: training may go on at once. A damaged one is not served.

        `serial`: of the request, `Link.state_wanted` on all ranks.
        """
        model = self._model
        if model.hash == self._damaged or not model.intact:  # joiners ask again and again: it is read once
            self._damaged = model.hash
            problem = f"its global model was damaged in memory since outer step {model.outer_step}"
            logger.error("the state of peer %s is not served: %s", self._peer, problem)
            self._link.refuse_state(serial, problem)
            return
        body = packed(model.tensors(), {})
        header = self._link.header("state", body, model.outer_step, model.hash, serial=serial)
        logger.info("serving the global state of outer step %d (%.1f MB)", header.outer_step, len(body) / 1e6)
        self._link.serve_state(header, body)
