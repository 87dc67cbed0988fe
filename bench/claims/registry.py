"""All claims of papers about algorithms on MoE models, with the numbers that decide them and the gates they need.

These are the tables of docs/protocol.md as code. Outcomes, thresholds and gates were fixed there before the runs.
"""

from steadymoe.bench.claims import arms, designs, of_gspo, of_others, testbed

CLAIMS = tuple(sorted((*of_gspo.CLAIMS, *of_others.CLAIMS), key=lambda claim: claim.number))
# Experiments that hold only some of the arms that a claim, a gate or a design compares.
COMPARED_ELSEWHERE = {
    *(name for claim in CLAIMS for name in claim.experiments),
    *(arm.experiment for arm in (*testbed.ARMS, *designs.ARMS)),
    *(arm.experiment for of in arms.STALENESS.values() for arm in of.values()),
    "study_frozen",
    "gates_trunk",
} - {"study"}
