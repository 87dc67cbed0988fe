"""The verdicts of the reference study on what papers claim.

Recorded runs come in; ``docs/claims.md`` with its tables and figures goes out. This folder may import every folder left
of it (docs/architecture.md), but not the command line.
"""
