"""When the Newton solvers, the compiled one and the torch one, are content; apart from either, so that neither loads the other."""

# A potential moves by at most this in one step: larger moves overflow, much smaller ones stall when multipliers must grow.
LONGEST_MOVE = 100.0
# Flow is conserved to this part of a state's own throughput, so that the policy is right in states that are almost never reached.
RELATIVE_TOLERANCE = 1e-7
# ... and to this where rounding stops the iteration early.
SETTLED_RELATIVE = 1e-4
# What still counts as solved when rounding stops the iteration before the requested tolerance.
ACCEPTABLE_RESIDUAL, ACCEPTABLE_GAP = 1e-9, 1e-8

# Newton's method from zero is given this many iterations before it is started again on a cooling schedule.
PLAIN_ITERATIONS = 30
