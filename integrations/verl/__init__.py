"""The losses under the names by which verl's configuration chooses them (integrations/README.md).

Part of both builds, the losses alone and the integrations, so it imports ``steadymoe.algorithms`` and verl alone.
"""
