"""Trace and prompt files: the rows that are there, in bounded memory, and a bad row named with its file, line and reason."""

import gzip
import itertools
import json
import logging
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from core.config import compose, instantiate
from core.text import ByteTokenizer
from core.types import ConfigError
from core.workloads.azure import AzureTrace
from core.workloads.burstgpt import BurstGptTrace
from core.workloads.mooncake import MooncakeTrace
from core.workloads.prompts import Prompts
from core.workloads.reading import MAX_IN_FLIGHT, json_array
from core.workloads.sharegpt import ShareGpt

DATA = Path(__file__).parents[1] / "data"
TOKENIZER = ByteTokenizer(320)


def lengths(requests):
    return [(len(r.prompt_token_ids), r.recorded_output_tokens) for r in requests]


def read(cls, text, tmp_path, **options):
    """All requests of a file with this text."""
    path = tmp_path / "made.txt"
    path.write_text(text)
    workload = cls(path=str(path), **options)
    if hasattr(workload, "use_tokenizer"):
        workload.use_tokenizer(TOKENIZER)
    return list(workload.requests(320, 4096))


# ------------------------------------------------------------------------------------------------ the formats


def test_azure_rows_keep_lengths_and_times(caplog):
    """Seven digits of a second, made-up tokens that differ by row, rows without output counted."""
    workload = AzureTrace(path=str(DATA / "azure.csv"))
    with caplog.at_level(logging.WARNING):
        requests = list(workload.requests(1000, 4096))
    assert lengths(requests) == [(374, 44), (396, 109), (879, 55), (91, 16)]
    assert [r.arrival_s for r in requests] == pytest.approx([0, 4.314579, 4.541877, 5.892969], abs=2e-6)
    assert all(r.params.max_tokens == r.recorded_output_tokens and r.params.ignore_eos for r in requests)
    assert len({r.prompt_token_ids[:8] for r in requests}) == 4
    assert requests[0].prompt_token_ids == next(workload.requests(1000, 4096)).prompt_token_ids
    assert max(max(r.prompt_token_ids) for r in requests) < 1000
    assert caplog.messages[0] == "azure.csv: rows left out: 1 without output (0 generated tokens)"


def test_scale_speed_limit_and_other_arrivals():
    """Lengths divided, gaps divided, the first rows only; other arrivals take the place of the file's times."""
    path = str(DATA / "azure.csv")
    requests = list(AzureTrace(path=path, scale=8, speed=10, limit=3).requests(1000, 4096))
    assert lengths(requests) == [(47, 6), (50, 14), (110, 7)]
    assert requests[1].arrival_s == pytest.approx(0.4314579, abs=1e-6)
    poisson = AzureTrace(path=path, arrivals={"kind": "poisson", "rate_per_s": 2, "cv": None}, seed=3)
    times = [r.arrival_s for r in poisson.requests(1000, 4096)]
    assert times[0] == 0 and times == sorted(times) and times[1] != pytest.approx(4.314579)
    closed = AzureTrace(path=path, arrivals={"kind": "closed"})
    assert closed.concurrency == MAX_IN_FLIGHT and {r.arrival_s for r in closed.requests(1000, 4096)} == {None}
    with pytest.raises(ConfigError, match="burst would send the whole file at once: set workload.limit"):
        AzureTrace(path=path, arrivals={"kind": "burst"})


def test_requests_too_long_are_cut_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        requests = list(AzureTrace(path=str(DATA / "azure.csv")).requests(1000, 400))
    assert lengths(requests) == [(374, 26), (396, 4), (399, 1), (91, 16)]
    assert "azure.csv: 3 requests were cut to max_model_len=400 tokens" in caplog.messages


def test_a_date_may_have_a_zone(tmp_path):
    """The 2024 files write +00:00; another offset counts."""
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = "2024-05-10 00:00:00.009930+00:00,10,2\n2024-05-10 01:00:01.009930+01:00,10,2\n"
    assert [r.arrival_s for r in read(AzureTrace, head + rows, tmp_path)] == pytest.approx([0, 1])


def test_burstgpt_leaves_failed_requests_out():
    """0 response tokens: counted as failed, not asked of the engine. The trace's session and model stay."""
    workload = BurstGptTrace(path=str(DATA / "burstgpt.csv"))
    requests = list(workload.requests(1000, 4096))
    assert lengths(requests) == [(472, 18), (417, 276)]
    assert [r.arrival_s for r in requests] == [0, 113]
    assert [(r.session_id, r.label) for r in requests] == [("a", "ChatGPT"), ("a", "GPT-4")]
    assert workload.skipped == {"failed (0 response tokens)": 1}


