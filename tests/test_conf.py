"""A config is a file of its group or a row of the group's table; readers and Hydra find the same in both."""

from pathlib import Path

import hydra
import pytest
from fixtures import on_path, tutorial, write_all
from omegaconf import OmegaConf

from steadymoe import conf
from steadymoe.algorithms import load
from steadymoe.bench.runs import overrides

GROUPS = [group for group in conf.groups() if group != "experiment"]


@pytest.mark.parametrize("group", GROUPS)
def test_config_matches_hydras_composition(group: str) -> None:
    with overrides.composing():
        for name in conf.names(group):
            if conf.text(group, name).startswith("# @package _global_"):
                continue  # it sets fields of other groups too
            composed = OmegaConf.to_container(hydra.compose(f"{group}/{name}", return_hydra_config=False))
            assert composed == {group: conf.read(group, name)}, name


@pytest.mark.parametrize("group", conf.groups())
def test_config_names_are_unique(group: str) -> None:
    assert len(set(conf.names(group))) == len(conf.names(group))


def test_unknown_name_error_lists_the_known_ones() -> None:
    for group, name, known in (("engine", "fp4", "bf16"), ("model", "_micro", "deep")):
        with pytest.raises(ValueError, match=f"'{name}'.*{known}"):
            conf.text(group, name)


def test_changing_a_returned_config_does_not_change_the_source() -> None:
    for name in ("rspo_grpo", "grpo"):  # a row and a file
        before = conf.read("algorithm", name)
        changed = conf.read("algorithm", name)
        changed["loss"]["_target_"] = "another"
        changed["loss"].setdefault("host", {})["anchor"] = "rollout"
        assert conf.read("algorithm", name) == before


def test_loss_of_a_users_folder_loads_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tutorial()
    write_all(tmp_path, {name: files[name] for name in ("my_losses.py", "conf/algorithm/half_clipped.yaml")})
    write_all(tmp_path, {"conf/algorithm/narrow.yaml": "defaults: [gspo, _self_]\nloss: {clip_low: 1.0e-5}\n"})
    with pytest.raises(ValueError, match="unknown algorithm 'half_clipped'"):
        load("half_clipped")
    on_path(monkeypatch, tmp_path, "my_losses")
    assert type(load("half_clipped", clip_high=0.3)).__module__ == "my_losses"
    assert load("narrow") == load("gspo", clip_low=1e-5)
