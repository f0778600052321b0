"""observers=[recorder]: every decision is in the file, replayed blocks add up, and recording changes nothing."""

import json
import os
import subprocess
import sys

import pytest

from core.config import compose
from core.observers.recorder import FORMAT, Recorder, read_decisions, run_folder
from core.start import start
from core.types import API_VERSION, ConfigError, PolicyError, QuireError, SamplingParams

TOY = [
    "executor=toy",
    "executor.step_seconds=0.5",
    "cache.num_blocks=6",
    "cache.block_size=4",
    "cache.swap_gb=0.001",
    "checks=full",
]
RECORD = ["observers=[recorder]"]


def serve(overrides, num_requests=3, num_output=8):
    """Serve a few requests on a pool that is too small for all of them; gives the tokens of each and the reports."""
    engine = start(compose([*TOY, *overrides])).engine
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False)
    ids = [engine.submit([1, 2, 3, 4, 5], params, label=f"r{i}") for i in range(num_requests)]
    tokens, reports = {i: [] for i in ids}, []
    try:
        while engine.has_work():
            reports.append(engine.step())
            for output in reports[-1].outputs:
                tokens[output.request_id] += output.token_ids
        engine.assert_idle()
    finally:
        engine.close()
    return list(tokens.values()), reports


def recorded(path, overrides=(), **work):
    tokens, reports = serve([*RECORD, f"observers.recorder.path={path}", *overrides], **work)
    return tokens, reports, list(read_decisions(path))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_decisions_are_recorded_and_nothing_changes(tmp_path, preemption):
    """The same tokens with and without; plans, leases, evictions, releases and outputs are those that happened."""
    overrides = [f"preemption={preemption}"]
    tokens, reports, lines = recorded(tmp_path / "d.jsonl", overrides)
    assert tokens == serve(overrides)[0]
    of = {event: [line for line in lines if line["event"] == event] for event in {line["event"] for line in lines}}
    assert set(of) == {"header", "arrived", "plan", "reserve", "evict", "release", "step"}

    assert [line["event"] for line in lines].index("header") == 0 and len(of["header"]) == 1
    header = of["header"][0]
    assert (header["format"], header["api_version"], header["limits"]["num_blocks"]) == (FORMAT, API_VERSION, 6)

    assert [r["label"] for r in of["arrived"][0]["requests"]] == ["r0", "r1", "r2"]
    assert len(of["plan"]) == len(reports) == len(of["step"])
    assert [line["step"] for line in of["plan"]] == [report.step for report in reports]
    assert [tuple(map(tuple, line["outputs"])) for line in of["step"]] == [
        tuple((o.sequence_id, list(o.token_ids), o.finish_reason) for o in report.outputs) for report in reports
    ]
    preempted = [p.sequence for report in reports for p in report.preempted]
    assert preempted and [v[0] for line in of["evict"] for v in line["victims"]] == preempted


def test_blocks_leased_are_blocks_released(tmp_path):
    """Following leases and releases through the file, no block has two owners and all come back."""
    _, _, lines = recorded(tmp_path / "d.jsonl", ["preemption=recompute"])
    owner: dict[int, int] = {}
    for line in lines:
        for sequence, lease in zip(line.get("sequences", []), line.get("leases", []), strict=False):
            for _, block in lease["blocks"]:
                assert block not in owner
                owner[block] = sequence
        for sequence, blocks, _ in line.get("releases", []):
            assert [owner.pop(block) for block in blocks] == [sequence] * len(blocks)
    assert not owner


def test_every_shortfall_is_in_the_file(tmp_path):
    """A plan that did not fit is a reserve line with the numbers, before the line that did."""
    _, _, lines = recorded(tmp_path / "d.jsonl")
    short = [line["shortfall"] for line in lines if "shortfall" in line]
    assert short and all(s["blocks_missing"] >= 1 and s["num_fitting"] >= 0 for s in short)


