"""Makes docs/ledger.md: the reference table against ``python -m core.ledger``, why they differ, and what each option sets.

The figures come from the code; the source's figures and the reasons are written here.
"""

# ruff: noqa: E501 - tables of prose
from __future__ import annotations

from core.ledger import Inputs, ledger
from core.ledger.__main__ import read
from core.ledger.shown import as_markdown

REFERENCE: list[tuple[str, str, tuple[str, ...], str]] = [
    # quantity, the source's figures, our rows, why they differ ("": they do not)
    ("KV per token, MHA / GQA-8", "512 / 128 KiB", ("kv_per_token.MHA", "kv_per_token.GQA-8"), ""),
    ("KV budget", "62.5 GB", ("kv_budget",), "The source takes 13.48 GB of weights as 13.5. `kv_budget_gb=62.5` sets it."),
    ("Slot at 4,096 / 32,768 / 131,072", "2.147 / 17.2 / 68.7 GB", ("slot.4096", "slot.32768", "slot.131072"), "Rounding."),
    ("Naive at 4,096", "29", ("naive.4096",), ""),
    ("Naive utilisation at 4,096", "15.2 %", ("naive.4096.used_of_budget", "naive.4096.used_of_reserved"),
     "The source does not say of what. Of the budget or of what is reserved: both are printed and named. With the budget at exactly "
     "62.5 GB the first is 15.57 %."),
    ("Naive utilisation at 32,768", "1.9 %", ("naive.32768", "naive.32768.used_of_budget", "naive.32768.used_of_reserved"),
     "The source's is the share of what is reserved; only 3 slots fit, and of the budget it is less."),
    ("Paged, block 16", "199 (6.9x)", ("paged.full_blocks", "paged.with_tail", "paged.gain"),
     "Near what 62.5 GiB would hold (200): the source mixed GB and GiB. Rows that need a batch take its 199 all the same (`batch=199`), so "
     "that they can be compared."),
    ("Paged, sequences that grow", "-", ("paged.growing", "paged.bare_prompts"),
     "Not in the source. Over its life a sequence holds P + O / 2 tokens in the mean: what a simulation settles at. More bare prompts "
     "fit at the start."),
    ("Tail of used + tail, block 16 / 64 / 256", "1.3 / 4.8 / 17.0 %", ("tail.16.of_held", "tail.64.of_held", "tail.256.of_held"),
     "The source rounds the mean tail (b - 1) / 2 up to b / 2. And its 1.3 % at block 16 is the share of the budget: it mixes the two."),
    ("Tail of the budget, block 16 / 64 / 256", "- / 5.1 / 20.4 %", ("tail.16.of_budget", "tail.64.of_budget", "tail.256.of_budget"),
     "The source's exercise 3 has these: b / 2 tokens of 0.5 MB each, where a token is 0.524 MB."),
    ("Table entries at 4,096, block 1 / 16 / 64 / 256", "4,096 / 256 / 64 / 16", ("table.1", "table.16", "table.64", "table.256"), ""),
    ("Table bytes, block 16", "2 KB", ("table.bytes",), ""),
    ("Fan-out of 8", "34,816 -> 6,144 tokens, 5.7x", ("fanout.8.apart", "fanout.8.shared", "fanout.8.gain"), ""),
    ("Fan-out of 16", "73.0 -> 8.6 GB, 8.5x", ("fanout.16.apart_bytes", "fanout.16.shared_bytes", "fanout.16.gain"), ""),
    ("Copy on write, fan-out of 8, block 256", "512 MB", ("copy_on_write.256",),
     "A block of 256 tokens is 134 MB, so 8 copies are over 1 GB. The last writer finds the block its own and needs none, which leaves 7."),
    ("Swap of 4,096 tokens, MHA", "67 ms", ("preempt.4096.MHA.swap",), ""),
    ("Recompute of 4,096 tokens", "129 ms", ("preempt.4096.MHA.recompute",), ""),
    ("Break-even link at 4,096, MHA / GQA-8", "33.3 / 8.3 GB/s", ("preempt.4096.MHA.break_even", "preempt.4096.GQA-8.break_even"),
     "The source divides rounded terms."),
    ("16,384 tokens, GQA-8", "2.147 GB, 67 ms, 731 ms, 10.9x, 5.9 GB/s",
     tuple(f"preempt.16384.GQA-8.{each}" for each in ("kv", "swap", "recompute", "ratio", "break_even")), ""),
    ("Crossover length, MHA, 32 GB/s", "about 2,600", ("crossover.slow.MHA",),
     "The source's own formula gives twice its figure: swap pays the link both ways."),
    ("Crossover length at 64 GB/s", "-", ("crossover.link.MHA", "crossover.link.GQA-8"),
     "There is none: the break-even link never exceeds KV F / N, the two figures of the next row, so swap is faster at any length."),
    ("Break-even link at most, MHA / GQA-8", "-", ("break_even.most.MHA", "break_even.most.GQA-8"), "Not in the source."),
    ("Decode step, B = 199, 640 tokens", "78.8 GB, 23.5 ms", ("decode.bytes", "tpot.199"),
     "The source's sequences are 0.328 GB: 640 tokens of 512 KB, where 512 KiB are 0.336 GB."),
    ("Scheduling delay bound, ambient TPOT", "22.6 ms", ("scheduling_delay",), ""),
    ("Throughput, B = 199", "8,470 tok/s", ("throughput.199",), "Follows from the step."),
    ("Throughput, naive B = 29", '"a third"', ("throughput.29", "throughput.naive_full_slots"),
     "Half with sequences of 640 tokens; less than a sixth when every slot is full. A third is neither."),
    ("Interference of a prefill of 4,096", "6.7x", ("interference",), "6.73 from terms rounded to 0.1 ms."),
    ("Share of the ridge after paging", "68 %", ("ridge.share",), "199 / 295 in the source, 186 / 295 here."),
    ("Largest B with TPOT <= 20 ms", "164", ("largest_batch",), "(67 GB - 13.48 GB) / 0.3355 GB is 159.5; the source's sequences are smaller, as in its decode step."),
    ("S_max 131,072: naive MHA, naive GQA-8", "0; 3 (0.39 %)", ("long.MHA.naive", "long.GQA-8.naive", "long.GQA-8.naive_used"),
     "The source takes 128 KB for 128 KiB."),
    ("S_max 131,072: paged GQA-8", "744, 248x lost", ("long.GQA-8.paged", "long.GQA-8.paged_tail", "long.GQA-8.lost", "long.GQA-8.lost_tail"),
     "744 is 4 x 186; in one division it is 745. With the mean tail it is less."),
    ("S_max by request, 512 / 4,096 / 32,768 at 70 / 25 / 5 %", "1.586 GB, about 39", ("classes.mean_slot", "classes.sequences"),
     "Rounding. External waste (free space that no waiting request fits) is left out. A class of 512 cannot hold 512 + 128 tokens."),
    ("Log-normal, median 800, 5 % over 20,000: tail of the budget, block 8 / 16 / 64 / 256", "0.3 / 1.3 / 5.1 / 20.4 %",
     ("lognormal.8.of_budget", "lognormal.16.of_budget", "lognormal.64.of_budget", "lognormal.256.of_budget"),
     "As above; and the source's tail at block 8 is 2 tokens, a slip: it is 3.5."),
    ("  table entries at 800 tokens", "100 / 50 / 13 / 4", tuple(f"lognormal.{b}.entries_median" for b in (8, 16, 64, 256)), ""),
    ("  table entries at 20,000 tokens", "2500 / 1250 / 313 / 79", tuple(f"lognormal.{b}.entries_95" for b in (8, 16, 64, 256)), ""),
    ("Agent: submitted, distinct", "97,000, 7,700", ("agent.submitted", "agent.distinct", "agent.resent"), ""),
    ("Agent: KV at the end", "0.985 GB", ("agent.peak",), "7,700 tokens of 128 KiB; the source takes 128 KB."),
    ("Agent: sessions, paged and naive at 16K", "63 and 29", ("agent.sessions", "agent.sessions_naive", "agent.sessions_gain"),
     "Follows from the KV at the end."),
    ("Agent: prefill", "1.31 PFLOP, 2.64 s", ("agent.prefill.flop", "agent.prefill.seconds"),
     "These count the weights alone, as the source does. With attention:"),
    ("  with attention", "-", ("agent.prefill.flop_all", "agent.prefill.seconds_all"), "Not in the source."),
    ("  with a shared prefix", "-", ("agent.prefill.shared.flop", "agent.prefill.shared.seconds"), "The distinct tokens alone."),
    ("System prompt of 2,000 tokens, block 16", "125 blocks", ("shared_prompt.blocks",), ""),
    ("Goodput under 20 ms: B = 199; naive B = 29", "0; all of its own", ("goodput.199", "goodput.29"), ""),
]  # fmt: skip

