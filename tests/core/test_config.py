"""Composing, checking and building: the same words as on the command line, errors of one line."""

from __future__ import annotations

import sys
import threading

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from core.config import CONF, KINDS, check_root, compose, group_values, instantiate, option_name
from core.types import ConfigError

FULL = ["executor=toy", "frontend=replay", "model=tiny"]


def test_the_defaults_compose_and_pass_the_check():
    config = compose()
    root = check_root(config)
    assert (root.cache.block_size, root.max_num_seqs, root.max_num_batched_tokens, root.seed) == (16, 64, 128, 0)
    assert "hydra" not in config
    assert option_name(config, "allocator") == "allocator=paged"
    assert set(config.choices) <= set(KINDS)


def test_composing_leaves_hydra_as_it_was():
    """Again and again, from several threads, and while a job is running."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        running = GlobalHydra.instance().hydra
        seeds = []
        threads = [
            threading.Thread(target=lambda seed=seed: seeds.append(compose([*FULL, f"seed={seed}"]).seed))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seeds) == [0, 1, 2, 3]
        assert GlobalHydra.instance().hydra is running
    assert not GlobalHydra.instance().is_initialized()


def test_a_bad_composition_leaves_hydra_as_it_was():
    with pytest.raises(ConfigError):
        compose(["allocator=slob"])
    assert not GlobalHydra.instance().is_initialized()
    assert compose().allocator._target_.endswith("PagedAllocator")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("allocator=pagd", r"allocator=pagd: no such option \(did you mean paged\?\); allowed: .*paged"),
        ("allocator=newest", r"no such option; allowed: .*paged.*; a YAML of your own needs --config-dir FOLDER$"),
        ("alocator=paged", r"alocator: there is no group or field alocator \(did you mean allocator\?\)"),
        ("observers=[recodr]", r"observers=recodr: no such option \(did you mean recorder\?\)"),
        ("observers.recorder.path=x", r"choose it with observers=\[recorder\]"),
        ("slo.classes={chat: {ttft_s: 1}}", r"slo\.classes: names are added to it one by one: \+slo\.classes\.NAME="),
        ("observers={recorder: {path: x}}", r"observers takes names"),
        ("scheduler.watermrk=1", r"scheduler has no field watermrk \(did you mean watermark\?\); allowed: watermark"),
        ("allocator.blok=3", r"allocator=paged has no fields"),
        ("cache.blocks=3", r"cache has no field blocks.*allowed: block_size, num_blocks"),
        ("sede=1", r"no group or field sede \(did you mean seed\?\)"),
        ("num_blocks=8", r"no group or field num_blocks \(did you mean cache.num_blocks\?\)"),
        ("experimnt=chat", r"no group or field experimnt \(did you mean experiment\?\)"),
        ("allocator=[a", r"allocator=\[a: cannot be read as name=value"),
        ("hydra.foo=1", r"hydra.foo: Hydra has no such setting"),
        ("scheduler=a,b", r"Ambiguous value"),
        ("+allocator=paged", r"appears more than once"),
    ],
)
def test_what_does_not_compose_is_said_in_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compose([override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=-1", "seed=-1: allowed is a whole number from 0"),
        ("seed=x", "seed='x': allowed"),
        ("seed=true", "seed=True: allowed"),
        ("device=gpu", "device='gpu': allowed is auto | cpu | cuda"),
        ("dtype=int8", "dtype='int8': allowed is auto"),
        ("checks=none", "checks='none': allowed is cheap | full"),
        ("observer_errors=ignore", "observer_errors='ignore': allowed is raise | disable"),
        ("max_model_len=0", "max_model_len=0: allowed is a whole number from 1, or null"),
        ("max_num_seqs=0", "max_num_seqs=0: allowed"),
        ("max_num_batched_tokens=1.5", "max_num_batched_tokens=1.5: allowed"),
        ("num_threads=0", "num_threads=0: allowed"),
        ("trust=mine", "trust='mine': allowed is a list of module names"),
        ("trust=[a.b]", "trust="),
        ("cache.block_size=0", "cache.block_size=0: "),
        ("cache.block_size=x", "cache.block_size='x': "),
        ("cache.num_blocks=1", "cache.num_blocks=1: 'num_blocks' must be >= 2"),
        ("cache.memory_fraction=2", "cache.memory_fraction=2: "),
        ("cache.memory_fraction=nan", "cache.memory_fraction=nan: "),
        ("cache.swap_gb=x", "cache.swap_gb='x': allowed is a number, x >= 0"),
        ("cache.kv_dtype=int3", "cache.kv_dtype='int3': allowed is null"),
        ("cost.link_bytes_per_s=0", "cost.link_bytes_per_s=0: allowed is a number above 0"),
        ("cache=3", "cache=3: it must be a mapping"),
        ("+foo=1", "foo: there is no such field"),
        ("+cache.foo=1", "cache: no field foo"),
        ("~seed", "seed is missing"),
        ("seed=${nowhere}", "seed: Interpolation key 'nowhere' not found"),
    ],
)
def test_a_bad_root_field_is_named_with_its_value_and_what_is_allowed(override, message):
    with pytest.raises(ConfigError) as caught:
        check_root(compose([override]))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def build(kind, *overrides):
    config = compose([*FULL, *overrides])
    return instantiate(config[kind], option_name(config, kind))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheduler.watermark=-1", "scheduler.watermark=-1: 'watermark' must be >= 0"),
        ("scheduler.watermark=x", "scheduler.watermark='x': allowed is a number, x >= 0"),
        ("+scheduler.foo=1", "scheduler=chunked: no field foo"),
        ("scheduler._target_=os.system", "_target_='os.system' may not be built"),
        ("scheduler._target_=core.start.subprocess.Popen", "cannot import core.start.subprocess.Popen"),
        ("scheduler._target_=core.start.Path", "is no class of its own in there"),
        ("scheduler._target_=core.start.start", "is no class of its own in there"),
        ("scheduler._target_=core.nowhere.X", "cannot import core.nowhere.X: ModuleNotFoundError"),
        ("scheduler._target_=3", "may not be built"),
        ("scheduler.watermark=${nowhere}", "Interpolation key 'nowhere' not found"),
        ("scheduler.watermark={_target_: builtins.open}", "_target_='builtins.open' may not be built"),
        ("~scheduler._target_", "its YAML has no _target_"),
    ],
)
def test_a_bad_option_is_named(override, message):
    with pytest.raises(ConfigError) as caught:
        build("scheduler", override)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_nested_option_is_named_by_its_own_group():
    with pytest.raises(ConfigError, match="^model.path is missing: give model.path=VALUE$"):
        build("executor", "executor=torch", "model=path")


def test_trust_allows_a_module_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_trial.py").write_text("class Mine:\n    def __init__(self, a, **fields):\n        self.a = a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["scheduler._target_=my_trial.Mine", "+scheduler.a=[1,{b: 2}]"]
    with pytest.raises(ConfigError, match=r"may not be built.*trust=\[its_name\]"):
        build("scheduler", *words)
    built = build("scheduler", *words, "trust=[my_trial]")
    assert built.a == [1, {"b": 2}] and type(built.a) is list and type(built.a[1]) is dict
    del sys.modules["my_trial"]


def test_observers_add_up_each_with_its_own_fields():
    config = compose(["observers=[recorder]", "observers.recorder.path=x.jsonl"])
    assert list(config.observers) == ["recorder"] and config.observers.recorder.path == "x.jsonl"
    assert OmegaConf.to_container(compose().observers) == {}


def test_group_values_sees_sweeps():
    assert group_values(["a=1", "frontend=http,replay"], "frontend") == ["http", "replay"]
    assert group_values(["frontend=replay"], "frontend") == ["replay"]
    assert group_values([], "frontend") == []
