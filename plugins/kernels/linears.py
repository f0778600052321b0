"""Linear layers of a float32 model on a CPU in a form that multiplies fast, and which form is the fastest here.

``compact``: our own panels and loops in the fewest bits that lose nothing (``cpu_weights.h``): the 4 or 8 of a quantised
file, or bfloat16; what is computed is the same to the last bit. ``packed``: the same with floats, in 2 MB pages.
``onednn``: weights that oneDNN put in its own order once, which is what torch's compiler does when it freezes a model.
``torch``: the weight as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from core.hugepages import huge_empty
from plugins.kernels import cpu_build

ROWS = (1, 16)
"""Rows of the two products that are timed for each shape: a lone sequence, and a batch."""
OTHER_BYTES = 32 * 2**20
"""Read before each timed product: within a step, a layer's weights come from memory, not from a cache."""
CLOSE = 1.3
"""The first form that is within this factor of the fastest is taken: timings move by as much beside other processes, and a model
whose layers are all packed is one call, which is worth as much.
"""
FEWEST, MOST, BETTER = 3, 24, 0.9
"""Times that each form is timed: on until none has become faster by this factor in the last two turns."""


class Linear(Protocol):
    """One weight [N, K] with its bias [N] or None. ``nbytes``: of the weight as it is kept, which a product reads."""

    nbytes: int

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, K] @ weight.T + bias -> [T, N]; may use ``out`` [T, N] for it."""

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """total [T, N] += x [T, K] @ weight.T + bias."""


class Inexact(Exception):
    """A form that would not compute with exactly the weight's values."""


class TorchLinear:
    """The weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias, self.nbytes = weight, bias, weight.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        total += F.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """The weight in oneDNN's own order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias
        self.nbytes = weight.nbytes
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._run(x, self.weight, self.bias, "none", [], "")

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        total += self._run(x, self.weight, self.bias, "none", [], "")


class PackedLinear:
    """The weight in panels [N / P, K, P] of floats, as bytes [N / P, K * P * 4]; P depends on the instructions in use."""

    sizes: tuple[int, ...] = (32,)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        ops, (n, k) = torch.ops.quire_cpu, weight.shape
        for bits in self.sizes:
            if size := ops.panel_bytes(bits, k):
                panels = huge_empty((-(-n // ops.panel_width()), size), torch.uint8)
                if ops.pack(weight, panels):
                    break
        else:
            raise Inexact(f"the values of a weight [{n}, {k}] need all of their 32 bits")
        self.panels, self.bias, self.bits, self.nbytes = panels, bias, bits, panels.nbytes
        self._run = ops.linear.default

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._run(x, self.panels, self.bias, False, out)
        return out

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        self._run(x, self.panels, self.bias, True, total)


class CompactLinear(PackedLinear):
    """The same panels in the fewest bits that give back exactly the same floats. ``Inexact``: there are none such."""

    sizes = (4, 8, 16)


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Linear]] = {
    "compact": CompactLinear,
    "packed": PackedLinear,
    "onednn": OneDnnLinear,
    "torch": TorchLinear,
}


def available(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the named forms that can be had here, and why each of the others cannot."""
    can, cannot = [], []
    for name in names:
        try:
            if name in ("compact", "packed"):
                cpu_build.load()
            if name == "onednn":
                _try_onednn()
            can.append(name)
        except (cpu_build.Unavailable, RuntimeError, AttributeError) as error:
            cannot.append(f"{name} is not available: {(str(error).splitlines() or [type(error).__name__])[0]}")
    return can, cannot


def _try_onednn() -> None:
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError("this torch was built without oneDNN")
    weight = torch.eye(16)
    with torch.inference_mode():
        if not torch.equal(OneDnnLinear(weight, None)(weight, weight), weight):
            raise RuntimeError("oneDNN's prepacked product is wrong here")


class Chooser:
    """Times every form once for each shape [N, K] and remembers the first of the fastest; ``line`` tells."""

    def __init__(self, names: Sequence[str]):
        self.names = names
        self.chosen: dict[tuple[int, ...], str] = {}  # by shape, and by whether it has a compact form
        self._told: list[str] = []
        self._other = torch.arange(OTHER_BYTES // 4, dtype=torch.float32)  # some hosts keep equal pages once
        self.nbytes = self.nbytes_given = 0  # of all weights as they are kept, and as they came

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None, what: str) -> Linear:
        """The weight in the fastest form for its shape that keeps its values. One whose products differ by more than 1e-5
        is not taken.
        """
        compact = self._compact(weight, bias)
        key = (*weight.shape, compact is not None)
        if key in self.chosen:
            name = self.chosen[key]
            linear = compact if compact is not None and name == "compact" else FORMS[name](weight, bias)
        else:
            made = {} if compact is None else {"compact": compact}
            made |= {name: FORMS[name](weight, bias) for name in self.names if name != "compact"}
            self.chosen[key], linear = self._choose(made or {"torch": TorchLinear(weight, bias)}, weight, bias, what)
        self.nbytes, self.nbytes_given = self.nbytes + linear.nbytes, self.nbytes_given + weight.nbytes
        return linear

    def _compact(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        try:
            return FORMS["compact"](weight, bias) if "compact" in self.names else None
        except Inexact:
            return None

    def _choose(
        self, made: dict[str, Linear], weight: torch.Tensor, bias: torch.Tensor | None, what: str
    ) -> tuple[str, Linear]:
        seconds = dict.fromkeys(made, 0.0)
        for rows in ROWS:
            x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
            expected, out = F.linear(x, weight, bias), torch.empty(rows, len(weight))
            for name, linear in made.items():
                if not torch.allclose(linear(x, out), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())):
                    seconds[name] = float("inf")
            for name, best in self._time({name: partial(linear, x, out) for name, linear in made.items()}).items():
                seconds[name] += best
        times = " / ".join(f"{one} {seconds[one] * 1e3:.2f}" for one in seconds)
        least = min(seconds.values())
        if least == float("inf"):
            made, seconds, least = {"torch": TorchLinear(weight, bias)}, {"torch": 0.0}, 0.0
        name = next(name for name in made if seconds[name] <= least * CLOSE)
        taken = made[name]
        bits = f" of {taken.bits} bits" if isinstance(taken, CompactLinear) else ""
        self._told.append(f"{what} {name}{bits} ({times} ms)")
        return name, taken

    def _time(self, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """The fewest seconds of each, in turn, until that has settled."""
        best = dict.fromkeys(runs, float("inf"))
        settled = 0
        for turn in range(MOST):
            settled += 1
            for name, run in runs.items():
                self._other.sum()
                started = time.perf_counter()
                run()
                took = time.perf_counter() - started
                if took < best[name] * BETTER:
                    settled = 0
                best[name] = min(best[name], took)
            if turn + 1 >= FEWEST and settled >= 2:
                break
        return best

    @property
    def line(self) -> str:
        """What was chosen for which weights, with the times of 1 and 16 rows together, and the bytes of all."""
        size = f"{self.nbytes / 1e6:.0f} MB of weights"
        if self.nbytes < self.nbytes_given:
            size += f" instead of {self.nbytes_given / 1e6:.0f}, the same values"
        return ", ".join([*self._told, size])
