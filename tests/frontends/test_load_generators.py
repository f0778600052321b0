"""Other people's load generators, with requests that they cut off: every figure of theirs fits what the server counted.

They need far more than Quire does, so each lives in an environment of its own, which a variable names; without it the test is skipped and
says how to get it. Their tokenizer is that of the default model, from its folder; nothing is fetched.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from core.fetch import is_complete, model_dir
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import TEXT, counters, spelled, wait_for

PINNED = {"guidellm": "0.8.1", "aiperf": "0.13.0"}
OUTPUT_TOKENS = 64

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def tool(name: str) -> str:
    """Its program in the pinned version, or a skip that says how to get it."""
    variable = f"QUIRE_{name.upper()}"
    path = os.environ.get(variable)
    if path is None:
        how = f"python -m venv X && X/bin/pip install {name}=={PINNED[name]}, then {variable}=X/bin/{name}"
        pytest.skip(f"{variable} names no {name}: {how}")
    if not is_complete(model_dir()):
        pytest.skip("the default model, whose tokenizer is used, is not here: python -m core.fetch")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=120).stdout
    assert PINNED[name] in said, f"{variable}: {said.strip()}, this test is for {PINNED[name]}"
    return path


def run(folder: Path, *words: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def ended(server: Server) -> dict[str, int]:
    """Requests by how they ended, once none is left; the server holds nothing."""
    wait_for(lambda: not server.engine.has_work(), 10)
    server.wait_idle()
    label = 'vllm:request_success_total{{finished_reason="{}",model_name="toy"}}'
    found = counters(server)
    return {reason: int(found[label.format(reason)]) for reason in ("length", "abort", "error", "refused", "stop")}


def slow_server() -> Any:
    """Ten milliseconds a step: long enough to be cut off in."""
    return serving(toy_engine(text=TEXT, delay_s=0.01, max_num_seqs=16, checks="cheap"))


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_with_requests_cut_off_by_the_clock(route: str, tmp_path: Path) -> None:
    """16 streams for 6 s, 24 at a server that runs 16: what had not ended then is cancelled, some of it in the queue."""
    program, out = tool("guidellm"), tmp_path / "out.json"
    with slow_server() as server:
        run(
            tmp_path, program, "run",
            "--backend", f"kind=openai_http,target={server.url},model=toy,request_format={route}",
            "--profile", "kind=concurrent,streams=24", "--constraint", "kind=max_duration,seconds=6",
            "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
            "--tokenizer", f"kind=huggingface_auto,model={model_dir()}",
            "--output", f"kind=json,path={out}", "--disable-console-interactive",
        )  # fmt: skip
        counted = ended(server)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    requests = benchmark["requests"]
    good, cut = requests["successful"], requests["incomplete"]
    print(
        f"{route}: {len(good)} finished, {len(cut)} cut off, {len(requests['errored'])} errors; the server: {counted}"
    )
    assert not requests["errored"] and counted["error"] == counted["refused"] == counted["stop"] == 0
    assert len(good) >= 50 and len(cut) >= 16
    assert all(each["output"] == spelled(OUTPUT_TOKENS) for each in good)
    assert all(spelled(OUTPUT_TOKENS).startswith((each["output"] or "").rstrip("\ufffd")) for each in cut)
    # one that ends just as the clock does may count on either side, and one may be cut off before it reached the server
    assert len(good) <= counted["length"] <= len(good) + len(cut)
    assert counted["abort"] <= len(cut) and sum(counted.values()) <= len(good) + len(cut)
    assert counted["abort"] >= len(cut) / 2


def test_aiperf_with_requests_cancelled_at_a_rate(tmp_path: Path) -> None:
    """40 % of 200 chats are cancelled 200 ms after they were sent."""
    program = tool("aiperf")
    with slow_server() as server:
        run(
            tmp_path, program, "profile", "-m", "toy", "--url", server.url, "--endpoint-type", "chat", "--streaming",
            "--concurrency", "24", "--request-count", "200", "--random-seed", "1", "--ui", "none",
            "--request-cancellation-rate", "40", "--request-cancellation-delay", "0.2",
            "--isl", "32", "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true",
            "--tokenizer", str(model_dir()), "--artifact-dir", str(tmp_path / "out"),
        )  # fmt: skip
        counted = ended(server)
    (path,) = (tmp_path / "out").rglob("profile_export.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    cut = [each for each in records if each["metadata"]["was_cancelled"]]
    failed = [each for each in records if each.get("error") and each not in cut]
    print(f"{len(records)} requests, {len(cut)} cancelled, {len(failed)} errors; the server: {counted}")
    assert len(records) == 200 and not failed
    assert 50 <= len(cut) <= 110
    assert counted["error"] == counted["refused"] == counted["stop"] == 0
    good = [each["metrics"] for each in records if each not in cut]
    assert counted["length"] == len(good) == 200 - len(cut)
    assert {each["usage_completion_tokens"]["value"] for each in good} == {OUTPUT_TOKENS}
    assert counted["abort"] <= len(cut)
