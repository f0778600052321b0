"""``python -m core.ledger [--model NAME] [--machine NAME] [--json | --markdown] [name=value ...]``"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from core.arithmetic import Machine, Shape
from core.ledger import Inputs, ledger
from core.types import ConfigError, QuireError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ledger; 0, or 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        composing, own = _split(options)
        shape, machine = read(composing)
        inputs = _inputs(own)
        rows = ledger(shape, machine, inputs)
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        from core.ledger.shown import as_json

        print(json.dumps(as_json(shape, machine, inputs, rows), indent=2))
        return 0
    from core.ledger.shown import as_markdown, as_table

    if options.markdown:
        print(as_markdown(shape, machine, inputs, rows), end="")
    else:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console = Console(width=100)
        console.print(as_table(shape, machine, inputs, rows), highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    fields = ", ".join(field.name for field in attrs.fields(Inputs))
    parser = argparse.ArgumentParser(
        prog="python -m core.ledger",
        description="What a model costs on a machine, by arithmetic: memory, sequences at once, step times, swap or recompute.",
        epilog=f"name=value changes an input ({fields}), model.FIELD=VALUE or machine.FIELD=VALUE a field of the model or the "
        "machine. Example: python -m core.ledger --model llama3-8b --machine h200 tpot_slo_ms=30 block_sizes=[16,32]",
    )
    parser.add_argument("--model", metavar="NAME", help="a model of conf/model or a plugin's (default llama2-7b)")
    parser.add_argument("--machine", metavar="NAME", help="a machine of conf/machine or a plugin's (default h100)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="values in bytes, seconds, tokens and fractions")
    how.add_argument("--markdown", action="store_true", help="one table a section")
    parser.add_argument("overrides", nargs="*", metavar="name=value")
    return parser


def _split(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """What chooses or changes a model and a machine, for Hydra; and our own inputs by name."""
    composing = [f"model={options.model or 'llama2-7b'}", f"machine={options.machine or 'h100'}"]
    own: dict[str, str] = {}
    names = [field.name for field in attrs.fields(Inputs)]
    for word in options.overrides:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: cannot be read as name=value")
        group = name.partition(".")[0]
        if group in ("model", "machine"):
            if name == group:
                composing = [each for each in composing if not each.startswith(f"{group}=")]
            composing.append(word)
        elif name in names:
            own[name] = value
        else:
            from core.discovery import did_you_mean

            raise ConfigError(
                f"{name}: there is no such input{did_you_mean(name, names)}; allowed: {', '.join(names)}, model.* and machine.*"
            )
    return composing, own


def read(overrides: Sequence[str]) -> tuple[Shape, Machine]:
    """The shapes of the chosen model and the chosen machine. ConfigError for an unknown one or a bad field."""
    from core.config import compose, instantiate, option_name

    config = compose(overrides)
    source: Any = instantiate(config.model, option_name(config, "model"))
    if not hasattr(source, "shape"):
        raise ConfigError(
            f"{option_name(config, 'model')}: it does not say its shapes, so there is nothing to reckon with"
        )
    machine = instantiate(config.machine, option_name(config, "machine")).read()
    return source.shape(), getattr(machine, "machine", machine)


def _inputs(values: dict[str, str]) -> Inputs:
    """Values as YAML reads them: 16, 0.9, [16,64], null."""
    if not values:
        return Inputs()
    import yaml

    read: dict[str, Any] = {}
    for name, text in values.items():
        try:
            read[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}={text}: cannot be read as a value") from error
    return Inputs(**read)


if __name__ == "__main__":
    sys.exit(main())
