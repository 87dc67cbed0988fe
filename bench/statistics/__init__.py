"""Statistics over seeds: estimates with intervals, comparisons, and the rule of collapse.

Numbers and tables by seed come in; estimates with n come out. This folder imports no other folder of the suite.
"""
