"""python -m core.ledger: the exact values of the reference table, any model and machine, bad input in words."""

import json
import math
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from core.arithmetic import Machine
from core.ledger import Inputs, ledger
from core.ledger.__main__ import main, read
from core.ledger.inputs import figures, show
from core.ledger.timing import crossover_tokens
from core.types import ConfigError

ROOT = Path(__file__).parents[2]
SHAPE, MACHINE = read(["model=llama2-7b", "machine=h100"])
ROWS = ledger(SHAPE, MACHINE)

EXACT = {  # the column "exact" of the reference table: whole numbers exactly, others to half of their last digit
    "kv_per_token.MHA": 512 * 1024,
    "kv_per_token.GQA-8": 128 * 1024,
    "weights": (13.48e9, 0.005e9),
    "slot.4096": (2.147e9, 0.0005e9),
    "slot.32768": (17.2e9, 0.05e9),
    "slot.131072": (68.7e9, 0.05e9),
    "naive.4096": 29,
    "naive.4096.used_of_reserved": (0.1563, 0.00005001),
    "naive.32768": 3,
    "naive.32768.used_of_budget": (0.0161, 0.00005),
    "naive.32768.used_of_reserved": (0.0195, 0.00005),
    "paged.full_blocks": 186,
    "paged.with_tail": 184,
    "tail.1": 0,
    "tail.16": 7.5,
    "tail.64": 31.5,
    "tail.256": 127.5,
    "tail.64.of_budget": (0.0526, 0.00005),
    "tail.256.of_budget": (0.213, 0.0005),
    "lognormal.64.of_budget": (0.0526, 0.00005),
    "lognormal.256.of_budget": (0.213, 0.0005),
    "table.1": 4096,
    "table.16": 256,
    "table.64": 64,
    "table.256": 16,
    "table.bytes": 2048,
    "fanout.8.apart": 34_816,
    "fanout.8.shared": 6_144,
    "fanout.8.gain": (5.7, 0.05),
    "fanout.16.apart_bytes": (73.0e9, 0.05e9),
    "fanout.16.shared_bytes": (8.59e9, 0.005e9),
    "fanout.16.gain": 8.5,
    "copy_on_write.256": 8 * 256 * 512 * 1024,
    "preempt.4096.MHA.swap": (67.1e-3, 0.05e-3),
    "preempt.4096.MHA.recompute": (129.4e-3, 0.05e-3),
    "preempt.4096.MHA.break_even": (33.2e9, 0.05e9),
    "preempt.4096.GQA-8.break_even": (8.3e9, 0.05e9),
    "preempt.16384.GQA-8.kv": (2.147e9, 0.0005e9),
    "preempt.16384.GQA-8.swap": (67e-3, 0.5e-3),
    "preempt.16384.GQA-8.recompute": (731e-3, 0.5e-3),
    "preempt.16384.GQA-8.ratio": (10.9, 0.05),
    "preempt.16384.GQA-8.break_even": (5.9e9, 0.05e9),
    "crossover.slow.MHA": (5195, 0.5),
    "crossover.link.MHA": None,
    "crossover.link.GQA-8": None,
    "break_even.most.MHA": (38.5e9, 0.05e9),
    "break_even.most.GQA-8": (9.6e9, 0.05e9),
    "decode.bytes": (80.25e9, 0.005e9),
    "tpot.199": (23.96e-3, 0.005e-3),
    "scheduling_delay": (22.6e-3, 0.05e-3),
    "throughput.199": (8307, 0.5),
    "throughput.29": (4186, 0.5),
    "throughput.naive_full_slots": (1282, 0.5),
    "ridge": (295, 0.5),
    "ridge.share": (0.63, 0.005),
    "largest_batch": 159,
    "long.MHA.naive": 0,
    "long.GQA-8.naive": 3,
    "long.GQA-8.naive_used": (0.00403, 0.000005),
    "long.GQA-8.paged": 745,
    "long.GQA-8.paged_tail": 736,
    "long.GQA-8.lost": (248, 0.5),
    "long.GQA-8.lost_tail": (245, 0.5),
    "classes.mean_slot": (1.584e9, 0.0005e9),
    "classes.sequences": 39,
    "agent.submitted": 97_000,
    "agent.distinct": 7_700,
    "agent.resent": (0.92, 0.005),
    "agent.peak": (1.009e9, 0.0005e9),
    "agent.sessions": 61,
    "agent.sessions_naive": 29,
    "agent.sessions_gain": (2.1, 0.05),
    "agent.prefill.flop": (1.31e15, 0.005e15),
    "agent.prefill.seconds": (2.64, 0.005),
    "shared_prompt.blocks": 125,
    "goodput.199": 0,
    "lognormal.8.entries_median": 100,
    "lognormal.16.entries_median": 50,
    "lognormal.64.entries_median": 13,
    "lognormal.256.entries_median": 4,
    "lognormal.8.entries_95": 2500,
    "lognormal.16.entries_95": 1250,
    "lognormal.64.entries_95": 313,
    "lognormal.256.entries_95": 79,
}