@pytest.mark.parametrize("flush_every", [1, 2, 1000])
def test_the_file_is_the_same_however_often_it_is_written(tmp_path, flush_every):
    """flush_every changes when lines are written, not which; two runs on a virtual clock give equal bytes."""
    recorded(tmp_path / "one.jsonl")
    recorded(tmp_path / "other.jsonl", [f"observers.recorder.flush_every={flush_every}"])
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "other.jsonl").read_bytes()


def test_what_a_crashed_step_decided_is_written(tmp_path, monkeypatch):
    """The engine stops in a step: its plan and leases are in the file, since teardown writes what is left."""
    from core.executors.toy import ToyExecutor

    def broken(*args):
        raise RuntimeError("device lost")

    monkeypatch.setattr(ToyExecutor, "execute", broken)
    path = tmp_path / "d.jsonl"
    with pytest.raises(RuntimeError, match="device lost"):
        recorded(path)
    assert [line["event"] for line in read_decisions(path)][:4] == ["header", "arrived", "plan", "reserve"]


def test_a_cut_off_line_is_left_out_and_damage_is_named(tmp_path):
    """A killed run may end in half a line; half a line elsewhere, another format or another file is an error."""
    path = tmp_path / "d.jsonl"
    _, _, lines = recorded(path)
    text = path.read_text()
    path.write_text(text[:-9])
    assert list(read_decisions(path)) == lines[:-1]
    path.write_text(text.replace('"event":"plan"', '"event":', 1))
    with pytest.raises(QuireError, match=r"line \d+ is not JSON"):
        list(read_decisions(path))
    for other, says in (("", "no header"), ("hello\n", "no header"), ('{"event":"plan"}\n', "no header")):
        path.write_text(other)
        with pytest.raises(QuireError, match=says):
            list(read_decisions(path))
    path.write_text(json.dumps({**lines[0], "format": 99}) + "\n")
    with pytest.raises(QuireError, match=f"format 99, this version reads {FORMAT}"):
        list(read_decisions(path))


def test_a_path_that_cannot_be_written_stops_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"recorder\.path: cannot write"):
        recorded(tmp_path / "file" / "d.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_the_observers_error(tmp_path):
    """It names the recorder, never a policy; with observer_errors=disable the requests are served all the same."""
    with pytest.raises(ConfigError, match="recorder"):  # the header already fails
        recorded("/dev/full")


@pytest.mark.parametrize("errors", ["raise", "disable"])
def test_an_error_while_writing_is_the_observers(tmp_path, monkeypatch, errors):
    """The disk fills up in the run: raise stops the engine in the recorder's name, disable serves on without it."""

    def full(self, file):
        raise OSError(28, "No space left on device")

    overrides = [
        *RECORD,
        f"observers.recorder.path={tmp_path / 'd.jsonl'}",
        f"observer_errors={errors}",
        "observers.recorder.flush_every=2",
    ]
    monkeypatch.setattr(Recorder, "_write", full)
    if errors == "raise":
        with pytest.raises(PolicyError, match="observers=recorder step_finished: OSError"):
            serve(overrides)
    else:
        assert serve(overrides)[0] == serve([])[0]


def test_the_manifest_says_that_hooks_are_wrapped(tmp_path):
    started = start(compose([*TOY, *RECORD, f"observers.recorder.path={tmp_path / 'd.jsonl'}"]))
    started.engine.close()
    assert set(started.manifest["wrappers"]) == {"plan_step", "reserve", "choose_victims", "release"}


def test_without_a_job_the_file_goes_to_the_current_folder(tmp_path, monkeypatch):
    """The Python API has no run folder."""
    monkeypatch.chdir(tmp_path)
    assert run_folder() == tmp_path
    serve(RECORD)
    assert next(read_decisions("decisions.jsonl"))["event"] == "header"


def test_flush_every_is_checked():
    with pytest.raises(ValueError, match="flush_every"):
        Recorder(flush_every=0)


def test_the_recorder_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import core.observers.recorder, core.metrics, core.frontends.replay"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
