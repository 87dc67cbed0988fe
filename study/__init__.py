"""The verdicts of the reference study on what papers claim.

Recorded runs come in; ``study/claims.md`` with its tables and figures goes out. It runs from a clone, ``python -m
study``, and is no part of the package; nothing there imports it.
"""
