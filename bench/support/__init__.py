"""What every other folder may lean on: seeds, files that appear whole or not at all, processes, a clock, external code.

Nothing of the suite comes in. This folder imports no other folder of the suite.
"""
