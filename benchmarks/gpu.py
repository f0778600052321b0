"""Everything worth knowing from a GPU in one run; ``benchmarks/gpu.sh`` says how, and with which packages.

    python benchmarks/gpu.py --out gpu.json [--seconds 330] [--only SECTION ...] [--dry]

Sections, in this order: ``right`` (Triton kernels against the fp32 reference), ``bandwidth``, ``attention`` (decode, as a
share of copy bandwidth), ``step`` (a decode step with and without CUDA graphs), ``replay`` (the engine), ``sizes`` (other
tiles, stages and grids), ``chunks`` (prefill attention), ``swap``. The file is written after every one; a section that
fails says so and the next one runs; none starts after ``--seconds``. ``--dry`` runs all of them on a CPU, in Triton's
interpreter and with tiny sizes, to find what is broken before a GPU is there. The last line is ``failed: N``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
ORDER = ("right", "bandwidth", "attention", "step", "replay", "sizes", "chunks", "swap")
ABSENT = ("hydra", "omegaconf", "antlr4", "fastapi", "uvicorn")  # from the GPU machine; so from a dry run

RESULT: dict[str, Any] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    started = time.perf_counter()
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"
        for absent in ABSENT:
            sys.modules[absent] = None  # type: ignore[assignment]
    import numpy as np
    import torch
    import transformers
    import triton

    from benchmarks import gpu_attention, gpu_model

    sections = gpu_attention.SECTIONS | gpu_model.SECTIONS

    RESULT["machine"] = {
        "device": "cpu, interpreter" if args.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }

    def left() -> float:
        return args.seconds - (time.perf_counter() - started)

    failed = 0
    for name in ORDER:
        if args.only and name not in (*args.only, "bandwidth"):
            continue
        if left() < 0:
            RESULT[name] = "not run: out of time"
            continue
        begun = time.perf_counter()
        try:
            RESULT[name] = sections[name](left)
        except Exception as error:  # the next section may still tell something
            failed += 1
            RESULT[name] = {"error": str(error), "traceback": traceback.format_exc()}
        RESULT.setdefault("seconds", {})[name] = round(time.perf_counter() - begun, 1)
        print(f"{name} {RESULT['seconds'][name]} s: {json.dumps(RESULT[name])[:1500]}", flush=True)
        args.out.write_text(json.dumps(RESULT, indent=1) + "\n", encoding="utf-8")
    print(f"failed: {failed}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