OPTIONS: list[tuple[str, str, str, str]] = [
    # ours, vLLM's, what it sets, the ledger's input
    ("`cache.block_size`", "`--block-size`",
     "b: tail (b - 1) / 2 tokens a sequence, table entries ceil(S / b), bytes a copy on write moves", "`block_size`, `block_sizes`"),
    ("`cache.memory_fraction`", "`--gpu-memory-utilization`",
     "the budget. Both take their share of all memory first and the weights out of it; a real engine also takes a step's activations "
     "out, which the ledger does not know. Default 0.9 here and in vLLM; the ledger's is the source's 0.95", "`memory_fraction`"),
    ("`cache.num_blocks`", "`--num-gpu-blocks-override`", "the budget in blocks, whatever the memory", "`kv_budget_gb`"),
    ("`cache.kv_dtype`", "`--kv-cache-dtype`", "b of KV per token; the ledger takes the model's, change it with `model.dtype`", "-"),
    ("`max_model_len`", "`--max-model-len`", "S_max: the slot that naive reserves; paged only refuses what exceeds it", "`max_model_len`"),
    ("`max_num_seqs`", "`--max-num-seqs`",
     "B at most: set it to the largest B that meets the TPOT target, when memory would allow more", "`tpot_slo_ms` gives it"),
    ("`max_num_batched_tokens`", "`--max-num-batched-tokens`",
     "tokens a step: the chunk of a prompt that runs beside decodes, so the interference they feel", "`max_num_batched_tokens`"),
    ("`cache.swap_gb`", "`--swap-space` (GiB a GPU, older versions)", "how many preempted sequences can wait outside", "-"),
    ("`cost.link_bytes_per_s`, `cost.prefill_flop_per_s`", "-", "W and F of swap against recompute; measured at start unless given",
     "`machine.link_bytes_per_s`, `machine.prefill_efficiency`"),
]  # fmt: skip