@pytest.mark.parametrize("key", EXACT)
def test_exact_value_of_the_reference_table(key):
    """Llama 2 7B on an H100 with the defaults."""
    want, got = EXACT[key], ROWS[key].value
    if isinstance(want, tuple):
        assert abs(got - want[0]) <= want[1]
    else:
        assert got == want


def test_values_that_need_the_table_s_rounded_inputs():
    """15.57 % with a budget of exactly 62.5 GB, where 0.95 x 80 - 13.48 gives 15.56; 6.73x from terms rounded to 0.1 ms."""
    rounded = ledger(SHAPE, MACHINE, Inputs(kv_budget_gb=62.5))
    assert rounded["naive.4096.used_of_budget"].value == pytest.approx(0.1557, abs=0.00005)
    assert ROWS["kv_budget"].value == pytest.approx(62.52e9, rel=1e-9)
    assert ROWS["naive.4096.used_of_budget"].value == pytest.approx(29 * 640 * 524288 / 62.52e9, rel=1e-12)
    assert ROWS["interference"].value == pytest.approx((129.4 + 22.6) / 22.6, abs=0.003)
    same = [key for key, want in EXACT.items() if not isinstance(want, tuple)]
    assert {key: rounded[key].value for key in same} == {key: EXACT[key] for key in same}


def test_goodput_counts_only_what_meets_the_target():
    """All of its own up to the largest batch, and nothing behind it; without a batch that meets it, none."""
    for key, row in ROWS.items():
        if key.startswith("goodput."):
            size = int(key.partition(".")[2])
            assert row.value == (ROWS[f"throughput.{size}"].value if size <= 159 else 0)
    none = ledger(SHAPE, MACHINE, Inputs(tpot_slo_ms=4))
    assert (none["largest_batch"].value, none["largest_batch"].shown) == (0, "none")


