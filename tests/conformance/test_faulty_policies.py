"""Planted faults in schedulers and preemption policies: each kind is caught by the case that protects it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.conformance import PreemptionCases, SchedulerCases
from tests.conformance.kit import cases_of, failure, subject_for

HERE = "tests.conformance.faulty_policies"
TOKENS, COMPANY = "test_same_tokens_as_alone", "test_any_plan_any_company"
GROWS = "test_time_grows_with_the_sequences_not_their_square"
SCHEDULERS = {
    "OverBudget": (TOKENS, "max_num_batched_tokens is"),
    "TooMany": (TOKENS, "max_num_seqs is"),
    "Twice": (TOKENS, "planned a sequence twice"),
    "Unknown": (TOKENS, "unknown sequence"),
    "Empty": (TOKENS, "empty plan without wait_until"),
    "Spins": (TOKENS, "it must be later"),
    "NeverPreempts": (TOKENS, "set may_preempt"),
    "Greedy": ("test_decodes_go_on", "got no token for 41 steps"),
    "NewestFirst": ("test_no_request_starves", "have not ended after 200 steps"),
    "SetOrder": ("test_results_do_not_depend_on_the_hash_seed", "serve the same requests differently"),
    "Counts": ("test_equal_runs_are_equal", "served differently"),
    "Takes": (TOKENS, "plan_step changed the pool"),
    "SlowPlan": ("test_time_per_call", "the limit is 50 times"),
    "QuadraticPlan": (GROWS, "it grows with a square"),
}
PREEMPTORS = {
    "TheFirst": (TOKENS, "ahead of the first chunk|leave nothing of the plan"),
    "Nobody": (TOKENS, "gave no eviction"),
    "OneAtATime": (TOKENS, "name enough of them, or give None"),
    "UnknownKind": (TOKENS, "an unknown kind"),
    "NamedTwice": (TOKENS, "named twice"),
    "Waiting": (TOKENS, "not a running sequence"),
    "Everyone": (TOKENS, "ahead of the first chunk|leave nothing of the plan"),
    "Oldest": (COMPANY, "leave nothing of the plan|freed no block"),
    "ByChance": ("test_equal_runs_are_equal", "served differently"),
    "SlowChoice": ("test_time_per_call", "the limit is 50 times"),
    "QuadraticChoice": (GROWS, "it grows with a square"),
    "GivesBack": (TOKENS, "choose_victims changed the pool"),
}


@pytest.mark.parametrize("fault", SCHEDULERS)
def test_the_kit_catches_a_scheduler(fault: str, tmp_path: Path) -> None:
    case, message = SCHEDULERS[fault]
    yaml = "watermark: 0.01\nmax_chunk: null\n"
    caught = failure(SchedulerCases, subject_for(tmp_path, "scheduler", f"{HERE}.{fault}", yaml), case)
    assert caught is not None and re.search(message, caught), caught


@pytest.mark.parametrize("fault", PREEMPTORS)
def test_the_kit_catches_a_preemption_policy(fault: str, tmp_path: Path) -> None:
    case, message = PREEMPTORS[fault]
    examples = 400 if fault == "OneAtATime" else 60  # most pools are one victim short
    caught = failure(PreemptionCases, subject_for(tmp_path, "preemption", f"{HERE}.{fault}", examples=examples), case)
    assert caught is not None and re.search(message, caught), caught


@pytest.mark.parametrize("case", cases_of(SchedulerCases))
def test_a_right_scheduler_of_whole_prompts_passes(case: str, tmp_path: Path) -> None:
    assert (
        failure(SchedulerCases, subject_for(tmp_path, "scheduler", f"{HERE}.WholePrompts", examples=20), case) is None
    )


def test_a_right_scheduler_whose_newcomers_may_preempt_passes(tmp_path: Path) -> None:
    subject = subject_for(tmp_path, "scheduler", f"{HERE}.PriorityNewcomers", "watermark: 0.01\nmax_chunk: null\n")
    assert failure(SchedulerCases, subject, TOKENS) is None
