"""The reference study: what papers claim, the arms that were run, and the verdicts."""
