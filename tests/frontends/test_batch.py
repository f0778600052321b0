"""frontend=batch: every line answered once, whatever happens to the process in between."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.frontends import batch
from core.frontends.batch import BatchFrontend
from core.types import ConfigError
from plugins.idle.keep import Keep
from tests.frontends.toys import serving, toy_engine
from tests.frontends.web import post

ROOT = Path(__file__).resolve().parents[2]


def line(custom_id: Any = "a", url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "toy", "prompt": "hi", "max_tokens": 4, **body},
    }


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    said = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": said}


def write(folder: Path, lines: list[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (folder / "out.jsonl").read_text().splitlines()]


def serve(
    folder: Path, lines: list[Any] | None = None, engine: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """One run; the engine must be empty afterwards. ``lines=None``: those of the run before."""
    if lines is not None:
        write(folder, lines)
    built = toy_engine(**(engine or {}))
    frontend = BatchFrontend(
        input=str(folder / "in.jsonl"), output=str(folder / "out.jsonl"), progress=False, **options
    )
    record = frontend.run(SimpleNamespace(engine=built, manifest={}))
    if built.failure is None:
        built.assert_idle()
    return record


def test_results_are_what_the_server_answers(tmp_path: Path) -> None:
    """The same bodies in OpenAI's envelope, n and several prompts and log probabilities included."""
    asked = [
        line("one", temperature=0.7, seed=5, n=3),
        line("two", prompt=["x", "yy"], logprobs=2, echo=True),
        chat("three", logprobs=True, top_logprobs=1, seed=1),
        line("four", response_format={"type": "json_object"}, max_tokens=12),
    ]
    assert serve(tmp_path, asked)["batch"] == {"lines": 4, "already_done": 0, "completed": 4, "failed": 0}
    found = {result["custom_id"]: result for result in read(tmp_path)}
    assert set(found) == {"one", "two", "three", "four"}
    with serving(toy_engine()) as server:
        for each in asked:
            result = found[each["custom_id"]]
            assert set(result) == {"id", "custom_id", "response", "error"}
            assert result["error"] is None
            assert result["response"]["status_code"] == 200
            body, answer = result["response"]["body"], post(server, each["url"], each["body"]).json()
            assert result["response"]["request_id"] == body["id"]
            for changing in ("id", "created"):
                del body[changing], answer[changing]
            assert body == answer
    assert len({result["id"] for result in found.values()}) == 4


def test_a_bad_request_is_its_own_result(tmp_path: Path) -> None:
    """The status and body a server would give; the good lines around it are answered."""
    asked = [line("good"), line("bad", temperature=9), line("stream", stream=True), line("long", max_tokens=10**6),
             line("model", model="gpt-x"), chat("chat", messages=[]), line("last")]  # fmt: skip
    assert serve(tmp_path, asked)["batch"] == {"lines": 7, "already_done": 0, "completed": 2, "failed": 5}
    found = {result["custom_id"]: result["response"] for result in read(tmp_path)}
    assert {name: one["status_code"] for name, one in found.items()} == {
        "good": 200, "bad": 400, "stream": 400, "long": 400, "model": 404, "chat": 400, "last": 200,
    }  # fmt: skip
    assert found["bad"]["body"]["error"]["param"] == "temperature"
    assert serve(tmp_path)["batch"]["already_done"] == 7


def test_a_line_that_is_no_request_is_reported_with_its_number(tmp_path: Path) -> None:
    """Also when it is not JSON; the numbers are those of the file, empty lines counted."""
    asked = ["{not json", "", line("a"), "[1]", line("a"), line(None), line("b", url="/v1/embeddings"),
             {**line("c"), "method": "GET"}, {**line("d"), "body": 5}, {**line("e"), "more": 1}, line("f")]  # fmt: skip
    counts = {"lines": 10, "already_done": 0, "completed": 2, "failed": 8}
    assert serve(tmp_path, asked)["batch"] == counts
    bad = {result["error"]["line"]: result for result in read(tmp_path) if result["error"]}
    assert {number: result["error"]["code"] for number, result in bad.items()} == {
        1: "invalid_json_line", 4: "invalid_json_line", 5: "duplicate_custom_id", 6: "invalid_custom_id",
        7: "invalid_url", 8: "invalid_method", 9: "invalid_body", 10: "unknown_field",
    }  # fmt: skip
    assert all(result["response"] is None for result in bad.values())
    assert bad[7]["custom_id"] == "b"
    assert [r["custom_id"] for r in read(tmp_path) if not r["error"]] == ["a", "f"]
    assert serve(tmp_path)["batch"] == {"lines": 10, "already_done": 10, "completed": 0, "failed": 0}
    assert len(read(tmp_path)) == 10


