"""The fp32 reference lives in the conformance kit, since plugin authors need it from an installed wheel."""

from core.conformance.reference import BATCH_ARRAYS, Case, attention

__all__ = ["BATCH_ARRAYS", "Case", "attention"]
