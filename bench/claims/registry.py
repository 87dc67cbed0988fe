"""All claims of papers about algorithms on MoE models, with the numbers that decide them and the gates they need.

These are the tables of docs/protocol.md as code. Outcomes and thresholds were fixed there before the runs, the gates
after the runs.
"""

from steadymoe.bench.claims import of_gspo, of_others

CLAIMS = tuple(sorted((*of_gspo.CLAIMS, *of_others.CLAIMS), key=lambda claim: claim.number))
# Experiments that hold only some of the arms that a claim compares.
COMPARED_ELSEWHERE = {
    name
    for claim in CLAIMS
    for name in (*claim.experiments, *(arm.experiment for arm in claim.arms))
    if name != "study"
}
