"""Limits that compiled code and torch share, most of the Newton solvers; apart from either, so that neither loads the other."""

# A potential moves by at most this in one step, and by twice as much after every step that was cut and did well: larger moves
# overshoot, and without growing ones a multiplier of a million would take ten thousand steps.
LONGEST_MOVE = 100.0
# Where less than this passes through a state, its own move is cut alone: noise there must not shorten everybody's step.
HARDLY_ANY = 1e-15
# Flow is conserved to this part of a state's own throughput, so that the policy is right in states that are almost never reached.
RELATIVE_TOLERANCE = 1e-7
# ... and to this where rounding stops the iteration early.
SETTLED_RELATIVE = 1e-4
# What still counts as solved when rounding stops the iteration before the requested tolerance.
ACCEPTABLE_RESIDUAL, ACCEPTABLE_GAP = 1e-9, 1e-8
# The gap of a solution grows with its multipliers; beyond this it is none.
LARGEST_GAP = 1e-3

# A step is doubled if the dual falls on it with this part of its first slope: with half of it a quadratic does.
WITHOUT_CURVATURE = 0.75
# Two roundings of one.
UNIT_ROUNDING = 4e-16
# Where the cap was raised, residuals are brought down to this, in so many steps at most.
POLISHED, MOST_POLISHED = 1e-15, 20

# Newton's method is given this many iterations from zero, and this many from the solution with a lower cap, before it is started
# again on a cooling schedule.
PLAIN_ITERATIONS, WARM_ITERATIONS = 30, 100

# A safe set is empty if every occupancy violates some constraint by more than this, in its unit ...
CERTAIN = 1e-12
# ... and where neither that nor a solution is found, the cap on the multipliers is raised up to this.
HIGHEST_CAP = 1e12

# The optimistic program: where no occupancy is safe, its constraints are relaxed to their least violation and this much more.
RELAXATION = 1e-7
# A violation of this size is rounding.
FEASIBILITY = 1e-10
# A pivot is worth making when it promises more than this, plus the rounding of multipliers of this relative size.
IMPROVEMENT, ROUNDING = 1e-11, 1e-14
# Entries of a direction below this cannot be pivots.
SMALLEST_PIVOT = 1e-11
# How far below zero the ratio test lets a variable go in favour of a larger pivot.
HAIR = 1e-12
# An episode is unsafe if the expected cost of some constraint exceeds this: zero, but for rounding.
UNSAFE_ABOVE = 1e-9
# A direction of the multipliers along which the Hessian is below this part of its diagonal does not change the solution.
DEPENDENT = 1e-10
# Stands for ln 0 where arithmetic with -inf would make NaN; what a reference leaves out is a tenth of it from possible.
NEVER = -1e30
# What the bounds of a pair leave to its free entries is one minus a sum near one: this much of it is rounding.
LEFT_BY_ROUNDING = 1e-15
