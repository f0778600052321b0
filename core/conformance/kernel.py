"""What every attention kernel must do, against a slow reference in float32; ``python -m core.conformance --kernel
NAME`` runs these.

Block tables are permuted, everything that may not be read is poisoned, and sizes do not fit the block. A case that
the kernel refuses is fine if it says why; one that it takes must be right.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from core.conformance.common import Cases
from core.conformance.reference import Case
from core.conformance.subject import Subject
from core.kernel import LAYOUTS, AttentionCase, AttentionKernel
from core.types import Refusal

LENGTHS = {
    "decode": [(1, 1), (1, 17), (1, 5), (1, 33)],
    "prefill": [(5, 5), (17, 17), (3, 20), (16, 32)],
    "mixed": [(1, 9), (6, 6), (1, 1), (4, 30), (1, 16)],
}
"""(new tokens, keys) of each sequence of a batch."""

TOLERANCE = {
    "cpu": {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    "cuda": {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2},
}
"""Largest difference, absolute and relative, to the float32 reference on the same rounded inputs, which are averages
of unit normals."""
SHAPE: dict[str, Any] = {"block_size": 16, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class KernelCases(Cases):
    kind: ClassVar[str] = "kernel"

    # ------------------------------------------------------------------------------------------- helpers

    def _device(self, subject: Subject) -> str:
        return subject.facts.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")

    def _select(self, subject: Subject, case: Case, lengths: list[tuple[int, int]]) -> Any:
        """A new plugin's kernel for this case, or its Refusal."""
        new = {count for count, _ in lengths}
        info = case.infos[0]
        asked = AttentionCase(
            phase="decode" if new == {1} else "mixed" if 1 in new else "prefill",
            dtype=_name(case.q.dtype), kv_dtype=_name(case.kv_dtype), head_dim=info.head_dim,
            group_size=info.num_heads // info.num_kv_heads, window=info.window, soft_cap=info.soft_cap,
            block_size=case.block_size, device=case.device,
        )  # fmt: skip
        answer = subject.build().select_kernel(asked)
        if isinstance(answer, Refusal):
            assert answer.reason.strip(), f"select_kernel refused {asked} without a reason"
            return answer
        assert isinstance(answer, AttentionKernel), f"select_kernel gave {answer!r} for {asked}: a kernel or a Refusal"
        return answer

    def _run(
        self, subject: Subject, lengths: list[tuple[int, int]], **options: Any
    ) -> tuple[Case, torch.Tensor] | None:
        """Run and compare one case; None when the kernel refuses it, and the reason is in the report."""
        case = Case(lengths, **{**SHAPE, "device": self._device(subject), **options})
        kernel = self._select(subject, case, lengths)
        if isinstance(kernel, Refusal):
            subject.note(f"refused {options}: {kernel.reason}")
            return None
        if options.get("layout", kernel.layouts[0]) not in kernel.layouts:
            return None
        out = case.run(kernel)
        self._compare(case, out, f"{lengths} {options}")
        return case, out

    def _compare(self, case: Case, out: torch.Tensor, what: str) -> None:
        assert out.shape == case.q.shape and out.dtype == case.q.dtype, (
            f"the output is {tuple(out.shape)} {out.dtype}, q is {tuple(case.q.shape)} {case.q.dtype}"
        )
        real = len(out) - case.padding
        wanted = case.expected()
        tolerance = TOLERANCE[case.device][case.q.dtype if case.kv_dtype == case.q.dtype else torch.bfloat16]
        difference = (out[:real].float().cpu() - wanted).abs()
        bad = ~(difference <= tolerance * (1 + wanted.abs()))
        if bad.any():
            token, head, _ = (int(i) for i in bad.nonzero()[0])
            starts = np.searchsorted(case.batch.query_start, token, side="right") - 1
            new, keys = case.lengths[starts]
            raise AssertionError(
                f"(new tokens, keys) {what}: {int(bad.any(-1).sum())} of {bad[..., 0].numel()} (token, head) rows are wrong, "
                f"the first at packed token {token}, head {head} (sequence {starts}, {keys} keys, {new} new): it differs by "
                f"{float(difference[token, head].max()):.3g}, the tolerance is {tolerance}"
            )

    def _some(self, served: list[Any], subject: Subject) -> None:
        if not any(one is not None for one in served):
            pytest.skip("the kernel refuses every case of this kind, with a reason")

    # ------------------------------------------------------------------------------------------- cases

    def test_it_serves_every_phase(self, subject: Subject) -> None:
        """A kernel takes at least one kind of step, and says its name, its layouts and whether a graph may capture it."""
        reasons, served = [], []
        for phase, lengths in LENGTHS.items():
            for dtype in TOLERANCE["cpu"]:
                answer = self._select(
                    subject, Case(lengths, **SHAPE, dtype=dtype, device=self._device(subject)), lengths
                )
                if isinstance(answer, Refusal):
                    reasons.append(f"{phase} {_name(dtype)}: {answer.reason}")
                    continue
                served.append(f"{phase} {_name(dtype)}")
                assert answer.name and isinstance(answer.graph_safe, bool), f"{answer!r}: name or graph_safe is missing"
                assert answer.layouts and set(answer.layouts) <= set(LAYOUTS), (
                    f"layouts {answer.layouts}: allowed are {', '.join(LAYOUTS)}"
                )
        assert served, (
            f"the kernel refuses everything on {self._device(subject)}, so nothing was proved: {'; '.join(reasons)}"
        )
        subject.note(f"on {self._device(subject)}: {', '.join(served)}")

    @pytest.mark.parametrize("phase", list(LENGTHS))
    @pytest.mark.parametrize("dtype", list(TOLERANCE["cpu"]), ids=_name)
    def test_equals_the_reference(self, subject: Subject, phase: str, dtype: torch.dtype) -> None:
        """Equal to a float32 reference, with permuted block tables, and NaN or huge numbers in every slot that may not be read."""
        huge = 6e4 if dtype == torch.float16 else 1e30
        self._some(
            [self._run(subject, LENGTHS[phase], dtype=dtype, filler=filler) for filler in (math.nan, huge, 0.0)],
            subject,
        )

    @pytest.mark.parametrize("block_size", [1, 3, 16, 24])
    def test_lengths_around_a_block_edge(self, subject: Subject, block_size: int) -> None:
        """Keys that end one before, on and one behind a block's edge, read by one new token, by two, and all new."""
        served = []
        for delta in (-1, 0, 1):
            ends = [n for n in (block_size + delta, 2 * block_size + delta) if n > 0]
            lengths = [(new, keys) for keys in ends for new in sorted({1, min(2, keys), keys})]
            served.append(self._run(subject, lengths, block_size=block_size))
        self._some(served, subject)

    @pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 96, 128, 256])
    def test_head_sizes(self, subject: Subject, head_dim: int) -> None:
        """Any head size it takes, those that are no power of two included."""
        self._some([self._run(subject, LENGTHS["mixed"], head_dim=head_dim, num_heads=3, num_kv_heads=1)], subject)

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (6, 1), (7, 1), (28, 4), (20, 1), (3, 3), (4, 2)]
    )
    def test_head_groups(self, subject: Subject, num_heads: int, num_kv_heads: int) -> None:
        """Each query head reads the key head of its group."""
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 16, "block_size": 3}
        self._some([self._run(subject, lengths, **shape) for lengths in LENGTHS.values()], subject)

    @pytest.mark.parametrize("window", [None, 1, 2, 4, 7, 16, 1000])
    @pytest.mark.parametrize("soft_cap", [None, 0.5, 5.0])
    def test_windows_and_soft_caps(self, subject: Subject, window: int | None, soft_cap: float | None) -> None:
        """A sliding window and a cap on the scores are computed, or refused with a reason: never ignored."""
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 3}
        served = [
            self._run(subject, lengths, window=window, soft_cap=soft_cap, **shape) for lengths in LENGTHS.values()
        ]
        self._some(served, subject)

    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16], ids=_name)
    def test_a_cache_of_another_type(self, subject: Subject, kv_dtype: torch.dtype) -> None:
        """float32 queries over a half-precision cache are computed from what the cache holds, or refused with a reason."""
        self._some([self._run(subject, lengths, kv_dtype=kv_dtype) for lengths in LENGTHS.values()], subject)

    @pytest.mark.parametrize("phase", list(LENGTHS))
    def test_unused_slots_cannot_reach_a_result(self, subject: Subject, phase: str) -> None:
        """Bit for bit the same output whatever the unread slots hold."""
        ended = [self._run(subject, LENGTHS[phase], filler=filler) for filler in (0.0, math.nan, 1e30, -math.inf)]
        outs = [one[1] for one in ended if one is not None]
        self._some(list(outs), subject)
        assert all(torch.equal(outs[0], out) for out in outs[1:]), (
            "the output depends on slots that hold no key of the sequence"
        )

    @pytest.mark.parametrize("layout", list(LAYOUTS))
    @pytest.mark.parametrize("phase", list(LENGTHS))
    def test_writes_its_slots_and_nothing_else(self, subject: Subject, phase: str, layout: str) -> None:
        """K and V land in the slots of the batch; padding rows (slot -1) write nothing; every other number in the
        pool keeps its bits, those of other layers included; the output of real rows is no NaN."""
        options: dict[str, Any] = {
            "block_size": 3,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "layout": layout,
            "padding": 3,
            "filler": 123.0,
        }
        ended = self._run(subject, LENGTHS[phase], **options)
        self._some([ended], subject)
        assert ended is not None
        case, out = ended
        before = Case(LENGTHS[phase], **options, device=case.device).pool
        real = len(out) - case.padding
        slots = torch.from_numpy(case.batch.slot_mapping[:real].astype(np.int64)).to(case.device)
        block, offset = slots // case.block_size, slots % case.block_size
        for name, cache, given in (("K", case.k_cache[1], case.k), ("V", case.v_cache[1], case.v)):
            assert torch.equal(cache[block, offset], given[:real]), (
                f"{name} of the new tokens is not in the slots of the batch"
            )
        blocks = before if layout == "block_major" else before.permute(2, 0, 1, 3, 4, 5)
        case.k_cache[1][block, offset] = blocks[:, 1, 0][block, offset]
        case.v_cache[1][block, offset] = blocks[:, 1, 1][block, offset]
        changed = int((case.pool != before).sum())
        assert not changed, (
            f"{changed} numbers of the pool changed that belong to no slot of the batch (or to another layer)"
        )
        assert not out[:real].isnan().any(), "NaN in the output of a real row"

    def test_inputs_in_any_memory_order(self, subject: Subject) -> None:
        """Models hand over transposed views: the same numbers with other strides."""
        lengths = LENGTHS["mixed"]
        case = Case(lengths, **SHAPE, device=self._device(subject))
        kernel = self._select(subject, case, lengths)
        self._some([None if isinstance(kernel, Refusal) else kernel], subject)
        for name in ("q", "k", "v"):
            setattr(case, name, getattr(case, name).transpose(0, 1).contiguous().transpose(0, 1))
        self._compare(case, case.run(kernel), f"{lengths} with strided inputs")

    def test_one_batch_after_another(self, subject: Subject) -> None:
        """A batch, a larger one, and the first again give the first's output twice, also when another engine's
        kernel runs between."""
        case, other = (Case(LENGTHS[p], **SHAPE, device=self._device(subject)) for p in ("decode", "mixed"))
        kernel, stranger = (
            self._select(subject, case, LENGTHS["decode"]),
            self._select(subject, other, LENGTHS["mixed"]),
        )
        self._some([None if isinstance(one, Refusal) else one for one in (kernel, stranger)][:1], subject)
        if isinstance(stranger, Refusal):
            pytest.skip(f"no mixed steps: {stranger.reason}")
        first = case.run(kernel).clone()
        self._compare(other, other.run(stranger), "of another engine")
        kernel.prepare(case.batch, case.tensors())
        again = kernel.forward(1, case.q, case.k, case.v)
        assert torch.equal(first, again), "the same batch gives another output after a kernel of another engine ran"

    def test_strange_cases_are_refused_with_a_reason(self, subject: Subject) -> None:
        """A type, head or block size it cannot read is a Refusal with the reason: never an exception, and never None."""
        usual: dict[str, Any] = {
            "phase": "decode", "dtype": "float32", "kv_dtype": "float32", "head_dim": 64, "group_size": 3, "window": None,
            "soft_cap": None, "block_size": 16, "device": self._device(subject),
        }  # fmt: skip
        refused = []
        for change in (
            {"kv_dtype": "float8_e4m3fn"},
            {"dtype": "int8"},
            {"head_dim": 7},
            {"block_size": 256},
            {"group_size": 71},
        ):
            answer = subject.build().select_kernel(AttentionCase(**{**usual, **change}))
            assert answer is not None, f"select_kernel gave None for {change}: a kernel or a Refusal with the reason"
            if isinstance(answer, Refusal):
                assert answer.reason.strip(), f"select_kernel refused {change} without a reason"
                refused.append(f"{change}: {answer.reason}")
        subject.note("; ".join(refused) or "refuses none of them")
