"""Learners: anything with a `policy` and an `update(trajectory)`."""

from torchcmdp.learners.base import Learner
from torchcmdp.learners.dope import DOPE
from torchcmdp.learners.greedy import Greedy
from torchcmdp.learners.guarded import Guarded
from torchcmdp.learners.maops import MAOPS
from torchcmdp.learners.opt_cmdp import OptCMDP
from torchcmdp.learners.opt_primal_dual import OptPrimalDual
from torchcmdp.learners.pdbps import PDBPS
from torchcmdp.learners.sops import SOPS
from torchcmdp.learners.uobreps import UOBREPS
from torchcmdp.learners.wcops import WCOPS, Evidence

LEARNERS: dict[str, type[Learner]] = {
    "wc-ops": WCOPS,
    "uob-reps": UOBREPS,
    "opt-cmdp": OptCMDP,
    "greedy": Greedy,
    "opt-primal-dual": OptPrimalDual,
    "pdb-ps": PDBPS,
    "s-ops": SOPS,
    "ma-ops": MAOPS,
    "dope": DOPE,
}

__all__ = ["LEARNERS", "Evidence", "Guarded", "Learner"]
__all__ += ["DOPE", "Greedy", "MAOPS", "OptCMDP", "OptPrimalDual", "PDBPS", "SOPS", "UOBREPS", "WCOPS"]
