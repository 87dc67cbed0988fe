"""The suite's losses and instruments on other people's trainers (integrations/README.md).

A trainer brings rollouts, optimizer and processes. The suite brings the loss, the routes and the columns, and writes a
run folder that ``steadymoe status`` and ``steadymoe report`` read.
"""
