#!/usr/bin/env bash
# Everything worth knowing from a GPU in one run of at most 6 minutes:   benchmarks/gpu.sh [OUT.json]
# Needs torch 2.11 or later with CUDA, its Triton (3.6 or later), transformers, numpy, pluggy, attrs, rich and
# prometheus-client; neither Hydra, FastAPI nor the network, and not an installed Quire. Says what is missing before it
# starts anything. The JSON is written after each section, so that what was measured before a failure is kept.
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu.json}
python=${PYTHON:-python3}
"$python" - <<'CHECK' || exit 2
import importlib.util, sys
missing = [name for name in ("torch", "triton", "transformers", "numpy", "pluggy", "attrs", "rich", "prometheus_client", "tokenizers")
           if importlib.util.find_spec("attr" if name == "attrs" else name) is None]
if missing:
    sys.exit("missing packages: " + ", ".join(missing))
import torch
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU here; python benchmarks/gpu.py --dry runs on a CPU")
CHECK
export QUIRE_CACHE=${QUIRE_CACHE:-$(mktemp -d)}
timeout 360 "$python" -W ignore benchmarks/gpu.py --out "$out" --seconds 320