def ledger_page() -> str:
    """The page, figures and all."""
    shape, machine = read(["model=llama2-7b", "machine=h100"])
    inputs = Inputs()
    rows = ledger(shape, machine, inputs)
    parts = [
        "# The ledger: arithmetic that can be checked on paper\n\n",
        "`python -m core.ledger` prints what a model costs on a machine: memory, sequences at once, step times, swap or recompute. "
        "`--model NAME` and `--machine NAME` choose from conf/, `name=value` changes an input, `--json` and `--markdown` are for other "
        "programs. The simulator (`executor=roofline`) prices its steps with the same module, core/arithmetic.py.\n\n",
        "## Against the source\n\n",
        "The lecture notes that this engine answers to have these figures for Llama 2 7B on an H100, chat of 512 + 128 tokens. Where ours "
        "differ, the last column says why; no formula was fitted to a rounded figure. 1 GB is 1e9 bytes throughout: the source mixes "
        "GB and GiB.\n\n",
        "| quantity | source | exact | why they differ |\n|---|---|---|---|\n",
    ]
    for quantity, source, keys, why in REFERENCE:
        ours = " / ".join(rows[key].shown for key in keys)
        indent = "&nbsp;&nbsp;" if quantity.startswith("  ") else ""
        parts.append(f"| {indent}{quantity.strip()} | {source} | {ours} | {why} |\n")
    parts += [
        "\nTTFT of every finished request is the sum of three terms: the wait for the next step (at most one step: the scheduling delay "
        "bound above), the wait in the queue, and the prefill. Every result file reports them.\n\n",
        "## Which option sets which quantity\n\n",
        "| option | vLLM's name | what it sets | input of the ledger |\n|---|---|---|---|\n",
    ]
    parts += [f"| {ours} | {theirs} | {sets} | {name} |\n" for ours, theirs, sets, name in OPTIONS]
    parts.append("\n# The whole ledger\n\nWritten by `python -m core.ledger --markdown`.\n\n")
    parts.append(as_markdown(shape, machine, inputs, rows).rstrip() + "\n")
    return "".join(parts)
