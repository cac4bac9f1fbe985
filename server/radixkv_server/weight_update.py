# SPDX-License-Identifier: Apache-2.0
"""WeightUpdate: an update of weights that comes in several requests, of which the last one applies it."""

from __future__ import annotations

from radixkv_server.errors import ApiError, bad_request


class WeightUpdate:
    """Parts of an update that have come so far; used on the event loop.

    Attributes:
        is_open: it was started and has not been finished.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._path: str | None = None

    def start(self) -> None:
        """Begin an update; one that was begun before and never finished is forgotten."""
        self.is_open, self._path = True, None

    def add(self, path: str) -> None:
        """Take the folder of its weights.

        Raises:
            ApiError: it has one already.
        """
        if self._path is not None:
            raise bad_request("This update has its folder already; finish it first.", param="update_info")
        self._path = path

    def finish(self) -> str:
        """End the update and return its folder.

        Raises:
            ApiError: none was started, or it has no folder: the earlier weights stay.
        """
        was_open, path, self.is_open, self._path = self.is_open, self._path, False, None
        if not was_open:
            raise ApiError(409, "No update was started: POST /start_weight_update.", code="no_weight_update")
        if path is None:
            raise bad_request(
                "The update has no weights: POST /update_weights comes first. The earlier ones serve.",
                code="weights_not_changed",
            )
        return path
