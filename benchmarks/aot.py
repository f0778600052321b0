"""Compiles the Triton kernels ahead of time, without a GPU, and checks what only a compiler knows.

    python benchmarks/aot.py [--targets sm_80 sm_90 gfx942] [--python OTHER/bin/python] [--json FILE]

For each kernel and case: registers, spills, shared memory, and whether the products became matrix instructions. Limits:
no spills, at most 48 KB of shared memory a program (three of them fit a multiprocessor of 164 KB), a matrix instruction
wherever ``tl.dot`` is written for a 16-bit type. ``--python`` compiles with another interpreter's Triton, which needs
nothing else installed. Takes about a second a case. The last line is ``failures: N``; the exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SHARED_LIMIT = 48 * 1024
KERNELS = ROOT / "plugins" / "kernels" / "triton_attention.py"
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
INT_POINTERS = {"work", "starts", "kv_lens", "slots", "tables", "pairs", "source", "destination"}
FLOAT_POINTERS = {"part_acc", "part_peak", "part_total", "k_scales", "v_scales"}
MODEL_POINTERS = {"q", "k", "v", "out"}
FLOATS = {"scale", "soft_cap"}
WIDE = {"block_stride", "source_block", "source_piece", "target_block", "target_piece"}  # may exceed 2**31
ODD = {"num_seqs", "window", "num_words"}  # not known to be multiples of 16

ONES = {"num_seqs": 1, "window": 1, "table_stride": 1}  # the launcher makes an argument of 1 a constant

# name -> dtype, KV dtype, head_dim, heads a key head, key heads, new tokens, window, soft cap
CASES: dict[str, tuple[str, str, int, int, int, int, bool, bool]] = {
    "SmolLM2 decode": ("bfloat16", "bfloat16", 64, 3, 3, 1, False, False),
    "SmolLM2 chunks": ("bfloat16", "bfloat16", 64, 3, 3, 512, False, False),
    "one sequence, decode": ("bfloat16", "bfloat16", 64, 3, 3, 1, True, False),
    "one sequence, chunk": ("bfloat16", "bfloat16", 64, 3, 3, 512, True, False),
    "SmolLM2 short chunks": ("bfloat16", "bfloat16", 64, 3, 3, 4, False, False),
    "7B decode": ("float16", "float16", 128, 4, 8, 1, False, False),
    "7B chunks": ("float16", "float16", 128, 4, 8, 512, False, False),
    "D 256 decode, window, cap": ("bfloat16", "bfloat16", 256, 2, 4, 1, True, True),
    "D 256 chunks, window, cap": ("bfloat16", "bfloat16", 256, 2, 4, 512, True, True),
    "D 80 chunks": ("float16", "float16", 80, 1, 32, 512, False, False),
    "float32 D 64 decode": ("float32", "float32", 64, 3, 3, 1, False, False),
    "float32 D 128 chunks": ("float32", "float32", 128, 4, 8, 512, False, False),
    "float32 D 256 chunks": ("float32", "float32", 256, 4, 8, 512, False, True),
    "float32 D 128, int8 KV decode": ("float32", "int8", 128, 8, 8, 1, False, False),
    "float32 D 256 decode": ("float32", "float32", 256, 4, 8, 1, False, False),
    "int8 KV decode": ("bfloat16", "int8", 128, 4, 8, 1, False, False),
    "int8 KV chunks": ("bfloat16", "int8", 128, 4, 8, 512, False, False),
    "e4m3 KV decode": ("bfloat16", "float8_e4m3fn", 128, 4, 8, 1, False, False),
    "e4m3 KV chunks": ("bfloat16", "float8_e4m3fn", 128, 4, 8, 512, False, False),
}


def jobs_of(name: str, target: str) -> list[dict[str, Any]]:
    """The launches of one case, with the sizes that the kernel would choose on this target."""
    sys.path.insert(0, str(ROOT))
    from plugins.kernels.triton import choose_sizes, power_of_two

    dtype, kv_dtype, dim, group, kv_heads, new, window, cap = CASES[name]
    kinds = {"float32": 0, "float16": 0, "bfloat16": 0, "int8": 1, "float8_e4m3fn": 2}
    size = choose_sizes(group * new, dim, ITEM[dtype], ITEM[kv_dtype], new == 1, amd=target.startswith("gfx"))
    shape = {
        "KV_HEADS": kv_heads,
        "D": dim,
        "D_PAD": max(16, power_of_two(dim)),
        "S": 16,
        "FORMAT": kinds[kv_dtype],
    }
    switches = {"GROUP": group, "WINDOW": window, "CAP": cap, "UPCAST": False, "ROWS": size.rows, "TILE": size.tile}
    cut = {"TILE": size.tile, "PIECE": size.piece, "PIECES": size.pieces, "WINDOW": window}
    pair = {"case": name, "target": target, "dtype": dtype, "kv_dtype": kv_dtype}
    launch = {"num_warps": size.warps, "num_stages": size.stages}
    default = {"num_warps": 4, "num_stages": 3}
    if new == 1:
        return [
            pair | {"kernel": "attend_one", "options": launch, "constants": shape | switches | cut | {"WRITE": True}},
            pair | {"kernel": "plan_pieces", "options": default, "constants": cut | {"BLOCK": 32}},
            pair
            | {
                "kernel": "merge_pieces",
                "options": default,
                "constants": cut | {"HEADS": kv_heads * group, "D": dim, "D_PAD": shape["D_PAD"]},
            },
        ]
    return [
        pair
        | {
            "kernel": "attend_chunks",
            "options": launch,
            "constants": shape | switches | {"QUERIES": size.rows // group},
        },
        pair | {"kernel": "write_kv", "options": default, "constants": shape | {"KV_PAD": power_of_two(kv_heads)}},
        pair | {"kernel": "copy_pieces", "options": default, "constants": {"WORDS": 1024}},
    ]


# ------------------------------------------------------------------------------------------------ the worker


def compile_one(module: Any, job: dict[str, Any], target: str) -> dict[str, Any]:
    """Compile one launch: numbers and what is wrong with them. Needs Triton alone."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(module, job["kernel"])
    if job["case"].startswith("one sequence"):
        ones = {name: value for name, value in ONES.items() if name in kernel.arg_names}
        job = job | {"constants": job["constants"] | ones}
    stored = "i8" if job["kv_dtype"] in ("int8", "float8_e4m3fn") else TYPES[job["kv_dtype"]]
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in job["constants"]:
            signature[name] = "constexpr"
        elif name in ("k_cache", "v_cache"):
            signature[name] = f"*{stored}"
        elif name in INT_POINTERS | FLOAT_POINTERS | MODEL_POINTERS:
            of = "i32" if name in INT_POINTERS else "fp32" if name in FLOAT_POINTERS else TYPES[job["dtype"]]
            signature[name] = f"*{of}"
        else:
            signature[name] = "fp32" if name in FLOATS else "i64" if name in WIDE else "i32"
        if name not in job["constants"] and name not in FLOATS | ODD:
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=job["constants"], attrs=aligned)
    built = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=job["options"])
    found = {"shared": built.metadata.shared} | (
        _nvidia(built.asm["ptx"], TARGETS[target][1]) if target.startswith("sm_") else _amd(built.asm["amdgcn"])
    )
    wrong = []
    if found["spills"]:
        wrong.append(f"{found['spills']} bytes of spills")
    if found["shared"] > SHARED_LIMIT:
        wrong.append(f"{found['shared']} bytes of shared memory, over {SHARED_LIMIT}")
    if job["kernel"].startswith("attend") and job["dtype"] != "float32" and not found["matrix"]:
        wrong.append("no matrix instruction")
    return found | {"wrong": wrong}


