"""A toy server as a process of its own, for tests of signals and exit codes: ``python serve_toy.py PORT OPTIONS``."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from core.frontends.http import HttpFrontend
from core.types import ConfigError, PolicyError
from tests.frontends.toys import toy_engine


def main() -> int:
    port, options = int(sys.argv[1]), json.loads(sys.argv[2])
    frontend = HttpFrontend(port=port, grace_s=options.pop("grace_s", 1.0))
    try:
        frontend.check()
        engine = toy_engine(**options)
        frontend.run(SimpleNamespace(engine=engine))
        engine.close()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except PolicyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
