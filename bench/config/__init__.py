"""From the words of a command line to checked runs.

Hydra overrides come in; typed configs go out, each with its folder, its hash and the command that makes it again. A
wrong word is answered here, in one line, before anything is written. May import support, algorithms, models,
statistics and tasks.
"""
