"""What this package offers to Quire. Imports nothing heavy: targets are strings, imported when they are chosen."""

from core.hookspecs import hookimpl
from core.types import Policy

quire_api_version = 1


@hookimpl
def provide_policies():
    return [
        Policy(
            "scheduler", "lifo", "quire_lifo.schedulers.LifoScheduler", "newest waiting first, to show what goes wrong"
        ),
        Policy(
            "allocator",
            "lastfit",
            "quire_lifo.allocators.LastFitAllocator",
            "the block given back last is reused first",
        ),
        Policy("observers", "steplog", "quire_lifo.observers.StepLog", "a line in the log every few steps"),
    ]


@hookimpl
def provide_config_path():
    return "pkg://quire_lifo.conf"
