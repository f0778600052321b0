"""``observers=[steplog]``: a line in the log every ``every`` steps."""

import logging

import attrs

from core.hookspecs import hookimpl

LOG = logging.getLogger(__name__)


@attrs.define(eq=False)
class StepLog:
    every: int = attrs.field(default=10, validator=attrs.validators.ge(1))

    @hookimpl
    def step_finished(self, report):
        if report.step % self.every == 0:
            LOG.info(
                "step %d: %d tokens, %d running, %d waiting",
                report.step,
                report.num_tokens,
                report.num_running,
                report.num_waiting,
            )
