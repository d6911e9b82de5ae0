"""The self-tests of this box's devices: started with the worker, stored, and available to callers.

A slot is offered once its device is known to compute rightly, in one precision at least.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from core.hardware.selftest import Choice, Verdict, choose
from worker.gpus.selftest_runner import SelfTestDevice, Stopped, examine, remembered, untried

log = logging.getLogger("eft.worker")

AGAIN_SECONDS = 300.0
"""Until a device that could not be tried is tried again."""


class SelfTests:
    """What is known of each slot's device. `run` is a thread's; all else may be called from any thread."""

    def __init__(self, devices: Sequence[SelfTestDevice], node: str, cache: Path, seconds: float) -> None:
        """`seconds`: longest time of one part; 0: no self-test, every slot is offered as it is."""
        self.off = seconds <= 0
        self._devices = {device.slot: device for device in devices}
        self._node, self._cache, self._seconds = node, cache, seconds
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._verdicts: dict[str, Verdict] = {}
        if not self.off:
            for alike in self._alike():
                if (known := remembered(alike[0], node, cache)) is not None:
                    self._set(alike, known)

    def run(self, learned: Callable[[], None]) -> None:
        """Try what is not known yet, or could not be tried, cards side by side; `learned` after each."""
        threads = [
            threading.Thread(target=self._examine, args=(alike, learned), name=f"eft-selftest-{alike[0].slot}")
            for alike in self._alike()
            if not self.off and not self._known(alike[0].slot)
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in threads:
            thread.join()

    def keep(self, learned: Callable[[], None]) -> None:
        """`run`, and again now and then for what could not be tried: its memory was in use, the disk was full. Until
        all is known, or `stop`."""
        self.run(learned)
        while not all(map(self._known, self._devices)) and not self._stopped.wait(AGAIN_SECONDS):
            self.run(learned)

    def stop(self) -> None:
        """End what is being tried; nothing of it counts."""
        self._stopped.set()

    def _known(self, slot: str) -> bool:
        verdict = self.verdict(slot)
        return verdict is not None and verdict.fault is None

    @property
    def complete(self) -> bool:
        with self._lock:
            return self.off or len(self._verdicts) == len(self._devices)

    def verdict(self, slot: str) -> Verdict | None:
        with self._lock:
            return self._verdicts.get(slot)

    def choice(self, slot: str) -> Choice:
        return choose(self.verdict(slot))

    def offered(self, slot: str) -> bool:
        """Whether jobs may run there. Slots without a device of ours (preparing, previews) always are."""
        if self.off or slot not in self._devices:
            return True
        verdict = self.verdict(slot)
        return verdict is not None and verdict.refused is None

    def as_slot(self, slot: str) -> dict[str, object]:
        """What the node's row says of a slot's device."""
        if slot not in self._devices:
            return {}
        if self.off:
            return {"selftest": "off"}
        verdict = self.verdict(slot)
        if verdict is None:
            return {"selftest": "running", "quarantined": "its self-test is running; it is offered afterwards"}
        if verdict.refused is not None:
            return {"selftest": "refused", "quarantined": f"its self-test refuses it: {verdict.refused}"}
        return {"selftest": "passed" if verdict.ok else "fallbacks", "backends": dict(verdict.backends)}

    def notes(self) -> list[str]:
        """Everything that is not as it should be, in words."""
        if self.off:
            return ["the self-test is off (EFT_SELFTEST_SECONDS=0): devices are used untested"]
        with self._lock:
            verdicts = dict(self._verdicts)
        found = []
        for slot, verdict in verdicts.items():
            if verdict.refused is not None:
                found.append(f"slot {slot} is refused by its self-test: {verdict.refused}")
            found += [f"slot {slot}: {words}" for words in verdict.told if words != verdict.refused]
        return found

    def _alike(self) -> list[list[SelfTestDevice]]:
        """Slots on one device (those of a CPU) share its verdict."""
        found: dict[str, list[SelfTestDevice]] = {}
        for device in self._devices.values():
            found.setdefault(device.slot if device.gpu is not None else "cpu", []).append(device)
        return list(found.values())

    def _examine(self, alike: list[SelfTestDevice], learned: Callable[[], None]) -> None:
        device = alike[0]
        try:
            verdict = examine(device, self._node, self._cache, self._seconds, self._stopped)
        except Stopped:
            return
        except OSError as error:
            log.error("slot %s: its self-test could not run: %s", device.slot, error)
            verdict = untried(device, self._node, f"its self-test could not run: {error}")
        except Exception as error:  # a slot without any verdict would be lost
            log.exception("slot %s: its self-test could not run", device.slot)
            verdict = untried(device, self._node, f"its self-test has a defect: {type(error).__name__}: {error}")
        self._set(alike, verdict)
        log.log(
            logging.INFO if verdict.ok else logging.WARNING,
            "slot %s: self-test of %d parts in %.1f s: %s",
            device.slot, len(verdict.parts), verdict.seconds, verdict.refused or "; ".join(verdict.told) or "all right",
        )  # fmt: skip
        learned()

    def _set(self, alike: list[SelfTestDevice], verdict: Verdict) -> None:
        with self._lock:
            for device in alike:
                self._verdicts[device.slot] = verdict
