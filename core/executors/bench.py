"""One started engine of ``executor=torch``, measured round by round, and the machine that its steps describe.

``python -m core.calibrate`` runs the rounds one after the other; ``benchmarks.validate_sim`` runs them between the real
runs that it compares with, because a shared machine is not equally fast all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from core.arithmetic import Machine, Shape
from core.cache import available_memory
from core.calibrate import ROWS, plan, rows_alone
from core.engine import Engine
from core.executors.calibration import split_link
from core.executors.measure import Stepper, host_seconds, matmul_rate, read_bandwidth
from core.fit import Point, curves, errors, fit
from core.machines import FORMAT, Company, machine_name, write_json
from core.shapes import shape_from_config
from core.types import ConfigError

Say = Callable[[str], None]


class Bench:
    """Memory, matrix products and link are measured at once, the steps by ``round``; ``write`` fits and keeps the result.

    ConfigError for an executor that runs nothing, or a model that cannot be described.
    """

    def __init__(self, engine: Engine, say: Say):
        self.engine, self.say, self._company = engine, say, Company()
        executor: Any = engine.executor
        self.described = executor.describe()
        if self.described.get("executor") != "torch":
            raise ConfigError("core.calibrate measures executor=torch; the other executors run nothing")
        loaded = executor._need_model()
        self.shape: Shape = shape_from_config(loaded.model.config.to_dict(), loaded.info.name, loaded.info.dtype)
        device, limits = executor._device, engine.limits
        self._machine = self._rates(executor, device)
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_memory()
        self._machine = attrs.evolve(self._machine, memory_gb=memory / 1e9)
        self._block_bytes = limits.block_size * executor._shape.token_bytes
        rows, sampled = rows_alone(limits)
        alone = [[(0, n)] for n in rows] + [[(0, 1)] * n for n in sampled if n > 1]
        self._steps = Stepper(engine, alone, plan(limits.max_model_len, limits.num_blocks * limits.block_size))
        say("steps of the model, with and without attention")

    def _rates(self, executor: Any, device: torch.device) -> Machine:
        shape, dtype = self.shape, getattr(torch, self.shape.dtype)
        self.say("reading memory")
        bandwidth = read_bandwidth(device)
        self.say("multiplying matrices at the model's shapes")
        width, inner = shape.num_heads * shape.head_dim, shape.intermediate_size
        shapes = [(shape.hidden_size, width), (shape.hidden_size, inner), (inner, shape.hidden_size)]
        peak = matmul_rate(shapes, ROWS[-1], dtype, device)
        self.say("copying KV blocks to the host pool and back")
        link, move_s = split_link(executor._shape, self.engine.limits.block_size, executor._layout, device)
        return Machine(
            name=machine_name(),
            memory_gb=1.0,
            bandwidth_bytes_per_s=bandwidth,
            flop_per_s=peak,
            link_bytes_per_s=link,
            move_overhead_s=move_s,
        )

    def round(self, counts: bool = True) -> None:
        """Every kind of step once; the first round of a bench should not count."""
        self._steps.round(counts)

    def machine(self) -> tuple[Machine, list[Point]]:
        """What fits the rounds so far, and the steps it was fitted to, the engine's own time in both."""
        shape, rates = self.shape, self._machine
        alone, points = self._steps.points()
        linear, head = curves(shape, alone)
        seen = max(rate * shape.dtype_bytes / 2 / rows for rows, rate in linear)  # weights read once, whatever the rows
        best = max(rate for _, rate in linear)
        fitted = fit(
            shape,
            attrs.evolve(
                rates,
                bandwidth_bytes_per_s=max(
                    rates.bandwidth_bytes_per_s, seen
                ),  # what the model itself reached can be had
                flop_per_s=max(rates.flop_per_s, best),
                prefill_efficiency=best / max(rates.flop_per_s, best),
                linear_curve=linear,
                head_curve=head,
            ),
            points,
        )
        self.say("the engine's own time beside the model's")
        few, many = (host_seconds(self.engine, n, 10) for n in (1, 16))
        a_sequence = max(0.0, (many - few) / 15)
        a_step = max(0.0, few - a_sequence)
        own = attrs.evolve(
            fitted,
            step_overhead_s=fitted.step_overhead_s + a_step,
            sequence_overhead_s=fitted.sequence_overhead_s + a_sequence,
        )
        return own, [attrs.evolve(p, seconds=p.seconds + a_step + a_sequence * p.work.sequences) for p in points]

    def write(self, path: Path) -> None:
        """Fit, and keep the machine with its set-up as ``core.machines.read_calibration`` reads it."""
        machine, points = self.machine()
        setup = {
            name: self.described.get(name) for name in ("dtype", "device", "kernels", "linears", "threads", "torch")
        }
        setup |= {"model": self.shape.name, "block_bytes": self._block_bytes, "others": self._company.share()}
        setup |= {"read_bytes_per_s": self._machine.bandwidth_bytes_per_s, "measured": time.strftime("%Y-%m-%d %H:%M")}
        found = errors(self.shape, machine, points)
        write_json(path, {"format": FORMAT, "machine": attrs.asdict(machine), "setup": setup, "fit": found})
