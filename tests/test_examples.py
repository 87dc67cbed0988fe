"""The minimal loop trains as its algorithm and its metrics are defined."""

from dataclasses import replace
from pathlib import Path

import minimal_loop
import pytest
import torch

from steadymoe.algorithms import Batch, LossOutput, load
from steadymoe.bench.training.sampling import Rollout, roll_out

SHORT = {"steps": 2, "warm_up_updates": 30}
Seen = list[tuple[Batch, LossOutput]]


@pytest.fixture(scope="module")
def trained() -> tuple[list[dict[str, float]], Seen, list[Rollout]]:
    """The rows of a short loop, what its loss was given and returned in each update, and its rollouts."""
    seen: Seen = []
    rollouts: list[Rollout] = []

    def recording(name: str):
        loss = load(name)

        def call(batch: Batch) -> LossOutput:
            output = loss(batch)
            seen.append((replace(batch, logprobs_BT=batch.logprobs_BT.detach().clone()), output))
            return output

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal_loop, "load", recording)
        patch.setattr(minimal_loop, "roll_out", lambda *given: rollouts.append(roll_out(*given)) or rollouts[-1])
        return list(minimal_loop.train(**SHORT)), seen, rollouts


def test_the_first_update_of_a_rollout_is_on_policy_and_later_ones_are_not(trained) -> None:
    rows, *_ = trained
    assert [row["update"] for row in rows] == 2 * [1, 2, 3, 4]
    for row in rows:
        ratio = row["token_ratio_mean"], row["token_ratio_max"], row["token_ratio_variance"]
        if row["update"] == 1:
            assert (*ratio, row["clip_fraction"], row["expert_change_rate"]) == (1, 1, 0, 0, 0)
        else:
            assert row["token_ratio_max"] > 1
            assert row["token_ratio_variance"] > 0
            assert row["clip_fraction"] > 0
    # Two choices of experts may happen to be equal after one small update, but not in a whole rollout.
    for step in (1, 2):
        assert max(row["expert_change_rate"] for row in rows if row["step"] == step) > 0


def test_loss_is_gspo_on_the_advantages_of_each_responses_own_group(trained) -> None:
    rows, seen, rollouts = trained
    assert [row["loss"] for row in rows] == [load("gspo")(batch).loss.item() for batch, _ in seen]
    groups = minimal_loop.PROMPTS, minimal_loop.RESPONSES
    for step, rollout in enumerate(rollouts):
        batches = [batch for batch, _ in seen[step * minimal_loop.UPDATES : (step + 1) * minimal_loop.UPDATES]]
        scores_PG = rollout.scores_B.view(groups)
        expected_B = (scores_PG - scores_PG.mean(-1, keepdim=True)) / (scores_PG.std(-1, keepdim=True) + 1e-6)
        # A response of a mini-batch is known by its log-probabilities, which sampler and trainer agree on.
        old_BT = torch.cat([batch.get("old_logprobs_BT") for batch in batches])
        found_B = torch.cat([batch.advantages_BT[:, 0] for batch in batches])
        index_B = torch.cdist(old_BT, rollout.logprobs_BT).argmin(-1)
        torch.testing.assert_close(found_B, expected_B.flatten()[index_B], atol=1e-4, rtol=0)
        assert len(index_B.unique()) > len(index_B) / 2
        assert found_B.any()


@pytest.mark.check
def test_seed_determines_the_numbers(trained) -> None:
    rows, *_ = trained
    same, other = (list(minimal_loop.train(**SHORT | {"seed": seed, "steps": 1})) for seed in (0, 1))
    assert same == rows[:4] != other


@pytest.mark.check
def test_notebook_runs_and_keeps_its_outputs(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(Path(__file__).parents[1] / "examples" / "sweep.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len([*(tmp_path / "results" / "runs" / "notebook").rglob("run.json")]) == 8
