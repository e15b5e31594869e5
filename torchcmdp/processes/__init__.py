"""Where rewards and costs come from: a process has a mean for every pair and episode, and turns visits into feedback."""

from torchcmdp.processes.adversary import OGDAdversary, safe_caps
from torchcmdp.processes.base import Process
from torchcmdp.processes.sequences import Bernoulli, Cyclic, Fixed, Recorder, Replay, Switching

__all__ = ["Bernoulli", "Cyclic", "Fixed", "OGDAdversary", "Process", "Recorder", "Replay", "Switching", "safe_caps"]
