"""Every file of conf/experiment composes, alone and with what its own sweep says, and its workload can be built."""

from __future__ import annotations

import pytest
import yaml

from core.config import CONF, check_root, compose, instantiate

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def test_there_are_experiments() -> None:
    assert {"batching", "interference", "goodput", "preemption", "prediction", "sessions", "fairness"} <= set(
        EXPERIMENTS
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_and_its_workload_is_whole(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    params = (yaml.safe_load(text).get("hydra") or {}).get("sweeper", {}).get("params", {})
    last = [f"{key}={str(value).split(',')[-1]}" for key, value in params.items() if "glob" not in str(value)]
    for overrides in ([], last):
        config = compose([f"experiment={name}", *overrides])
        check_root(config)
        workload = instantiate(config.workload, "workload")
        first = next(iter(workload.requests(32000, config.max_model_len or 16384)))
        assert first.prompt_token_ids and first.params.max_tokens
