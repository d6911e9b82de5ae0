"""How long this process took to begin its answers, by route. In memory: each API process has its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from api.metrics.exposition import Family, Histogram

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Latencies:
    """Series are routes, not paths: as many as there are routes, whatever is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str, str], Histogram] = {}

    def note(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path_format", None)
        method = str(scope["method"])
        key = (method if route else "", route or "unmatched", f"{status // 100}xx")
        with self._lock:
            self._seen.setdefault(key, Histogram(BOUNDS)).observe(seconds)

    def family(self) -> Family:
        family = Family(
            "eft_http_request_duration_seconds",
            "histogram",
            "From a request to the beginning of its answer, by this API process",
        )
        with self._lock:
            for (method, route, status), histogram in sorted(self._seen.items()):
                family.add_histogram(histogram, method=method, route=route, status=status)
        return family