def _nvidia(ptx: str, arch: int) -> dict[str, Any]:
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(arch)}",
            str(path),
            "-o",
            f"{path}.o",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stdout + said.stderr
    return {
        "registers": max(int(number) for number in re.findall(r"Used (\d+) registers", text)),
        "spills": sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", text)),
        "matrix": len(re.findall(r"^\s*(?:@\S+\s+)?(?:mma\.sync|wgmma\.mma_async)", ptx, re.M)),
        "async": len(re.findall(r"cp\.async\.c", ptx)),
    }


def _amd(text: str) -> dict[str, Any]:
    def value(name: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{name}:\s+(\d+)", text))

    return {
        "registers": value("vgpr_count"),
        "spills": 4 * value("vgpr_spill_count"),
        "matrix": len(re.findall(r"^\s*v_mfma", text, re.M)),
        "async": len(re.findall(r"global_load\S*lds", text)),
    }


def work(jobs: list[dict[str, Any]]) -> None:
    """One JSON line a launch."""
    import triton

    spec = importlib.util.spec_from_file_location("triton_attention", KERNELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for job in jobs:
        found = compile_one(module, job, job["target"])
        named = {"case": job["case"], "kernel": job["kernel"], "target": job["target"], "triton": triton.__version__}
        print(json.dumps(named | found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--python", default=sys.executable, help="an interpreter with Triton")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.load(sys.stdin))
        return 0
    jobs = [job for name in args.cases for target in args.targets for job in jobs_of(name, target)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.Popen(
            [args.python, "-W", "ignore", __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": cache},
        )
        assert done.stdin is not None and done.stdout is not None
        done.stdin.write(json.dumps(jobs))
        done.stdin.close()
        rows = []
        for line in done.stdout:
            row = json.loads(line)
            rows.append(row)
            print(
                f"{row['target']:7} {row['kernel']:14} {row['case']:26} registers {row['registers']:4} spills {row['spills']:4} "
                f"shared {row['shared']:6} matrix {row['matrix']:4} async {row['async']:3}  {'; '.join(row['wrong'])}",
                flush=True,
            )
        if done.wait():
            print(f"the compiler stopped with exit code {done.returncode}")
            return 1
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    failures = sum(bool(row["wrong"]) for row in rows)
    print(f"triton {rows[0]['triton']}: {len(rows)} launches compiled")
    print(f"failures: {failures}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
