"""From command-line arguments to runs on disk.

Hydra overrides come in. ``compose`` makes checked runs of them, each with its folder, its hash and the command that
makes it again; an invalid argument fails with one line before anything is written. Then runs are planned, launched,
executed, recorded and resumed, and have a status: run folders below ``results/runs`` go out.
"""
