"""Planted faults: the kit must catch each kind, by the case that protects it and with a message that says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.conformance import AllocatorCases
from tests.conformance.kit import cases_of, failure, subject_for

HERE = "tests.conformance.faulty_allocators"
PLAN, TOKENS = "test_any_plan_any_company", "test_same_tokens_as_alone"
FAULTS = {
    "TwoOwners": (PLAN, "two owners counted once"),
    "DoubleFree": (PLAN, "release counts owners wrongly|a second free"),
    "Leak": (PLAN, "release counts owners wrongly"),
    "LeakOnAbort": (PLAN, "release counts owners wrongly"),
    "NoCopy": (PLAN, "a block that was not copied"),
    "WritesShared": (PLAN, "has 2 owners|has 3 owners"),
    "KeepsHoles": (PLAN, "left holes"),
    "TooFew": (PLAN, "tokens must fit"),
    "TakesOnShortfall": (PLAN, "changed the pool although it answered Shortfall"),
    "RemembersShortfall": (PLAN, "remembers a plan that it answered with"),
    "SaysItFits": (PLAN, "chunks of .* fit, and answers them with"),
    "ClaimsHits": (PLAN, "was said to be cached and is not|tokens must fit"),
    "LooksAndTakes": (PLAN, "cached_tokens changed the order of the free blocks although it is only a look"),
    "PowersOfTwo": ("test_block_sizes", "tokens must fit"),
    "RefusesEverything": ("test_a_request_alone_in_the_pool_ends", "not today"),
    "KeepsStateInTheClass": ("test_equal_runs_are_equal", "served differently|not free|counts"),
    "AsksASet": ("test_results_do_not_depend_on_the_hash_seed", "serve the same requests differently"),
    "Slow": ("test_time_per_call", "the limit is 50 times"),
    "Quadratic": ("test_time_grows_with_the_sequences_not_their_square", "it grows with a square"),
    "NeedsTorch": ("test_it_starts_without_torch", "torch was imported"),
    "Bare": ("test_it_says_what_it_is", "has no docstring"),
    "IgnoresSalt": (PLAN, "salts must not share"),
    "KeepsStaleKeys": (PLAN, "belongs|salts must not share"),
    "HashesOneBlock": (PLAN, "was said to be cached and is not"),
    "CommitsTooMuch": (PLAN, "was said to be cached and is not|has 2 owners"),
    "NeverHits": ("test_prefixes_are_shared_within_a_salt_only", "expected 1 to 15"),
    "TakesBeforePinning": (PLAN, "owners|belongs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_catches(fault: str, tmp_path: Path) -> None:
    case, message = FAULTS[fault]
    caught = failure(AllocatorCases, subject_for(tmp_path, "allocator", f"{HERE}.{fault}"), case)
    assert caught is not None and re.search(message, caught), caught


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("depth: 3\n", "does not list fit"),
        ("depth: 4\nfit: first\n", "depth is 4 in the YAML and 3"),
        ("depth: 3\nfit: best\n", "fit is 'best' in the YAML and 'first'"),
    ],
)
def test_the_kit_catches_a_yaml_that_is_not_the_class(yaml: str, message: str, tmp_path: Path) -> None:
    subject = subject_for(tmp_path, "allocator", f"{HERE}.Fields", yaml)
    assert message in (failure(AllocatorCases, subject, "test_yaml_and_class_have_the_same_fields") or "")
    right = subject_for(tmp_path, "allocator", f"{HERE}.Fields", "depth: 3\nfit: first\n")
    assert failure(AllocatorCases, right, "test_yaml_and_class_have_the_same_fields") is None


@pytest.mark.parametrize("case", cases_of(AllocatorCases))
def test_a_right_allocator_that_shares_prefixes_passes(case: str, tmp_path: Path) -> None:
    assert failure(AllocatorCases, subject_for(tmp_path, "allocator", f"{HERE}.TinyPrefix", examples=25), case) is None
