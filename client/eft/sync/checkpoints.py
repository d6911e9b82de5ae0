# Written by client/unasync.py from ../aio/checkpoints.py: change that one.
"""The checkpoints of a job: what there is, whether it is whole, and starting a job from one."""

from __future__ import annotations

from typing import Any

from eft.http import paths
from eft.sync.transport import Transport

Raw = dict[str, Any]


class Checkpoints:
    """`client.checkpoints`. A checkpoint is named by its id (`step-00000050@2`), by a number of steps, or `last`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self, job_id: str) -> list[Raw]:
        """Those that are complete, and those that were set aside, the furthest first."""
        data: list[Raw] = (self._transport.json("GET", f"{paths.job(job_id)}/checkpoints"))["data"]
        return data

    def verify(self, job_id: str, checkpoint: str = "last") -> Raw:
        """Have every file compared with the manifest: `whole`, and else `fault`."""
        verdict: Raw = self._transport.json("GET", f"{paths.checkpoint(job_id, checkpoint)}/verify")
        return verdict

    def delete(self, job_id: str, checkpoint: str) -> Raw:
        """Delete a checkpoint of a job that has ended."""
        answer: Raw = self._transport.json("DELETE", paths.checkpoint(job_id, checkpoint))
        return answer