@pytest.mark.parametrize("length", [1990, 2000, 2001, 2002, 4001, 4002, 9000])
def test_a_line_that_is_too_long_is_reported_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """With its number, wherever the reader had stopped; the next line is the next line."""
    monkeypatch.setattr(batch, "MAX_LINE_BYTES", 2000)
    long = json.dumps(line("long", prompt=""))
    long = long.replace('"prompt": ""', '"prompt": "' + "x" * (length - len(long)) + '"')
    assert len(long) == length
    good = length < 2000
    assert serve(tmp_path, [line("a"), long, line("b"), "?"])["batch"]["completed"] == 2 + good
    bad = {result["error"]["line"]: result["error"]["code"] for result in read(tmp_path) if result["error"]}
    assert bad == ({4: "invalid_json_line"} if good else {2: "line_too_long", 4: "invalid_json_line"})


def test_a_model_name_may_be_anything_on_demand(tmp_path: Path) -> None:
    asked = [line("a", model="gpt-x"), line("b", model="mine")]
    record = serve(tmp_path, asked, accept_any_model=True, served_model_name="mine")
    assert record["batch"]["completed"] == 2
    assert {result["response"]["body"]["model"] for result in read(tmp_path)} == {"mine"}


def test_a_short_queue_makes_a_batch_wait_not_fail(tmp_path: Path) -> None:
    """``max_queue`` bounds what a batch has in flight; requests of several prompts included."""
    asked = [line(str(i), prompt=["x", "y", "z"]) for i in range(20)]
    assert serve(tmp_path, asked, engine={"max_queue": 2, "max_num_seqs": 2})["batch"]["completed"] == 20


