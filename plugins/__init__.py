"""The built-in options, one line each. Targets are strings: nothing is imported until an option is chosen."""

from __future__ import annotations

from core.hookspecs import hookimpl
from core.types import API_VERSION, Policy

quire_api_version = API_VERSION


@hookimpl
def provide_policies() -> list[Policy]:
    return [
        Policy(
            "executor", "torch", "core.executors.torch.TorchExecutor", "run a model with PyTorch, on a CPU or a GPU"
        ),
        Policy("executor", "toy", "core.executors.toy.ToyExecutor", "made-up tokens, no torch: tests and development"),
        Policy("frontend", "http", "core.frontends.http.HttpFrontend", "OpenAI-compatible server"),
        Policy(
            "frontend", "replay", "core.frontends.replay.ReplayFrontend", "serve a workload, print and write a result"
        ),
        Policy("model", "smollm2", "core.sources.SmolLM2", "SmolLM2-135M-Instruct, fetched once"),
        Policy("model", "tiny", "core.sources.Tiny", "a small random model, nothing to download"),
        Policy("model", "path", "core.sources.Path", "a model folder of your own: model.path=FOLDER"),
        Policy("allocator", "paged", "plugins.allocators.paged.PagedAllocator", "blocks on demand, one at a time"),
        Policy(
            "scheduler", "chunked", "plugins.schedulers.chunked.ChunkedScheduler", "running first, prompts in chunks"
        ),
        Policy(
            "preemption", "recompute", "plugins.preemption.recompute.Recompute", "drop the KV, compute it again later"
        ),
        Policy("preemption", "swap", "plugins.preemption.swap.Swap", "move the KV to host memory and back"),
        Policy("preemption", "breakeven", "plugins.preemption.breakeven.BreakEven", "whichever of the two is faster"),
        Policy("kernel", "torch", "plugins.kernels.torch.TorchKernel", "attention in plain PyTorch, every case"),
        Policy("kernel", "cpu", "plugins.kernels.cpu.CpuKernel", "attention in C++ that reads the blocks in place, CPU"),
        Policy("kernel", "triton", "plugins.kernels.triton.TritonKernel", "paged attention in Triton, on a GPU"),
        Policy("kernel", "auto", "plugins.kernels.torch.TorchKernel", "the first of kernel.order that takes the case"),
        Policy("linears", "torch", "plugins.kernels.linears_torch.TorchLinears", "the model's own linear layers"),
        Policy(
            "linears", "auto", "plugins.kernels.linears_torch.TorchLinears", "the first of linears.order that applies"
        ),
        Policy("workload", "synthetic", "core.workloads.synthetic.Synthetic", "made-up requests of given lengths"),
        Policy("observers", "recorder", "core.observers.recorder.Recorder", "every decision as JSON lines"),
    ]
