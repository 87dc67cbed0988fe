"""``steadymoe calibrate``: a thermometer that lays numbers of a model beside the published numbers of real models.

A checked config comes in; readings with intervals, the published ranges beside them, a figure and a page go out.
"""