def test_what_is_kept_for_sessions_ends_with_the_file(tmp_path: Path) -> None:
    """A turn may go on from the one before while the file is served; afterwards the engine holds nothing."""
    asked = [line(str(i), session_id="s", stall_s=60, prompt="x" * (40 + i)) for i in range(4)]
    assert serve(tmp_path, asked, engine={"idle": Keep()}, concurrency=1)["batch"]["completed"] == 4
    found = [result["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for result in read(tmp_path)]
    assert found == [0, 40, 41, 42]


def test_requests_are_in_flight_together_as_many_as_asked(tmp_path: Path) -> None:
    """One at a time takes as many steps as all the tokens; eight at a time far fewer."""
    steps = {}
    for concurrency in (1, 8):
        engine = toy_engine()
        write(tmp_path, [line(str(i), max_tokens=10) for i in range(16)])
        options = {
            "input": str(tmp_path / "in.jsonl"),
            "output": str(tmp_path / f"out{concurrency}"),
            "progress": False,
        }
        BatchFrontend(**options, concurrency=concurrency).run(SimpleNamespace(engine=engine, manifest={}))
        steps[concurrency] = engine.executor.num_steps
    assert steps[1] == 160
    assert steps[8] < 40


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("part", ["", '{"id": "batch_req_1", "custom', "\0\0\0\0"])
def test_a_torn_end_is_cut_off(tmp_path: Path, part: str) -> None:
    """What a kill left of a line is no result: its request is answered again, the others are not."""
    asked = [line(str(i)) for i in range(6)]
    serve(tmp_path, asked)
    out = tmp_path / "out.jsonl"
    kept = out.read_text().splitlines(keepends=True)[:4]
    out.write_text("".join(kept) + part)
    assert serve(tmp_path)["batch"] == {"lines": 6, "already_done": 4, "completed": 2, "failed": 0}
    assert out.read_text().startswith("".join(kept))
    assert sorted(result["custom_id"] for result in read(tmp_path)) == [str(i) for i in range(6)]


def test_a_killed_process_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL three times in the middle, then to the end: every line once, each as an unbroken run answers it."""
    asked = [line(f"r{i}", prompt=f"p{i}", seed=i, temperature=1.0, max_tokens=40 + i % 7) for i in range(300)]
    asked.insert(50, line("bad", top_p=3))
    path, out = write(tmp_path, [*asked[:100], "no json", *asked[100:]]), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "core.serve", "executor=toy", "frontend=batch", f"frontend.input={path}",
               f"frontend.output={out}", "frontend.concurrency=4", f"hydra.run.dir={tmp_path}/run"]  # fmt: skip
    sizes = [0]
    for _ in range(3):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while not out.exists() or out.stat().st_size <= sizes[-1] + 6000:
            assert process.poll() is None or sizes[-1], "ended before it was killed"
            if process.poll() is not None:
                break
            assert time.monotonic() < until
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        sizes.append(out.stat().st_size)
    assert sizes[1] and sizes == sorted(sizes)
    after_kills = out.read_bytes()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sizes[1] < out.stat().st_size * 0.9, "the first kill came too late"
    assert out.read_bytes().startswith(after_kills[: after_kills.rfind(b"\n") + 1]), "finished lines are kept"
    results = read(tmp_path)
    assert len(results) == 302
    assert {result["custom_id"] for result in results} == {each["custom_id"] for each in asked} | {None}
    (tmp_path / "unbroken").mkdir()
    serve(tmp_path / "unbroken", asked, engine={"max_model_len": 4096})
    expected = {r["custom_id"]: r["response"]["body"].get("choices") for r in read(tmp_path / "unbroken")}
    found = {r["custom_id"]: r["response"]["body"].get("choices") for r in results if r["response"]}
    assert found == expected


def test_an_output_of_something_else_is_not_touched(tmp_path: Path) -> None:
    """Neither another file nor one with a bad line in the middle, nor the input itself."""
    write(tmp_path, [line("a")])
    for text in ("notes\n", '{"custom_id": 5, "error": null}\n', '{"a": 1}\n'):
        (tmp_path / "out.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="line 1 is no result"):
            serve(tmp_path)
        assert (tmp_path / "out.jsonl").read_text() == text
    with pytest.raises(ConfigError, match="the input itself"):
        BatchFrontend(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "in.jsonl")).check()
    with pytest.raises(ConfigError, match="is not a file"):
        BatchFrontend(input=str(tmp_path / "none"), output=str(tmp_path / "o")).check()
    with pytest.raises(ConfigError, match="cannot be written"):
        BatchFrontend(input=str(tmp_path / "in.jsonl"), output=str(tmp_path)).check()


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    write(tmp_path, [line("a")])
    first = BatchFrontend(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"))
    first.check()
    with pytest.raises(ConfigError, match="another run"):
        BatchFrontend(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl")).check()
    first.run(SimpleNamespace(engine=toy_engine(), manifest={}))
    assert len(read(tmp_path)) == 1


# ------------------------------------------------------------------------------------------------ faults


def test_a_full_disk_ends_the_run_with_whole_lines(tmp_path: Path) -> None:
    """Nothing of the line that did not fit is left, the engine is empty, and with room again the run goes on."""
    write(tmp_path, [line(str(i)) for i in range(30)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # a write beyond it is cut short, the next one fails
    try:
        record = serve(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert record["status"] == "failed"
    assert "File too large" in record["error"]
    held = read(tmp_path)
    assert 0 < len(held) < 30
    assert (tmp_path / "out.jsonl").read_bytes().endswith(b"}\n")
    assert serve(tmp_path)["batch"]["already_done"] == len(held)
    assert sorted(int(result["custom_id"]) for result in read(tmp_path)) == list(range(30))


def test_an_engine_that_stops_leaves_what_was_finished(tmp_path: Path) -> None:
    """``failed`` with the reason; another run computes the rest."""
    asked = [line(str(i)) for i in range(40)]
    record = serve(tmp_path, asked, engine={"fail_after": 12}, concurrency=4)
    assert record["status"] == "failed"
    assert "a fault on purpose" in record["error"]
    done = len(read(tmp_path))
    assert 0 < done < 40
    assert serve(tmp_path)["batch"] == {"lines": 40, "already_done": done, "completed": 40 - done, "failed": 0}


def test_ctrl_c_ends_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``aborted``, the engine empty, finished lines kept."""
    engine = toy_engine()
    execute = engine.executor.execute

    def interrupted(*args: Any) -> Any:
        if engine.executor.num_steps == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return execute(*args)

    monkeypatch.setattr(type(engine.executor), "execute", lambda self, *args: interrupted(*args))
    write(tmp_path, [line(str(i)) for i in range(40)])
    frontend = BatchFrontend(
        input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"), concurrency=4, progress=False
    )
    record = frontend.run(SimpleNamespace(engine=engine, manifest={}))
    assert record["status"] == "aborted"
    assert 0 < len(read(tmp_path)) < 40
    engine.assert_idle()


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"concurrency": True}, {"input": 5}, {"progress": "yes"}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        BatchFrontend(**{"input": "a", "output": "b", **options})