def test_naive_and_paged_bounds_that_a_simulation_is_held_to():
    """232 bare prompts fit at the start; sequences that grow from 512 to 640 hold 576 in the mean."""
    assert ROWS["paged.bare_prompts"].value == 232
    assert ROWS["paged.growing"].value == 204 == int(62.52e9 // ((576 + 7.5) * 524288))


def test_crossover_is_where_swap_and_recompute_meet():
    """At the length both take the same; below it recompute is faster, above it swap; none on a link past the break-even."""
    rate, link = MACHINE.rate, 32e9
    length = crossover_tokens(SHAPE, link, rate)

    def both(tokens):
        return 2 * tokens * SHAPE.kv_bytes_per_token() / link, SHAPE.prefill_flop(tokens) / rate

    assert both(length)[0] == pytest.approx(both(length)[1], rel=1e-9)
    assert both(length - 100)[0] > both(length - 100)[1] and both(length + 100)[0] < both(length + 100)[1]
    most = ROWS["break_even.most.MHA"].value
    assert crossover_tokens(SHAPE, most * 1.001, rate) is None and crossover_tokens(SHAPE, most * 0.999, rate) > 0
    assert ROWS["crossover.link.MHA"].shown == "none"


def test_chunks_soften_the_spike():
    """A chunk beside decodes costs the others less than the whole prompt; one as long as the prompt costs the same."""
    assert 1 < ROWS["interference.chunk"].value < ROWS["interference"].value
    whole = ledger(SHAPE, MACHINE, Inputs(max_num_batched_tokens=10_000))
    assert whole["interference.chunk"].value == whole["interference"].value


def test_an_agent_with_a_shared_prefix_pays_the_distinct_tokens():
    """With attention the squares telescope: sharing costs what one prefill of the last prompt costs."""
    assert ROWS["agent.prefill.shared.flop_all"].value == SHAPE.prefill_flop(7700)
    sent = sum(SHAPE.prefill_flop(2000 + 300 * k) for k in range(20))
    assert ROWS["agent.prefill.flop_all"].value == pytest.approx(sent)


# ------------------------------------------------------------------------------------------------ any model and machine


@pytest.mark.parametrize("model", ["llama2-7b-gqa8", "llama3-8b", "llama3-70b", "smollm2", "tiny"])
@pytest.mark.parametrize("machine", ["h100", "h200", "a100"])
def test_every_row_for_every_model_and_machine(model, machine):
    """Finite values or none with a word for it, on models with other heads, types and cards."""
    shape, device = read([f"model={model}", f"machine={machine}"])
    for row in ledger(shape, device).values():
        assert row.value is None or (math.isfinite(row.value) and row.value >= 0)
        assert row.shown and "nan" not in row.shown and row.numbers
        assert row.value is not None or row.shown in ("none", "-")


def test_a_model_that_does_not_fit_says_so():
    """No budget: no sequence, no ratio made up."""
    rows = ledger(SHAPE, attrs.evolve(MACHINE, memory_gb=10))
    assert (rows["kv_budget"].value, rows["kv_budget"].shown) == (0, "none")
    assert "the weights do not fit" in rows["kv_budget"].numbers
    assert rows["naive.4096"].value == rows["paged.full_blocks"].value == 0
    assert rows["paged.gain"].value is None and rows["scheduling_delay"].shown == "none"


def test_cards_add_up():
    """Over four cards: four times memory, bandwidth, rate and links."""
    four = attrs.evolve(SHAPE, cards=4)
    big = Machine(
        name="big",
        memory_gb=4 * MACHINE.memory_gb,
        bandwidth_bytes_per_s=4 * MACHINE.bandwidth_bytes_per_s,
        flop_per_s=4 * MACHINE.flop_per_s,
        link_bytes_per_s=4 * MACHINE.link_bytes_per_s,
    )
    one = ledger(SHAPE, big, Inputs(slow_link_gb_per_s=128))
    for key, row in ledger(four, MACHINE).items():
        assert row.value == (one[key].value if one[key].value is None else pytest.approx(one[key].value)), key


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    "given, says",
    [
        ({"block_size": 0}, "block_size=0: allowed is a whole number from 1"),
        ({"block_sizes": (16, 16)}, "block_sizes=.*different whole numbers"),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5: allowed is above 0 up to 1"),
        ({"kv_budget_gb": -1}, "kv_budget_gb=-1: allowed is a number above 0, or null"),
        ({"class_percents": (50, 25, 5)}, "class_percents=.*must add up to 100"),
        ({"fanout_n": (2,)}, "fanout_prompts=.*allowed are 1 whole numbers"),
        ({"tail_tokens": 5}, "tail_tokens=5: it must be more than median_tokens=800"),
        ({"gqa_kv_heads": 0}, "gqa_kv_heads=0: allowed is a whole number from 1"),
        ({"tpot_slo_ms": True}, "tpot_slo_ms=True"),
    ],
)
def test_bad_inputs_say_what_is_allowed(given, says):
    with pytest.raises(ConfigError, match=says):
        Inputs(**given)


