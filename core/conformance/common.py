"""Cases that hold for every policy: how it is packaged, that it starts without torch, and that equal runs are equal."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import attrs
import pytest

from core.conformance.strategies import fixed_works
from core.conformance.subject import PARTNERS, Subject, subject_of
from core.conformance.toy import Sizes, serve
from core.types import API_VERSION

HEAVY = ("torch", "triton", "transformers")

NO_TORCH = f"""
import json, sys
class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(name + " was imported: policies must start without it")
sys.meta_path.insert(0, Refuse())
from core.config import compose
from core.start import start
from core.types import SamplingParams
engine = start(compose(json.loads(sys.argv[1]))).engine
for prompt in ([1, 2, 3], [4] * 9):
    engine.submit(prompt, SamplingParams(max_tokens=4, temperature=0), recorded_output_tokens=4)
reasons = []
while engine.has_work():
    reasons += [out.finish_reason for out in engine.step().outputs if out.finish_reason]
engine.assert_idle()
engine.close()
if reasons != ["length", "length"]:
    raise SystemExit("two requests ended with " + str(reasons))
"""

TRACE = """
import json, sys
from core.conformance.common import trace_digest
from core.conformance.subject import Subject
print(trace_digest(Subject(**json.loads(sys.argv[1]))))
"""


def tight_sizes(subject: Subject, works: Iterable[Any], **changes: Any) -> Sizes:
    """A pool in which a few of these requests fit, so that preemption happens; a budget that the subject starts with."""
    longest = max(work.num_tokens for work in works)
    sizes = Sizes(
        block_size=4, num_blocks=-(-longest // 4) + 6, max_num_batched_tokens=12, max_num_seqs=6, max_model_len=longest
    )
    sizes = attrs.evolve(sizes, **changes)
    if subject.kind == "scheduler" and needs_whole_prefill(subject):
        sizes = attrs.evolve(sizes, max_num_batched_tokens=max(sizes.max_num_batched_tokens, sizes.max_model_len))
    return sizes


def needs_whole_prefill(subject: Subject) -> bool:
    """Whether the scheduler refuses a step that is smaller than the longest prompt (found out once)."""
    if "whole prefill" not in subject.facts:
        reason = subject.refuses(Sizes(max_num_batched_tokens=12))
        subject.facts["whole prefill"] = reason
        if reason:
            roomy = subject.refuses(Sizes())
            assert roomy is None, (
                f"{subject.option} does not start with a step as large as max_model_len either: {roomy}"
            )
    return subject.facts["whole prefill"] is not None


def trace_of(subject: Subject, works: list[Any] | None = None) -> list[Any]:
    """Everything observable of one run of the fixed requests in a tight pool."""
    works = works or fixed_works()
    engine = subject.engine(
        tight_sizes(subject, works), **({} if subject.kind == "preemption" else {"preemption": "swap"})
    )
    return serve(engine, works).trace()


def trace_digest(subject: Subject) -> str:
    return hashlib.sha256(json.dumps(trace_of(subject)).encode()).hexdigest()


def run_python(code: str, argument: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh Python that finds what this one finds; ``argument`` arrives as JSON in ``sys.argv[1]``."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps(argument)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


class Cases:
    """Base of all cases. ``option`` (``"allocator=mine"``) and the other fields are for subclasses; by name they
    come from the command line."""

    kind: ClassVar[str]
    option: ClassVar[str | None] = None
    overrides: ClassVar[tuple[str, ...]] = ()
    config_dir: ClassVar[str | None] = None
    trust: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[int] = 100

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """What is being proved; made once a class, and given a place for this case's notes."""
        chosen = getattr(request.config, "quire_subjects", {})
        if self.option is None and self.kind in chosen:
            subject = chosen[self.kind]
        elif self.option is not None:
            cls = type(self)
            if "_subject" not in vars(cls):
                cls._subject = subject_of(  # type: ignore[attr-defined]
                    self.option, self.overrides, config_dir=self.config_dir, trust=self.trust, examples=self.examples
                )
            subject = cls._subject  # type: ignore[attr-defined]
        else:
            raise pytest.UsageError(
                f"{type(self).__name__}: set option = '{self.kind}=NAME', or give --{self.kind} NAME"
            )
        subject.note = lambda line: request.node.user_properties.append(("note", line))
        return subject

    # ------------------------------------------------------------------------------------------- packaging

    def test_yaml_and_class_have_the_same_fields(self, subject: Subject) -> None:
        """The YAML lists every field of the class with its default, so that --help and the manifest tell the truth."""
        check_fields(subject)

    def test_it_says_what_it_is(self, subject: Subject) -> None:
        """A summary for --help and the option lists; a docstring on the class for whoever reads it."""
        found, cls = subject.find(), type(subject.build())
        if found is not None:
            assert found.summary.strip(), f"Policy({subject.kind!r}, {subject.name!r}, ...) has no summary line"
            assert len(found.summary) <= 100, (
                f"the summary of {subject.option} has {len(found.summary)} characters, 100 fit"
            )
        else:
            subject.note("not packaged: only a YAML in --config-dir names it")
        # attrs and dataclasses write none of their own; object's is not one
        assert (cls.__doc__ or "").strip(), f"{cls.__module__}.{cls.__qualname__} has no docstring"


