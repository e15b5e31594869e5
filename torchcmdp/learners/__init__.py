"""Learners: anything with a `policy` and an `update(trajectory)`."""

from torchcmdp.learners.base import Learner
from torchcmdp.learners.evidence import Evidence
from torchcmdp.learners.greedy import Greedy
from torchcmdp.learners.opt_cmdp import OptCMDP
from torchcmdp.learners.opt_primal_dual import OptPrimalDual
from torchcmdp.learners.pdbps import PDBPS
from torchcmdp.learners.uobreps import UOBREPS
from torchcmdp.learners.wcops import WCOPS

LEARNERS: dict[str, type[Learner]] = {
    "wc-ops": WCOPS,
    "uob-reps": UOBREPS,
    "opt-cmdp": OptCMDP,
    "greedy": Greedy,
    "opt-primal-dual": OptPrimalDual,
    "pdb-ps": PDBPS,
}

__all__ = ["LEARNERS", "Evidence", "Greedy", "Learner", "OptCMDP", "OptPrimalDual", "PDBPS", "UOBREPS", "WCOPS"]
