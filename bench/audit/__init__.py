"""``steadymoe audit``: every algorithm's gradient on the same frozen rollouts.

A checked config comes in; estimates of each algorithm's mean gradient and of its noise, with intervals, go out.
"""
