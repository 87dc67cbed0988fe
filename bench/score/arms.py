"""Arms and audited losses of the reference study at the standard's settings: ``study/experiments.yaml``."""

from steadymoe.bench.score.recorded import Arm, Audited

# Updates between the old policy and the audited weights (study/protocol.md).
DRIFT = 16

# The bands of GRPO and of GSPO in GSPO's paper: 2507.18071, section 5.1.
_GRPOS: dict[str, object] = {"algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.27}
_GSPOS: dict[str, object] = {"algorithm.loss.clip_low": 3e-4, "algorithm.loss.clip_high": 4e-4}
# conf/algorithm/grpo.yaml already has the paper's lower side.
_PAPERS: dict[str, object] = {"algorithm.loss.clip_high": 0.27}
_R2: dict[str, object] = {"routing": "r2"}

GRPO, GSPO = Arm("GRPO", "study", "grpo"), Arm("GSPO", "study", "gspo")
OTHERS = {name: Arm(name.upper(), "study", name) for name in ("vespo", "cispo", "sapo")}
UNCLIPPED, REINFORCE = Arm("GRPO unclipped", "study", "grpo_unclipped"), Arm("REINFORCE", "study", "reinforce")
# The policy stays at the cold start.
FROZEN = Arm("frozen", "study_frozen", "grpo", {"optimizer.learning_rate": 0.0})
CONTROLS = (FROZEN, UNCLIPPED, REINFORCE)
PAPERS = Arm("GRPO 0.2/0.27", "study_paper", "grpo", _PAPERS)
PAPERS_R2 = Arm("GRPO 0.2/0.27 + R2", "study_paper", "grpo", _PAPERS | _R2)
GSPO_R2 = Arm("GSPO + R2", "study_replay", "gspo", _R2)
WIDE = Arm("GSPO 0.2/0.27", "study_bands", "gspo", _GRPOS)
NARROW = Arm("GRPO 3e-4/4e-4", "study_bands", "grpo", _GSPOS)

# By the labels of the experiment study_audit.
AUDITED = {
    label: Audited(shown, "study_audit", label)
    for label, shown in (
        ("gspo", "GSPO"),
        ("grpo-paper", "GRPO 0.2/0.27"),
        ("gspo-grpo_band", "GSPO 0.2/0.27"),
        ("grpo-gspo_band", "GRPO 3e-4/4e-4"),
        ("vespo", "VESPO"),
        ("cispo", "CISPO"),
        ("sapo", "SAPO"),
    )
}