class PolicyCases(Cases):
    """What allocators, schedulers and preemption policies have in common."""

    def test_it_starts_without_torch(self, subject: Subject) -> None:
        """Policies run on a simulated machine too: neither the plugin module nor the class may import torch, triton
        or transformers."""
        ended = run_python(
            NO_TORCH, subject.words("cache.num_blocks=64", "max_model_len=256", "max_num_batched_tokens=256")
        )
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        assert ended.returncode == 0, (
            f"a toy engine with {subject.option} does not serve when torch cannot be imported: {last}"
        )

    def test_equal_runs_are_equal(self, subject: Subject) -> None:
        """A run, another one, and the first again give the first's results twice: no state outside the object, no
        clock, no chance."""
        first, _, again = trace_of(subject), trace_of(subject, fixed_works(6)[::-1]), trace_of(subject)
        for step, (one, two) in enumerate(zip(first, again, strict=False)):
            assert one == two, f"the same requests were served differently from step {step} on: first {one}, then {two}"
        assert len(first) == len(again), f"the same requests took {len(first)} steps, then {len(again)}"

    def test_results_do_not_depend_on_the_hash_seed(self, subject: Subject) -> None:
        """Two processes with different PYTHONHASHSEED do the same: no decision hangs on the order of a set or of a
        dict of objects."""
        fields = ("kind", "name", "overrides", "config_dir", "trust")
        argument = {name: getattr(subject, name) for name in fields}
        ended = [run_python(TRACE, argument, PYTHONHASHSEED=seed) for seed in ("1", "2")]
        for one in ended:
            assert one.returncode == 0, (
                f"the run in a fresh process failed: {(one.stderr.strip().splitlines() or ['?'])[-1]}"
            )
        assert ended[0].stdout == ended[1].stdout, "PYTHONHASHSEED=1 and =2 serve the same requests differently"


def check_fields(subject: Subject) -> None:
    """AssertionError unless the option's YAML has exactly the class's fields and their defaults."""
    node = subject.plain_node()
    cls = type(subject.build())
    target = node.pop("_target_", None)
    own = f"{cls.__module__}.{cls.__qualname__}"
    found = subject.find()
    assert found is None or found.target == target, f"Policy names {found and found.target}, the YAML builds {target}"
    parameters = dict(inspect.signature(cls).parameters)
    fields = {name: value for name, value in node.items() if not str(name).startswith("_")}
    missing, unknown = sorted(set(parameters) - set(fields)), sorted(set(fields) - set(parameters))
    assert not missing, f"{subject.option}: the YAML does not list {', '.join(missing)} of {own}"
    assert not unknown, f"{subject.option}: the YAML lists {', '.join(unknown)}, which {own} does not have"
    defaults = default_values(cls, parameters)
    for name, value in fields.items():
        if isinstance(value, str) and "${" in value:
            continue  # refers to another field of the config
        assert name in defaults and _same(defaults[name], value), (
            f"{subject.option}: {name} is {value!r} in the YAML and {defaults.get(name, 'without a default')!r} in {own}"
        )
    subject.note(f"{len(fields)} fields, plugin contract version {API_VERSION}")


def default_values(cls: type, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Defaults by parameter name, factories called."""
    values = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    for field in attrs.fields(cls) if attrs.has(cls) else ():
        if isinstance(field.default, attrs.Factory) and not field.default.takes_self:  # type: ignore[arg-type]
            values[field.alias] = field.default.factory()
    return values


def _same(default: Any, value: Any) -> bool:
    if isinstance(default, tuple):
        default = list(default)
    return default == value and isinstance(default, bool) == isinstance(value, bool)


__all__ = ["PARTNERS", "Cases", "PolicyCases", "tight_sizes", "trace_digest", "trace_of"]