@pytest.mark.parametrize("scale, block", [(1, 512), (32, 16)])
def test_mooncake_hash_ids_become_the_same_tokens_everywhere(scale, block):
    """Equal ids, equal tokens, in another request and another reader; unequal ids differ; the sharing survives scaling."""
    one, two, three, four = MooncakeTrace(path=str(DATA / "mooncake.jsonl"), scale=scale).requests(49152, 4096)
    assert len(one.prompt_token_ids) == -(-1100 // scale) and len(two.prompt_token_ids) == -(-1500 // scale)
    assert one.prompt_token_ids[: 2 * block] == two.prompt_token_ids[: 2 * block]
    assert one.prompt_token_ids[2 * block :] != two.prompt_token_ids[2 * block : len(one.prompt_token_ids)]
    assert three.prompt_token_ids == one.prompt_token_ids[:block] == four.prompt_token_ids[:block]
    assert four.prompt_token_ids[block:] != one.prompt_token_ids[block : 2 * block]
    assert [r.arrival_s for r in (one, two, three, four)] == [0, 3, 3.5, 9]
    again = next(MooncakeTrace(path=str(DATA / "mooncake.jsonl"), scale=scale).requests(49152, 4096))
    assert again.prompt_token_ids == one.prompt_token_ids
    other = next(MooncakeTrace(path=str(DATA / "mooncake.jsonl"), scale=scale, seed=1).requests(49152, 4096))
    assert other.prompt_token_ids != one.prompt_token_ids


def test_mooncake_tokens_are_pinned():
    """The expansion is a fixed function: a stored result stays comparable."""
    first = next(MooncakeTrace(path=str(DATA / "mooncake.jsonl")).requests(49152, 4096)).prompt_token_ids
    assert first[:4] == (17798, 20859, 45688, 42107)


def test_sharegpt_takes_the_first_turn_of_each(tmp_path):
    """Human text is the prompt, the answer's length the recorded output; what is no such pair is counted."""
    workload = ShareGpt(path=str(DATA / "sharegpt.json"))
    workload.use_tokenizer(TOKENIZER)
    one, three = workload.requests(320, 4096)
    assert TOKENIZER.decode(one.prompt_token_ids) == 'What is a quire? Say "gathering".'
    assert one.recorded_output_tokens == len(TOKENIZER.encode("A gathering of pages.\nUsually 24."))
    assert TOKENIZER.decode(three.prompt_token_ids) == "Grüße, ]}, and [brackets"
    assert (one.label, three.label) == ("one", "three") and workload.skipped == {
        "without a human turn and its answer": 1
    }


def test_text_without_a_tokenizer_needs_a_rule():
    """An executor without tokenizer: a number of characters a token, the same prefix for the same beginning."""
    workload = ShareGpt(path=str(DATA / "sharegpt.json"))
    with pytest.raises(ConfigError, match="no tokenizer: set workload.chars_per_token"):
        workload.use_tokenizer(None)
    workload = ShareGpt(path=str(DATA / "sharegpt.json"), chars_per_token=4)
    workload.use_tokenizer(None)
    one, _ = workload.requests(50, 4096)
    assert len(one.prompt_token_ids) == -(-len('What is a quire? Say "gathering".') // 4)
    assert all(0 <= token < 50 for token in one.prompt_token_ids)


def test_prompts_are_text_tokens_or_messages():
    workload = Prompts(path=str(DATA / "prompts.jsonl"), max_tokens=9)
    workload.use_tokenizer(TOKENIZER)
    text, chat, ids = workload.requests(320, 4096)
    assert TOKENIZER.decode(text.prompt_token_ids) == "Write a haiku." and text.params.max_tokens == 5
    assert (text.session_id, text.priority, text.params.ignore_eos) == ("s", 2, False)
    assert "Hello" in TOKENIZER.decode(chat.prompt_token_ids)
    assert (chat.params.max_tokens, chat.recorded_output_tokens) == (9, 3)
    assert ids.prompt_token_ids == (1, 2, 3) and ids.deadline_s == 1 and ids.arrival_s is None


def test_gzip_and_byte_order_mark(tmp_path):
    text = "\ufeff" + (DATA / "azure.csv").read_text()
    with gzip.open(tmp_path / "a.csv.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    assert len(list(AzureTrace(path=str(tmp_path / "a.csv.gz")).requests(10, 4096))) == 4


# ------------------------------------------------------------------------------------------------ bad rows

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,2\n"
BURST = "Timestamp,Request tokens,Response tokens\n1,5,5\n"
MOON = '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
BAD_ROWS = [
    (
        AzureTrace,
        AZURE + "2023-11-16 18:15:47,ten,2\n",
        "line 3: ContextTokens must be a whole number of at least 1, got 'ten'",
    ),
    (AzureTrace, AZURE + "2023-11-16 18:15:47,-4,2\n", "line 3: ContextTokens must be .* got '-4'"),
    (AzureTrace, AZURE + "2023-11-16 18:15:47,1e400,2\n", "line 3: ContextTokens must be"),
    (AzureTrace, AZURE + "yesterday,4,2\n", "line 3: TIMESTAMP must be a date and time"),
    (AzureTrace, AZURE + "\n2023-11-16 18:15:47,4\n", "line 4: it cannot be read as CSV: 2 of 3 columns"),
    (AzureTrace, AZURE + "2023-11-16 18:15:45,4,2\n", "line 3: its time is 1 s before the row above it"),
    (BurstGptTrace, BURST + "nan,5,5\n", "line 3: Timestamp must be a number, got 'nan'"),
    (BurstGptTrace, BURST + "2,5,2.5\n", "line 3: Response tokens must be a whole number"),
    (MooncakeTrace, MOON + "{oops\n", "line 2: it is no JSON"),
    (MooncakeTrace, MOON + "[1]\n", "line 2: it must be a JSON object"),
    (MooncakeTrace, MOON + '{"timestamp": 1}\n', "line 2: it has no input_length; it has timestamp"),
    (
        MooncakeTrace,
        MOON + MOON.replace(": 10", ": 600"),
        "line 2: input_length 600 is 2 blocks of 512 tokens, but hash_ids has 1",
    ),
    (MooncakeTrace, MOON + MOON.replace("[1]", "[true]"), "line 2: each of hash_ids must be a whole number"),
    (ShareGpt, '[\n{"id": 1},\n{}]', "line 2: it must be an object with a list named conversations"),
    (ShareGpt, '[{"conversations": [{"from": 1}]}]', "line 1: each of conversations must have from and value"),
    (Prompts, '{"prompt": "a"}\n{"promt": "a"}\n', "line 2: it has no field promt; allowed: prompt"),
    (Prompts, '{"prompt": "a", "messages": []}\n', "line 1: it needs one of prompt and messages"),
    (Prompts, '{"prompt": ""}\n', "line 1: its prompt is empty"),
    (Prompts, '{"prompt": [400]}\n', "line 1: prompt has token 400: the model's vocabulary ends at 319"),
    (Prompts, '{"prompt": "a", "max_tokens": 0}\n', "line 1: max_tokens must be a whole number of at least 1"),
    (Prompts, '{"messages": [{"role": "user"}]}\n', "line 1: each of messages must have role and content"),
    (Prompts, '{"prompt": "\\ud800"}\n', "line 1: its text cannot become tokens"),
]


@pytest.mark.parametrize("cls, text, says", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_named_or_skipped_and_counted(cls, text, says, tmp_path, caplog):
    """One line with file, line and reason; with on_bad_row=skip the others are served and the first bad one is told."""
    with pytest.raises(ConfigError, match=f"^made.txt {says}.*on_bad_row=skip"):
        read(cls, text, tmp_path)
    with caplog.at_level(logging.WARNING):
        left = read(cls, text, tmp_path, on_bad_row="skip")
    num_bad = 2 if text.startswith("[\n") else 1
    assert len(left) == (text.startswith(("TIMESTAMP", "Timestamp", '{"timestamp', '{"prompt": "a"}')))
    assert any(f"{num_bad} bad row; the first bad one: made.txt line" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "cls, text, says",
    [
        (
            AzureTrace,
            "a,b\n1,2\n",
            "line 1: the header has no column TIMESTAMP, ContextTokens, GeneratedTokens; .* it has a, b",
        ),
        (AzureTrace, "", "the header has no column"),
        (ShareGpt, '{"a": 1}', "line 1: expected '\\[': the file must be one JSON array"),
        (ShareGpt, "[1\n2]", "line 1: it must be an object|line 2: expected ',' or ']'"),
        (ShareGpt, '[{"conversations": []},\n', "line 2: the file ends inside its JSON array, after 1 elements"),
        (ShareGpt, '[\n{"conversations": [}]', "line 2: this element is no JSON"),
        (ShareGpt, "", "line 1: the file ends inside"),
    ],
)
def test_a_file_of_another_kind_is_refused(cls, text, says, tmp_path):
    """What is wrong with the whole file cannot be skipped."""
    with pytest.raises(ConfigError, match=says):
        read(cls, text, tmp_path, on_bad_row="error" if text.startswith("[1") else "skip")


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "made.csv"
    path.write_bytes(AZURE.encode() + b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="made.csv: is not UTF-8 text"):
        list(AzureTrace(path=str(path)).requests(10, 100))


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"path": "nowhere.csv"}, "workload.path=nowhere.csv: there is no such file"),
        ({"path": ""}, "workload.path must be the path of a file"),
        ({"scale": 0}, "scale must be a finite number above 0"),
        ({"speed": -1}, "speed must be a finite number above 0"),
        ({"limit": 0}, "limit must be an integer of at least 1 or null"),
        ({"on_bad_row": "ignore"}, "on_bad_row must be one of error, skip"),
        ({"arrivals": {"kind": "zipf"}}, "arrivals.kind must be one of trace, closed, burst"),
        ({"concurrency": 4}, "concurrency belongs to arrivals.kind=closed; with trace"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"scale": 3}, "scale must divide workload.block_size=512"),
    ],
)
def test_bad_options_say_what_is_allowed(bad, says):
    with pytest.raises(ConfigError, match=says):
        MooncakeTrace(**{"path": str(DATA / "mooncake.jsonl"), **bad})


