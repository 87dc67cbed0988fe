"""Small services for every other folder: seeds, atomic files, processes, a clock, readers of Python source.

Plain values come in and go out. This folder imports no other folder of the suite.
"""
