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
        Policy(
            "executor",
            "roofline",
            "core.executors.roofline.RooflineExecutor",
            "a machine and a model by arithmetic, on a virtual clock, no torch",
        ),
        Policy("frontend", "http", "core.frontends.http.HttpFrontend", "OpenAI-compatible server"),
        Policy(
            "frontend", "replay", "core.frontends.replay.ReplayFrontend", "serve a workload, print and write a result"
        ),
        Policy("frontend", "batch", "core.frontends.batch.BatchFrontend", "answer a file of requests, resumable"),
        Policy("model", "smollm2", "core.sources.SmolLM2", "SmolLM2-135M-Instruct, fetched once"),
        Policy("model", "tiny", "core.sources.Tiny", "a small random model, nothing to download"),
        Policy("model", "path", "core.sources.Path", "a model folder of your own: model.path=FOLDER"),
        Policy("model", "llama2-7b", "core.shapes.Described", "described: Llama 2 7B, 32 KV heads"),
        Policy("model", "llama2-7b-gqa8", "core.shapes.Described", "described: the same with 8 KV heads"),
        Policy("model", "llama3-8b", "core.shapes.Described", "described: Llama 3.1 8B"),
        Policy("model", "llama3-70b", "core.shapes.Described", "described: Llama 3.1 70B over 4 cards"),
        Policy("allocator", "paged", "plugins.allocators.paged.PagedAllocator", "blocks on demand, one at a time"),
        Policy(
            "allocator",
            "naive",
            "plugins.allocators.naive.NaiveAllocator",
            "one run a sequence, forks copy, no sharing",
        ),
        Policy(
            "allocator",
            "prefix",
            "plugins.allocators.prefix.PrefixAllocator",
            "paged, shared across requests by content",
        ),
        Policy(
            "scheduler", "chunked", "plugins.schedulers.chunked.ChunkedScheduler", "running first, prompts in chunks"
        ),
        Policy(
            "preemption", "recompute", "plugins.preemption.recompute.Recompute", "drop the KV, compute it again later"
        ),
        Policy("preemption", "swap", "plugins.preemption.swap.Swap", "move the KV to host memory and back"),
        Policy("preemption", "breakeven", "plugins.preemption.breakeven.BreakEven", "whichever of the two is faster"),
        Policy("kernel", "torch", "plugins.kernels.torch.TorchKernel", "attention in plain PyTorch, every case"),
        Policy(
            "kernel", "cpu", "plugins.kernels.cpu.CpuKernel", "attention in C++ that reads the blocks in place, CPU"
        ),
        Policy("kernel", "triton", "plugins.kernels.triton.TritonKernel", "paged attention in Triton, on a GPU"),
        Policy("kernel", "auto", "plugins.kernels.torch.TorchKernel", "the first of kernel.order that takes the case"),
        Policy("linears", "torch", "plugins.kernels.linears_torch.TorchLinears", "the model's own linear layers"),
        Policy(
            "linears",
            "packed",
            "plugins.kernels.linears_fast.FastLinears",
            "fastest packed weights, fused decoder; CPU",
        ),
        Policy(
            "linears",
            "onednn",
            "plugins.kernels.linears_fast.FastLinears",
            "oneDNN's packed weights, fused decoder; CPU",
        ),
        Policy(
            "linears", "auto", "plugins.kernels.linears_torch.TorchLinears", "the first of linears.order that applies"
        ),
        Policy("workload", "mix", "core.workloads.mix.Mix", "several workloads at once, with labels"),
        Policy("workload", "synthetic", "core.workloads.synthetic.Synthetic", "made-up requests of given lengths"),
        Policy("workload", "chat", "core.workloads.published.Published", "chat with published lengths"),
        Policy("workload", "code", "core.workloads.published.Published", "code completion with published lengths"),
        Policy("workload", "long_context", "core.workloads.published.Published", "long documents, published lengths"),
        Policy("workload", "agent", "core.workloads.agent.Agent", "sessions of growing prompts and tool stalls"),
        Policy("workload", "fanout", "core.workloads.fanout.FanOut", "several answers to every prompt"),
        Policy("workload", "shared_prompt", "core.workloads.shared_prompt.SharedPrompt", "a common system prompt"),
        Policy("workload", "azure", "core.workloads.azure.AzureTrace", "an Azure LLM inference trace (CSV)"),
        Policy("workload", "mooncake", "core.workloads.mooncake.MooncakeTrace", "a Mooncake trace (JSON lines)"),
        Policy("workload", "burstgpt", "core.workloads.burstgpt.BurstGptTrace", "a BurstGPT trace (CSV)"),
        Policy("workload", "sharegpt", "core.workloads.sharegpt.ShareGpt", "ShareGPT conversations (JSON)"),
        Policy("workload", "prompts", "core.workloads.prompts.Prompts", "prompts of your own (JSON lines)"),
        Policy("machine", "h100", "core.arithmetic.Machine", "NVIDIA H100 SXM 80 GB, by its data sheet"),
        Policy("machine", "h200", "core.arithmetic.Machine", "NVIDIA H200 SXM 141 GB, by its data sheet"),
        Policy("machine", "a100", "core.arithmetic.Machine", "NVIDIA A100 SXM 80 GB, by its data sheet"),
        Policy("machine", "local", "core.machines.Local", "this machine, as python -m core.calibrate measured it"),
        Policy("observers", "recorder", "core.observers.recorder.Recorder", "every decision as JSON lines"),
        *_who_runs(),
    ]


def _who_runs() -> list[Policy]:
    """Schedulers beside the default, and the seams that they read."""
    return [
        Policy(
            "scheduler", "static", "plugins.schedulers.static.StaticScheduler", "a batch runs until its last one ends"
        ),
        Policy("scheduler", "fcfs", "plugins.schedulers.fcfs.FcfsScheduler", "whole prompts first, in arrival order"),
        Policy("scheduler", "priority", "plugins.schedulers.priority.PriorityScheduler", "the most important first"),
        Policy("scheduler", "sjf", "plugins.schedulers.sjf.SjfScheduler", "the shortest predicted work first"),
        Policy(
            "scheduler",
            "prefix_aware",
            "plugins.schedulers.prefix_aware.PrefixAwareScheduler",
            "the longest cached prefix first",
        ),
        Policy("scheduler", "fair", "plugins.schedulers.fair.FairScheduler", "the client served least first"),
        Policy("scheduler", "slo", "plugins.schedulers.slo.SloScheduler", "deadlines first, batches that meet TPOT"),
        Policy("predictor", "declared", "plugins.predictors.declared.Declared", "as long as the request allows"),
        Policy("predictor", "oracle", "plugins.predictors.oracle.Oracle", "as long as the workload recorded"),
        Policy("predictor", "quantile", "plugins.predictors.quantile.Quantile", "as long as recent answers were"),
        Policy("admission", "open", "plugins.admission.open.Open", "whoever waits is served"),
        Policy("admission", "deadline", "plugins.admission.deadline.Deadline", "what is late is refused or demoted"),
        Policy("idle", "keep", "plugins.idle.keep.Keep", "a stalled session keeps its KV on the device"),
        Policy("idle", "swap", "plugins.idle.swap.Swap", "a stalled session's KV moves to the host"),
        Policy("idle", "discard", "plugins.idle.discard.Discard", "a stalled session's KV is given back"),
        Policy("idle", "breakeven", "plugins.idle.breakeven.BreakEven", "keep, then whichever of the two is cheaper"),
    ]