# ------------------------------------------------------------------------------------------------ streaming


def test_json_elements_are_found_whatever_the_chunks(tmp_path, monkeypatch):
    """A chunk may end anywhere: in a string, an escape, a number, between elements."""
    elements = [{"a": 'x\\"]},[', "b": [1, 2.5e3, None]}, "ü\n" * 5, 12345, [], {}, -0.125, True]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(elements, indent=1, ensure_ascii=False))
    for chunk in (1, 2, 3, 7, 50, 1000):
        monkeypatch.setattr("core.workloads.reading.CHUNK_CHARS", chunk)
        found = list(json_array(str(path)))
        assert [element for _, element in found] == elements
        assert [line for line, _ in found][:2] == [2, 10] and found[-1][0] == len(path.read_text().splitlines()) - 1
    path.write_text("[]")
    assert list(json_array(str(path))) == []


@pytest.mark.parametrize("kind", ["jsonl", "array"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    """A 12 MB file is read in well under 2 MB."""
    path = tmp_path / "big"
    with open(path, "w") as file:
        if kind == "jsonl":
            file.writelines('{"prompt": [1, 2], "label": "%s"}\n' % ("x" * 1000) for _ in range(12_000))
        else:
            turns = [{"from": "human", "value": "x" * 1000}, {"from": "gpt", "value": "y"}]
            element = json.dumps({"conversations": turns})
            file.write("[" + ",".join([element] * 11_000) + "]")
    workload = Prompts(path=str(path)) if kind == "jsonl" else ShareGpt(path=str(path), chars_per_token=100)
    workload.use_tokenizer(None)
    requests = workload.requests(320, 64)
    next(requests)
    tracemalloc.start()
    num = sum(1 for _ in requests)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num >= 10_999 and peak < 2e6


@pytest.mark.parametrize("name", ["azure", "burstgpt", "mooncake", "sharegpt", "prompts"])
def test_yaml_and_class_have_the_same_fields(name):
    """conf lists every field with the class's own default."""
    suffix = {"sharegpt": "json", "azure": "csv", "burstgpt": "csv"}.get(name, "jsonl")
    config = compose([f"workload={name}", f"workload.path={DATA / name}.{suffix}"])
    made = instantiate(config.workload, f"workload={name}")
    default = type(made)(path=made.path)
    fields = [each.name for each in type(made).__attrs_attrs__ if each.init]
    assert {f: getattr(made, f) for f in fields} == {f: getattr(default, f) for f in fields}
    assert set(config.workload) == {"_target_", *fields}
    if hasattr(made, "use_tokenizer"):
        made.use_tokenizer(TOKENIZER)
    assert len(list(itertools.islice(made.requests(320, 4096), 2))) == 2
    with pytest.raises(ConfigError, match="workload.path is missing|path"):
        instantiate(compose([f"workload={name}"]).workload, f"workload={name}")


def test_numpy_is_not_in_the_tokens():
    """Plain integers: they go into JSON and hashes."""
    token = next(AzureTrace(path=str(DATA / "azure.csv")).requests(10, 50)).prompt_token_ids[0]
    assert type(token) is int and not isinstance(token, np.integer)