@pytest.mark.parametrize(
    "words, says",
    [
        (["blok_size=3"], "blok_size: there is no such input (did you mean block_size?); allowed: memory_fraction"),
        (["block_size"], "block_size: cannot be read as name=value"),
        (["block_size=many"], "block_size='many': allowed is a whole number from 1"),
        (["--model", "gpt5"], "model=gpt5: no such option; allowed: llama2-7b"),
        (["machine.memory=3"], "machine has no field memory"),
        (["gqa_kv_heads=7"], "gqa_kv_heads=7: it must divide the 32 heads"),
        (["block_sizes=[1,"], "block_sizes=[1,: cannot be read as a value"),
    ],
)
def test_a_bad_command_line_exits_2_with_one_line(words, says, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_overrides_reach_inputs_model_and_machine(capsys):
    """name=value of ours, model.* and machine.*, and groups by flag or by name."""
    words = [
        "--json",
        "--machine",
        "a100",
        "model=llama2-7b-gqa8",
        "block_size=32",
        "block_sizes=[32]",
        "model.cards=2",
    ]
    assert main([*words, "machine.memory_gb=40", "kv_budget_gb=null"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["name"] == "llama2-7b-gqa8" and found["model"]["cards"] == 2
    assert (found["machine"]["name"], found["machine"]["memory_gb"]) == ("a100", 40)
    assert found["inputs"]["block_size"] == 32
    assert found["rows"]["kv_budget"]["value"] == pytest.approx(0.95 * 40e9 * 2 - 13.48e9)
    assert found["rows"]["kv_per_token"]["value"] == 131072
    assert set(found["rows"]["naive.4096"]) == {"section", "quantity", "value", "unit", "formula", "numbers", "shown"}


def test_table_fits_100_columns_and_has_every_row(capsys):
    """What a newcomer reads: every quantity and value, sections explained, no line cut."""
    assert main([]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    flat = " ".join(text.split())
    for row in ROWS.values():
        assert row.shown in flat and row.quantity.strip()[:30] in flat
    assert main(["--markdown"]) == 0
    markdown = capsys.readouterr().out
    assert markdown.count("\n| ") - markdown.count("| quantity |") == len(ROWS)


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (524288, "B", "512 KiB"),
        (62.52e9, "B", "62.52 GB"),
        (1500, "B", "1.5 KB"),
        (0.15625, "fraction", "15.63 %"),
        (0.0226, "s", "22.6 ms"),
        (3.2e-7, "s", "0.32 µs"),
        (34816, "tokens", "34,816"),
        (1.31e15, "FLOP", "1.31 PFLOP"),
        (0, "x", "0x"),
        (None, "s", "-"),
    ],
)
def test_values_are_shown_with_units(value, unit, text):
    assert show(value, unit) == text


def test_halves_round_up():
    assert (figures(0.125, 2), figures(15.625), figures(1234567.5)) == ("0.13", "15.63", "1,234,568")


def test_starts_without_torch():
    """The ledger is for a laptop: neither torch nor transformers is imported."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from core.ledger.__main__ import main; sys.exit(main(['--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]["naive.4096"]["value"] == 29


def test_the_page_is_what_the_code_says(monkeypatch):
    """docs/ledger.md is up to date, compares every row it names, and explains each figure that differs."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from ledger_page import OPTIONS, REFERENCE, ledger_page

    assert (ROOT / "docs" / "ledger.md").read_text().endswith(ledger_page()), "run: python docs/build.py"
    assert all(key in ROWS for _, _, keys, _ in REFERENCE for key in keys)
    named = {name for _, _, _, names in OPTIONS for name in names.replace("`", "").replace(",", " ").split()}
    assert {"block_size", "memory_fraction", "max_num_batched_tokens", "max_model_len"} <= named
    root = (ROOT / "conf" / "config.yaml").read_text()
    for ours, _, _, _ in OPTIONS:
        for option in ours.replace("`", "").split(", "):
            assert f"{option.rpartition('.')[2]}:" in root, option
