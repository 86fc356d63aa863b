"""What a link allows: compute utilization, bytes, and the way of reducing that pays, before any machine is rented.

utilization.py    how long training waits for one synchronization, layer by layer
joint_run.py      what this package does on the wire, and the other ways of reducing
fleet.py          uneven and failing peers
command.py        `diloco simulate`: tables and a plot
forecast.py       the link's rows of `composer plan`
"""
